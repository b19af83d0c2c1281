use crate::common::{FLOATS, SIZES, Want, bits, close, random, ranks, tolerance, values};
use brigade_candle::{AllReduce, Residual, ResidualNorm, brigade::ReduceOp};
use candle_core::{DType, Device, Result, Tensor};

/// In rank order in f32, with one rounding, as Brigade promises it.
fn in_order(parts: &[Tensor], dtype: DType) -> Result<Tensor> {
    let mut sum = parts[0].to_dtype(DType::F32)?;
    for part in &parts[1..] {
        sum = (sum + part.to_dtype(DType::F32)?)?;
    }
    sum.to_dtype(dtype)
}

#[test]
fn all_reduce_gives_every_rank_the_same_bits_as_candle_on_one_device() {
    for (size, dtype) in SIZES.flat_map(|s| FLOATS.map(|d| (s, d))) {
        for dims in [&[1][..], &[7], &[3, 5], &[2, 3, 4], &[0, 4], &[2000, 3]] {
            let parts: Vec<_> = (0..size).map(|_| random(dims, dtype)).collect();
            let want = in_order(&parts, dtype).unwrap();
            let got = ranks(size, |p| {
                let x = &parts[p.rank()];
                let made = p.all_reduce(x)?;
                // In place of a tensor of its own.
                let own = x.force_contiguous()?;
                own.inplace_op1(&AllReduce::sum(p))?;
                Ok([made, own])
            });
            for tensor in got.iter().flatten() {
                assert_eq!(tensor.dims(), dims);
                assert_eq!(bits(tensor), bits(&want), "{size} {dtype:?} {dims:?}");
            }
        }
    }
}

/// The new residual and the norm of it, in f64.
fn normed(parts: &[Tensor], residual: &Tensor, weight: &Tensor, eps: f64) -> [Want; 2] {
    let mut sums = Want::plain(vec![0.0; residual.elem_count()]);
    for addend in parts.iter().chain([residual]) {
        let addends = values(addend).into_iter().enumerate();
        addends.for_each(|(at, x)| sums.add(at, x));
    }
    let weight = values(weight);
    let mut rows = sums.clone();
    let width = weight.len().max(1);
    let squares = rows.squares.chunks_mut(width);
    for (row, squares) in rows.values.chunks_mut(width).zip(squares) {
        let mean = row.iter().map(|s| s * s).sum::<f64>() / row.len() as f64;
        let factor = (mean + eps).sqrt().recip();
        for ((s, square), w) in row.iter_mut().zip(squares).zip(&weight) {
            *s *= factor * w;
            *square *= (factor * w).powi(2);
        }
    }
    [sums, rows]
}

#[test]
fn a_residual_and_a_norm_come_with_the_sum() {
    for (size, dtype) in SIZES.flat_map(|s| FLOATS.map(|d| (s, d))) {
        for dims in [&[1, 8][..], &[5, 24], &[2, 3, 16], &[0, 8], &[64, 136]] {
            let parts: Vec<_> = (0..size).map(|_| random(dims, dtype)).collect();
            let (old, weight) = (random(dims, dtype), random(&dims[dims.len() - 1..], dtype));
            let before = bits(&old);
            let got = ranks(size, |p| {
                let norm = ResidualNorm::new(&weight, 1e-5)?;
                p.all_reduce_norm(&parts[p.rank()], &old, &norm)
            });
            let want = normed(&parts, &old, &weight, 1e-5);
            for Residual { sum, normed } in &got {
                let case = format!("{size} {dtype:?} {dims:?}");
                assert_eq!([sum.dims(), normed.dims()], [dims, dims]);
                close(sum, &want[0], tolerance(dtype), &case);
                close(normed, &want[1], 2.0 * tolerance(dtype), &case);
                assert_eq!(bits(sum), bits(&got[0].sum), "{case}");
                assert_eq!(bits(normed), bits(&got[0].normed), "{case}");
            }
            assert_eq!(bits(&old), before, "the residual before stays as it is");
        }
    }
}

#[test]
fn residuals_and_weights_that_do_not_fit_are_named() {
    ranks(2, |p| {
        let x = random(&[3, 8], DType::F32);
        let norm = ResidualNorm::new(&random(&[8], DType::F32), 1e-5)?;
        let refused = |told: candle_core::Error, field: &str| {
            let told = told.to_string();
            assert!(told.contains(field), "{told}");
        };
        let other = random(&[3, 7], DType::F32);
        refused(
            p.all_reduce_norm(&x, &other, &norm).unwrap_err(),
            "residual",
        );
        let narrow = ResidualNorm::new(&random(&[7], DType::F32), 1e-5)?;
        refused(p.all_reduce_norm(&x, &x, &narrow).unwrap_err(), "weight");
        let matrix = ResidualNorm::new(&x, 1e-5);
        refused(matrix.unwrap_err(), "weight");
        // The group goes on.
        p.all_reduce_norm(&x, &x, &norm).map(drop)
    });
}

#[test]
fn inputs_may_lie_anyhow_and_stay_as_they_are() {
    let wide = random(&[6, 8], DType::F32);
    let part = wide.narrow(0, 2, 3).unwrap();
    let turned = wide.t().unwrap();
    let before = bits(&wide);
    ranks(3, |p| {
        for x in [&part, &turned] {
            let got = p.all_reduce(x)?;
            let want: Vec<f64> = values(x).iter().map(|&v| thrice(v)).collect();
            assert_eq!(values(&got), want);
        }
        Ok(())
    });
    assert_eq!(bits(&wide), before);
}

