//! Slices of shapes, buffers, views and quantized tensors lie where they should, and never past the end.
#![allow(clippy::unwrap_used)]

mod common;

use brigade_device::*;
use common::*;
use std::sync::Arc;

#[test]
fn shapes() {
    let s = Shape::new(&[2, 3, 4]).unwrap();
    assert_eq!(
        (s.len(), s.rows(), s.row_len(), s.columns()),
        (24, 2, 12, 4)
    );
    assert_eq!(format!("{s} {s:?}"), "[2, 3, 4] [2, 3, 4]");
    let scalar = Shape::new(&[]).unwrap();
    let sizes = (
        scalar.len(),
        scalar.rows(),
        scalar.row_len(),
        scalar.columns(),
    );
    assert_eq!(sizes, (1, 1, 1, 1));
    let empty = Shape::new(&[0, 5]).unwrap();
    assert!(empty.is_empty() && empty.rows() == 0 && empty.row_len() == 5);
    assert_eq!(Shape::new(&[1; 6]).unwrap().dims(), [1; 6]);
    assert!(Shape::new(&[1; 7]).is_err());
    // A zero must not hide the overflow of the others, since slices of them would have it.
    for dims in [[usize::MAX, 2], [0, usize::MAX], [1 << 40, 1 << 40]] {
        assert!(Shape::new(&dims).is_err(), "{dims:?}");
    }
    // Shapes of equal dimensions are equal, however they came to be.
    let b = plain(&[4, 3]).index(1).unwrap();
    assert_eq!(b.shape(), Shape::new(&[3]).unwrap());
}

#[test]
fn a_buffer_covers_its_part_of_the_storage() {
    let shape = Shape::new(&[2, 3]).unwrap();
    let whole = Buffer::new(storage(12), DataType::F16, shape).unwrap();
    assert_eq!(
        (whole.bytes(), whole.offset_bytes(), whole.address()),
        (12, 0, ADDRESS)
    );
    assert!(Buffer::new(storage(11), DataType::F16, shape).is_err());
    let later = Buffer::at(storage(16), 4, DataType::F16, shape).unwrap();
    assert_eq!((later.offset_bytes(), later.address()), (4, ADDRESS + 4));
    for offset in [1, 6, usize::MAX - 1] {
        assert!(
            Buffer::at(storage(16), offset, DataType::F16, shape).is_err(),
            "{offset}"
        );
    }
    let nothing = Shape::new(&[0, 3]).unwrap();
    assert!(Buffer::at(storage(4), 4, DataType::F16, nothing).is_ok());
}

#[test]
fn slices_of_a_buffer() {
    let b = buffer(DataType::F32, &[5, 3]);
    // (offset, rows): where it starts, in bytes.
    for (offset, rows, start) in [(0, 5, 0), (2, 3, 24), (4, 1, 48), (5, 0, 60), (0, 0, 0)] {
        let s = b.slice(offset, rows).unwrap();
        assert_eq!(
            (s.shape().dims(), s.offset_bytes()),
            (&[rows, 3][..], start)
        );
        assert_eq!(s.bytes(), rows * 12);
        let v = b.view().rows(offset..offset + rows).unwrap();
        assert_eq!((v.shape(), v.address()), (s.shape(), s.address()));
    }
    for (offset, rows) in [(0, 6), (5, 1), (6, 0), (usize::MAX, 1), (1, usize::MAX)] {
        assert!(b.slice(offset, rows).is_err(), "{offset} {rows}");
    }
    #[expect(clippy::reversed_empty_ranges)]
    let backwards = b.view().rows(3..2);
    assert!(backwards.is_err());
    let inner = b.slice(1, 3).unwrap().slice(1, 1).unwrap();
    assert_eq!(inner.offset_bytes(), 24, "offsets add up");
    assert!(
        b.slice(1, 3).unwrap().slice(2, 2).is_err(),
        "not past the slice"
    );
    assert!(Arc::ptr_eq(inner.storage(), b.storage()), "one allocation");
}

#[test]
fn index_and_reshape() {
    let b = buffer(DataType::I64, &[2, 3, 4]);
    let row = b.index(1).unwrap();
    assert_eq!((row.shape().dims(), row.offset_bytes()), (&[3, 4][..], 96));
    let element = row.index(2).unwrap().index(3).unwrap();
    assert_eq!(
        (element.shape().dims(), element.offset_bytes()),
        (&[][..], 96 + 88)
    );
    assert!(element.index(0).is_err() && b.index(2).is_err());
    assert!(element.slice(0, 1).is_err(), "a scalar has no rows to cut");
    assert_eq!(b.reshape(&[6, 4]).unwrap().shape().dims(), [6, 4]);
    assert_eq!(row.reshape(&[12]).unwrap().offset_bytes(), 96);
    assert!(b.reshape(&[5, 5]).is_err());
    assert!(b.expect_type::<i64>("b").is_ok() && b.expect_type::<f64>("b").is_err());
}

#[test]
fn views_for_writing() {
    let mut b = buffer(DataType::F32, &[4, 2]);
    let mut v = b.view_mut();
    {
        let mut part = v.rows(1..3).unwrap();
        assert_eq!(part.as_view().address(), ADDRESS + 8);
        assert_eq!(part.reshape(&[4]).unwrap().shape().dims(), [4]);
        assert!(part.rows(1..3).is_err());
    }
    assert_eq!(v.reborrow().shape().dims(), [4, 2]);
    assert_eq!((v.dtype(), v.memory()), (DataType::F32, MemoryType::Device));
    let kept = v.as_view().retain();
    drop(b);
    assert_eq!(kept.shape().dims(), [4, 2]);
}

