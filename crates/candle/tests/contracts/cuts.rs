use crate::common::{SIZES, bits, random, ranks};
use brigade_candle::{ColumnParallelLinear, Parallel, RowParallelLinear, brigade_error, cut};
use candle_core::{
    DType, Device, Module, Result, Tensor,
    safetensors::{MmapedSafetensors, save},
};
use std::collections::HashMap;

#[test]
fn shares_cover_everything_once_and_differ_by_one_unit_at_most() {
    for unit in [1, 3, 64] {
        for units in 0..20 {
            for size in 1..=9 {
                let shares: Vec<_> = (0..size)
                    .map(|rank| cut::share(units * unit, unit, size, rank).unwrap())
                    .collect();
                let mut next = 0;
                for share in &shares {
                    assert_eq!((share.start, share.len() % unit), (next, 0));
                    next = share.end;
                }
                assert_eq!(next, units * unit);
                let widths = || shares.iter().map(ExactSizeIterator::len);
                let spread = widths().max().unwrap() - widths().min().unwrap();
                assert!(spread <= unit);
            }
        }
    }
}

#[test]
fn what_cannot_be_cut_is_told() {
    for (total, unit, size, rank, told) in [
        (10, 1, 2, 2, "rank: got 2, wanted a rank below 2"),
        (10, 4, 2, 0, "total: got 10, wanted a multiple of 4"),
        (10, 0, 2, 0, "total: got 10, wanted a multiple of 0"),
        (0, 1, 0, 0, "rank: got 0, wanted a rank below 0"),
    ] {
        let error = cut::share(total, unit, size, rank).unwrap_err();
        assert_eq!(brigade_error(&error).unwrap().to_string(), told);
    }
}

#[test]
fn parts_of_a_tensor_make_the_tensor_again() {
    let full = random(&[7, 10], DType::BF16);
    for size in SIZES {
        for dim in [0, 1] {
            let parts = ranks(size, |p| cut::tensor(p, &full, dim));
            assert!(parts.iter().all(Tensor::is_contiguous));
            assert_eq!(bits(&Tensor::cat(&parts, dim).unwrap()), bits(&full));
        }
    }
}

#[test]
fn fused_weights_are_cut_one_by_one() {
    // Three heads of 2 for queries, one for keys, one for values.
    let full = random(&[10, 4], DType::F32);
    let parts = ranks(2, |p| cut::fused(p, &full, 0, &[6, 2, 2], 2));
    let of = |rows: &[usize]| {
        let rows: Vec<_> = rows
            .iter()
            .map(|&r| full.narrow(0, r, 1).unwrap())
            .collect();
        bits(&Tensor::cat(&rows, 0).unwrap())
    };
    assert_eq!(bits(&parts[0]), of(&[0, 1, 2, 3, 6, 7, 8, 9]));
    assert_eq!(bits(&parts[1]), of(&[4, 5]));
    let refused = ranks(2, |p| Ok(cut::fused(p, &full, 0, &[6, 2], 2).is_err()));
    assert_eq!(refused, [true, true]);
}

/// A safetensors file that goes with the test.
struct File(std::path::PathBuf);

impl File {
    fn new(tensors: &[(&str, &Tensor)]) -> Self {
        let name = format!(
            "brigade-candle-{}-{:x}",
            std::process::id(),
            rand::random::<u64>()
        );
        let path = std::env::temp_dir().join(name);
        let tensors: HashMap<&str, Tensor> =
            tensors.iter().map(|&(name, t)| (name, t.clone())).collect();
        save(&tensors, &path).unwrap();
        Self(path)
    }

    fn open(&self) -> MmapedSafetensors {
        // SAFETY: nobody changes the file while the test runs.
        unsafe { MmapedSafetensors::new(&self.0) }.unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_part_is_read_from_safetensors_as_it_is_cut_from_a_tensor() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (weight, bias) = (random(&[5, 6], dtype), random(&[5], dtype));
        let file = File::new(&[("up.weight", &weight), ("up.bias", &bias)]);
        let files = file.open();
        for size in [1, 3, 7] {
            ranks(size, |p| {
                for dim in [0, 1] {
                    let read = cut::load(p, &files, "up.weight", dim)?;
                    let want = cut::tensor(p, &weight, dim)?;
                    assert_eq!((read.dims(), read.dtype()), (want.dims(), dtype));
                    assert_eq!(bits(&read), bits(&want));
                }
                let read = cut::load(p, &files, "up.bias", 0)?;
                assert_eq!(bits(&read), bits(&cut::tensor(p, &bias, 0)?));
                assert!(cut::load(p, &files, "up.weight", 2).is_err());
                assert!(cut::load(p, &files, "up.bias", 1).is_err());
                assert!(cut::load(p, &files, "down.weight", 0).is_err());
                Ok(())
            });
        }
    }
}

#[test]
fn layers_from_files_are_layers_from_tensors() {
    let (weight, bias) = (random(&[5, 6], DType::F32), random(&[5], DType::F32));
    let with = File::new(&[("l.weight", &weight), ("l.bias", &bias)]);
    let without = File::new(&[("l.weight", &weight)]);
    let x = random(&[4, 6], DType::F32);
    for (file, bias) in [(&with, Some(&bias)), (&without, None)] {
        let files = file.open();
        ranks(3, |p: &Parallel| -> Result<()> {
            let read = ColumnParallelLinear::load(p, &files, "l")?;
            let made = ColumnParallelLinear::new(p, &weight, bias)?;
            assert_eq!(bits(&read.forward(&x)?), bits(&made.forward(&x)?));
            let own = cut::tensor(p, &x, 1)?;
            let read = RowParallelLinear::load(p, &files, "l")?;
            let made = RowParallelLinear::new(p, &weight, bias)?;
            assert_eq!(bits(&read.forward(&own)?), bits(&made.forward(&own)?));
            assert_eq!(read.weight().device().location(), Device::Cpu.location());
            Ok(())
        });
    }
}
