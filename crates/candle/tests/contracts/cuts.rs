use super::{
    Hold, Theme, World,
    oracle::{FLOATS, bits, cat, put, random, values},
};
use brigade_candle::{ColumnParallelLinear, RowParallelLinear, brigade_error, cut};
use candle_core::{
    DType, Module, Tensor,
    safetensors::{MmapedSafetensors, save},
};
use std::collections::HashMap;

pub const THEMES: &[Theme] = &[
    Theme {
        name: "cuts",
        sizes: 1..=1,
        hold: Hold::OnHost,
        contracts: contracts![
            shares_cover_everything_once_and_differ_by_one_unit_at_most,
            what_cannot_be_cut_is_told,
        ],
    },
    Theme {
        name: "cuts",
        sizes: 1..=4,
        hold: Hold::Everywhere,
        contracts: contracts![
            parts_of_a_tensor_make_the_tensor_again,
            fused_weights_are_cut_one_by_one,
            a_part_is_read_from_safetensors_as_it_is_cut_from_a_tensor,
            layers_from_files_are_layers_from_tensors,
        ],
    },
];

fn shares_cover_everything_once_and_differ_by_one_unit_at_most(_: &World) {
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

fn what_cannot_be_cut_is_told(_: &World) {
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

fn parts_of_a_tensor_make_the_tensor_again(world: &World) {
    let full = random(&[7, 10], DType::BF16);
    let parts = world.ranks(|p| {
        let full = put(p, &full)?;
        Ok([cut::tensor(p, &full, 0)?, cut::tensor(p, &full, 1)?])
    });
    for dim in [0, 1] {
        let parts: Vec<_> = parts.iter().map(|parts| parts[dim].clone()).collect();
        assert!(parts.iter().all(Tensor::is_contiguous));
        assert_eq!(bits(&cat(&parts, dim)), bits(&full));
    }
}

fn fused_weights_are_cut_one_by_one(world: &World) {
    // Three heads of 2 for queries, one for keys, one for values.
    let full = random(&[10, 4], DType::F32);
    let parts = world.ranks(|p| {
        let full = put(p, &full)?;
        assert!(cut::fused(p, &full, 0, &[6, 2], 2).is_err());
        cut::fused(p, &full, 0, &[6, 2, 2], 2)
    });
    let rest = [6, 7, 8, 9];
    let rows: &[&[usize]] = match world.size {
        1 => &[&[0, 1, 2, 3, 4, 5]],
        2 => &[&[0, 1, 2, 3], &[4, 5]],
        3 => &[&[0, 1], &[2, 3], &[4, 5]],
        _ => &[&[0, 1], &[2, 3], &[4, 5], &[]],
    };
    for (rank, (part, queries)) in parts.iter().zip(rows).enumerate() {
        let others: &[usize] = if rank == 0 { &rest } else { &[] };
        let all = queries.iter().chain(others);
        let rows: Vec<f64> = all
            .flat_map(|&row| values(&full.narrow(0, row, 1).unwrap()))
            .collect();
        assert_eq!(part.dims(), [rows.len() / 4, 4]);
        assert_eq!(values(part), rows);
    }
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

fn a_part_is_read_from_safetensors_as_it_is_cut_from_a_tensor(world: &World) {
    for dtype in FLOATS {
        let (weight, bias) = (random(&[3, 6], dtype), random(&[3], dtype));
        let file = File::new(&[("up.weight", &weight), ("up.bias", &bias)]);
        let files = file.open();
        world.ranks(|p| {
            let (weight, bias) = (put(p, &weight)?, put(p, &bias)?);
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

fn layers_from_files_are_layers_from_tensors(world: &World) {
    let (n, k) = (world.features(5), world.features(6));
    let (weight, bias) = (random(&[n, k], DType::F32), random(&[n], DType::F32));
    let with = File::new(&[("l.weight", &weight), ("l.bias", &bias)]);
    let without = File::new(&[("l.weight", &weight)]);
    let x = random(&[4, k], DType::F32);
    for (file, bias) in [(&with, Some(&bias)), (&without, None)] {
        let files = file.open();
        world.ranks(|p| {
            let (weight, x) = (put(p, &weight)?, put(p, &x)?);
            let bias = bias.map(|bias| put(p, bias)).transpose()?;
            let read = ColumnParallelLinear::load(p, &files, "l")?;
            let made = ColumnParallelLinear::new(p, &weight, bias.as_ref())?;
            assert_eq!(bits(&read.forward(&x)?), bits(&made.forward(&x)?));
            let own = cut::tensor(p, &x, 1)?;
            let read = RowParallelLinear::load(p, &files, "l")?;
            let made = RowParallelLinear::new(p, &weight, bias.as_ref())?;
            assert_eq!(bits(&read.forward(&own)?), bits(&made.forward(&own)?));
            assert!(read.weight().device().same_device(p.place()));
            Ok(())
        });
    }
}
