//! Any bytes, read as the frames of a peer. The property is the one that brigade-group's tests check.
#![no_main]

#[path = "../../crates/group/tests/common/frame_property.rs"]
mod frame_property;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    frame_property::check(bytes);
});
