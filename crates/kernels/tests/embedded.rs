//! What the build embedded, and the layout that both languages rely on.

use brigade_kernels::{
    FillParams, PostParams, WaitParams, available, compiler, fatbin, kernels, layouts,
};
use std::mem::{align_of, offset_of, size_of};

#[test]
fn parameter_structs_have_the_written_sizes_and_offsets() {
    assert_eq!((size_of::<FillParams>(), align_of::<FillParams>()), (24, 8));
    assert_eq!(offset_of!(FillParams, bytes), 8);
    assert_eq!(offset_of!(FillParams, pattern), 16);
    assert_eq!(
        (size_of::<PostParams>(), offset_of!(PostParams, delay_ns)),
        (24, 16)
    );
    assert_eq!((size_of::<WaitParams>(), align_of::<WaitParams>()), (72, 8));
    assert_eq!(offset_of!(WaitParams, timeout_ns), 40);
    assert_eq!(offset_of!(WaitParams, operation), 56);
    assert_eq!(offset_of!(WaitParams, slot), 68);
}

#[test]
fn parameter_structs_hold_no_padding() {
    for layout in layouts() {
        let fields: usize = layout
            .fields
            .iter()
            .map(|f| {
                let extent = f.extent.trim_matches(['[', ']']);
                let count = if extent.is_empty() {
                    1
                } else {
                    extent.parse().unwrap_or(0)
                };
                count * if f.c_type == "uint64_t" { 8 } else { 4 }
            })
            .sum();
        assert_eq!(fields, layout.bytes, "{}", layout.name);
    }
}

#[test]
fn the_header_asserts_every_offset() {
    let header = brigade_kernels::header();
    for layout in layouts() {
        assert!(header.contains(&format!(
            "static_assert(sizeof({}) == {}",
            layout.name, layout.bytes
        )));
        for field in layout.fields {
            let (name, offset) = (field.name, field.offset);
            let line = format!("offsetof({}, {name}) == {offset}", layout.name);
            assert!(header.contains(&line), "{line}");
        }
    }
}

#[test]
fn kernels_are_all_there_and_aligned_or_all_absent_with_a_reason() {
    assert_eq!(available(), compiler().is_some());
    // Asked for, it must have been heard: these tests are run with it, too.
    let asked = std::env::var_os("NVCC").is_some_and(|nvcc| nvcc == "none");
    assert!(!(asked && available()), "kernels in spite of NVCC=none");
    if !available() {
        assert!(kernels().is_empty());
        let missing = fatbin("fill").expect_err("no kernels");
        assert!(!missing.why.is_empty(), "{missing}");
        assert!(!asked || missing.why.contains("NVCC=none"), "{missing}");
        return;
    }
    for name in [
        "fill",
        "probe",
        "convert",
        "transpose",
        "finish",
        "quantize",
        "int8",
        "grouped",
        "residual_norm",
        "silu_mul",
        "top_k",
    ] {
        let found = fatbin(name).expect("embedded");
        assert_eq!(found.bytes.as_ptr() as usize % 16, 0, "{name}");
        // The magic number of a fatbin.
        assert_eq!(found.bytes[..4], [0x50, 0xed, 0x55, 0xba], "{name}");
    }
    assert_eq!(
        fatbin("nothing").expect_err("no such file").why,
        "there is no such file"
    );
}