fn thrice(v: f64) -> f64 {
    let v = v as f32;
    f64::from(v + v + v)
}

#[test]
fn in_place_changes_what_the_layout_covers_and_nothing_else() {
    let whole = random(&[4, 3], DType::F32);
    let want = values(&whole);
    let got = ranks(2, |p| {
        let own = whole.force_contiguous()?;
        own.narrow(0, 1, 2)?.inplace_op1(&AllReduce::sum(p))?;
        Ok(own)
    });
    for own in got {
        for (i, (got, want)) in values(&own).into_iter().zip(&want).enumerate() {
            let twice = if (3..9).contains(&i) { 2.0 } else { 1.0 };
            assert_eq!(got, twice * want, "element {i}");
        }
    }
}

#[test]
fn other_reductions_are_there_too() {
    let parts: Vec<_> = (0..3).map(|_| random(&[17], DType::F32)).collect();
    let of = |op: fn(f64, f64) -> f64| -> Vec<f64> {
        let all: Vec<_> = parts.iter().map(values).collect();
        (0..17)
            .map(|i| op(op(all[0][i], all[1][i]), all[2][i]))
            .collect()
    };
    let got = ranks(3, |p| {
        let x = &parts[p.rank()];
        let by = |op| {
            let parallel = p.clone();
            x.apply_op1_no_bwd(&AllReduce { parallel, op })
        };
        Ok([by(ReduceOp::Max)?, by(ReduceOp::Min)?])
    });
    for [max, min] in got {
        assert_eq!(values(&max), of(f64::max));
        assert_eq!(values(&min), of(f64::min));
    }
}

#[test]
fn all_gather_is_cat_along_any_dimension() {
    for size in SIZES {
        for dtype in [
            DType::F32,
            DType::BF16,
            DType::F64,
            DType::U8,
            DType::U32,
            DType::I64,
        ] {
            for (dim, counts) in [
                (0, [2, 0, 5, 1]),
                (1, [3, 1, 0, 2]),
                (2, [1, 2, 3, 4]),
                (1, [0, 0, 0, 0]),
            ] {
                let counts = &counts[..size];
                let parts: Vec<_> = counts.iter().map(|&n| part(dim, n, dtype)).collect();
                let want = Tensor::cat(&parts, dim).unwrap();
                let got = ranks(size, |p| p.all_gather(&parts[p.rank()], dim, Some(counts)));
                for got in got {
                    assert_eq!(got.dims(), want.dims());
                    assert_eq!(got.dtype(), dtype);
                    assert_eq!(bits(&got), bits(&want), "{size} {dtype:?} {dim} {counts:?}");
                }
            }
        }
    }
}

fn part(dim: usize, count: usize, dtype: DType) -> Tensor {
    let mut dims = [3, 4, 2];
    dims[dim] = count;
    let values = (random(&dims, DType::F32) * 100.0).unwrap();
    values.abs().unwrap().to_dtype(dtype).unwrap()
}

#[test]
fn all_gather_of_equal_parts_needs_no_counts() {
    let parts: Vec<_> = (0..3).map(|_| random(&[2, 5], DType::F16)).collect();
    for dim in [0, 1] {
        let want = Tensor::cat(&parts, dim).unwrap();
        for got in ranks(3, |p| p.all_gather(&parts[p.rank()], dim, None)) {
            assert_eq!(bits(&got), bits(&want));
        }
    }
}

#[test]
fn reduce_scatter_gives_rows_of_the_sum() {
    for (size, dtype) in SIZES.flat_map(|s| FLOATS.map(|d| (s, d))) {
        for rows in [None, Some([4, 0, 2, 1])] {
            let counts = rows.map(|r| r[..size].to_vec());
            let total = counts.as_ref().map_or(7, |c| c.iter().sum());
            let parts: Vec<_> = (0..size).map(|_| random(&[total, 3, 2], dtype)).collect();
            let want = in_order(&parts, dtype).unwrap();
            let got = ranks(size, |p| {
                p.reduce_scatter(&parts[p.rank()], counts.as_deref())
            });
            let all = Tensor::cat(&got, 0).unwrap();
            assert_eq!(bits(&all), bits(&want), "{size} {dtype:?} {counts:?}");
            let even = [[7, 0, 0, 0], [4, 3, 0, 0], [3, 2, 2, 0], [2, 2, 2, 1]];
            let wanted = counts.unwrap_or_else(|| even[size - 1][..size].to_vec());
            let rows: Vec<_> = got.iter().map(|t| t.dims()[0]).collect();
            assert_eq!(rows, wanted);
        }
    }
}

#[test]
fn gathering_what_was_scattered_is_the_sum() -> Result<()> {
    let parts: Vec<_> = (0..4).map(|_| random(&[9, 4], DType::F32)).collect();
    let rows = [3, 2, 2, 2];
    let got = ranks(4, |p| {
        let x = &parts[p.rank()];
        let own = p.reduce_scatter(x, None)?;
        p.barrier()?;
        Ok((p.all_gather(&own, 0, Some(&rows))?, p.all_reduce(x)?))
    });
    for (gathered, reduced) in got {
        assert_eq!(bits(&gathered), bits(&reduced));
        assert!(gathered.device().same_device(&Device::Cpu));
    }
    Ok(())
}