#[test]
fn adopted_memory_keeps_its_owner_until_the_last_slice_is_gone() {
    let owner = Arc::new(vec![0f32; 6]);
    let address = owner.as_ptr() as u64;
    let adopt = |address| {
        // SAFETY: six floats, kept by the owner; nothing reads or writes them here.
        unsafe {
            Buffer::adopt(
                address,
                MemoryType::Host,
                DataType::F32,
                &[3, 2],
                owner.clone(),
            )
        }
    };
    let b = adopt(address).unwrap();
    assert_eq!(
        (b.address(), b.bytes(), b.memory()),
        (address, 24, MemoryType::Host)
    );
    let slice = b.slice(2, 1).unwrap();
    drop(b);
    assert_eq!(Arc::strong_count(&owner), 2);
    drop(slice);
    assert_eq!(Arc::strong_count(&owner), 1);
    assert!(adopt(0).is_err() && adopt(address + 2).is_err());
}

fn quantized(scheme: QScheme, dims: &[usize], scales: &[usize], zeros: bool) -> Result<QBuffer> {
    let kernel = buffer(scheme.kernel_type().unwrap(), dims);
    let part = || buffer(DataType::F32, scales);
    QBuffer::new(kernel, part(), zeros.then(part), scheme)
}

#[test]
fn a_slice_takes_scales_and_zeros_of_its_rows_along() {
    let q = quantized(QScheme::Int8PerToken, &[6, 8], &[6], true).unwrap();
    for (offset, rows) in [(0, 6), (2, 3), (5, 1), (6, 0)] {
        let s = q.slice(offset, rows).unwrap();
        assert_eq!(s.kernel().offset_bytes(), offset * 8);
        for part in [s.scales(), s.zeros().unwrap()] {
            assert_eq!(
                (part.shape().rows(), part.offset_bytes()),
                (rows, offset * 4)
            );
        }
        // The original dropped the zero of the last row.
        assert_eq!(s.zeros().unwrap().shape(), s.scales().shape());
        let v = q.view().rows(offset..offset + rows).unwrap();
        assert_eq!(
            v.retain().scales().offset_bytes(),
            s.scales().offset_bytes()
        );
    }
    for (offset, rows) in [(0, 7), (6, 1), (7, 0), (1, usize::MAX)] {
        assert!(q.slice(offset, rows).is_err(), "{offset} {rows}");
    }
    let blocks = quantized(QScheme::Fp8PerTokenBlock, &[4, 300], &[4, 3], false).unwrap();
    let s = blocks.slice(1, 2).unwrap();
    assert_eq!(
        (s.scales().shape().dims(), s.scales().offset_bytes()),
        (&[2, 3][..], 12)
    );
    assert!(s.zeros().is_none());
}

#[test]
fn which_slice_goes_with_which_scheme() {
    let cases = [
        (QScheme::Int8PerToken, &[4][..], true),
        (QScheme::Fp8PerTokenBlock, &[4, 2], true),
        (QScheme::Int8PerTensor, &[1], false),
        (QScheme::Fp8PerTensor, &[1], false),
        (QScheme::Int8WeightOnly, &[256], false),
    ];
    for (scheme, scales, per_row) in cases {
        let q = quantized(scheme, &[4, 256], scales, false).unwrap();
        assert_eq!(q.slice(1, 2).is_ok(), per_row, "{scheme:?}");
        assert_eq!(q.slice_per_tensor(1, 2).is_ok(), !per_row, "{scheme:?}");
        assert_eq!(scheme.per_row(), per_row);
        // A view cuts what goes with rows, and keeps what does not.
        let rows = q.view().rows(1..3).unwrap();
        let want = if per_row { 2 } else { scales[0] };
        assert_eq!(rows.scales().shape().rows(), want, "{scheme:?}");
    }
    let one = quantized(QScheme::Fp8PerTensor, &[4, 2], &[1], true).unwrap();
    let part = one.slice_per_tensor(3, 1).unwrap();
    assert_eq!(
        (part.kernel().offset_bytes(), part.scales().shape().len()),
        (6, 1)
    );
    assert_eq!(part.zeros().unwrap().shape().len(), 1);
    assert!(one.slice_per_tensor(3, 2).is_err());
}

#[test]
fn operands() {
    let q = quantized(QScheme::Int8PerToken, &[4, 8], &[4], false).unwrap();
    let p = plain(&[4, 8]);
    let (quantized, plain) = (Operand::Quantized(q.view()), Operand::from(&p));
    assert_eq!(quantized.shape(), plain.shape());
    assert_eq!(
        (quantized.scheme(), plain.scheme()),
        (QScheme::Int8PerToken, QScheme::None)
    );
    assert_eq!(
        (quantized.dtype(), plain.dtype()),
        (DataType::I8, DataType::BF16)
    );
    assert_eq!(
        quantized.rows(3..4).unwrap().kernel().address(),
        ADDRESS + 24
    );
    assert_eq!(plain.rows(3..4).unwrap().kernel().address(), ADDRESS + 48);
    assert!(plain.rows(3..5).is_err() && quantized.rows(3..5).is_err());
    assert!(plain.plain("a").is_ok());
    let refused = quantized.plain("a").unwrap_err();
    assert_eq!(
        refused.to_string(),
        "a is quantized (Int8PerToken); pass floating-point values here"
    );
}
