//! What must compile, and does with this program.
#![allow(dead_code)]

mod d_lives_on;
mod gathered_until_the_next_call;
mod resident_chunk;
mod two_low_latency_results;
