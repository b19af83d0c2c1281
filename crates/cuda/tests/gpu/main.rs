//! What the conformance suite does not see of a GPU. On a host without one, opening says what is missing; with
//! BRIGADE_TEST_DEVICE=cuda a GPU must be there. One program, so that kernels are in one only.
#![allow(clippy::unwrap_used, reason = "tests panic on what is not as promised")]

mod captures;
mod common;
mod device;
mod ipc;
mod planted;
mod probe;
mod symmetric;
mod tables;
