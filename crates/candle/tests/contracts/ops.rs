use super::{
    Hold, Theme, World,
    oracle::{FLOATS, Want, bits, cat, close, put, random, tolerance, values},
};
use brigade_candle::{AllReduce, Residual, ResidualNorm, brigade::ReduceOp};
use candle_core::{DType, Result, Tensor};

pub const THEMES: &[Theme] = &[Theme {
    name: "ops",
    sizes: 1..=4,
    hold: Hold::Everywhere,
    contracts: contracts![
        all_reduce_gives_every_rank_the_same_bits_as_candle_on_one_device,
        a_residual_and_a_norm_come_with_the_sum,
        a_residual_and_a_norm_of_own_rows_take_no_other_rank,
        a_gate_is_silu_of_the_first_half_times_the_second,
        residuals_and_weights_that_do_not_fit_are_named,
        inputs_may_lie_anyhow_and_stay_as_they_are,
        in_place_changes_what_the_layout_covers_and_nothing_else,
        other_reductions_are_there_too,
        all_gather_is_cat_along_any_dimension,
        all_gather_of_equal_parts_needs_no_counts,
        reduce_scatter_gives_rows_of_the_sum,
        gathering_what_was_scattered_is_the_sum,
    ],
}];

/// A tensor of every rank.
fn parts(world: &World, dims: &[usize], dtype: DType) -> Vec<Tensor> {
    (0..world.size).map(|_| random(dims, dtype)).collect()
}

/// In rank order in f32, with one rounding, as Brigade promises it.
fn in_order(parts: &[Tensor], dtype: DType) -> Result<Tensor> {
    let mut sum = parts[0].to_dtype(DType::F32)?;
    for part in &parts[1..] {
        sum = (sum + part.to_dtype(DType::F32)?)?;
    }
    sum.to_dtype(dtype)
}

fn all_reduce_gives_every_rank_the_same_bits_as_candle_on_one_device(world: &World) {
    let shapes = [&[1][..], &[7], &[3, 5], &[2, 3, 4], &[0, 4], &[2000, 3]];
    let cases = FLOATS.map(|dtype| shapes.map(|dims| parts(world, dims, dtype)));
    let got = world.ranks(|p| {
        let made = cases.iter().flatten().map(|parts| {
            let x = put(p, &parts[p.rank()])?;
            let made = p.all_reduce(&x)?;
            // In place of a tensor of its own.
            let own = x.force_contiguous()?;
            own.inplace_op1(&AllReduce::sum(p))?;
            Ok([made, own])
        });
        made.collect::<Result<Vec<_>>>()
    });
    for made in got {
        for (parts, tensors) in cases.iter().flatten().zip(made) {
            let (dims, dtype) = (parts[0].dims(), parts[0].dtype());
            let want = bits(&in_order(parts, dtype).unwrap());
            for tensor in tensors {
                assert_eq!(tensor.dims(), dims);
                assert_eq!(bits(&tensor), want, "{dtype:?} {dims:?}");
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

fn a_residual_and_a_norm_come_with_the_sum(world: &World) {
    let shapes = [&[1, 8][..], &[5, 24], &[2, 3, 16], &[0, 8], &[64, 136]];
    let cases = FLOATS.map(|dtype| {
        shapes.map(|dims| {
            let weight = random(&dims[dims.len() - 1..], dtype);
            (parts(world, dims, dtype), random(dims, dtype), weight)
        })
    });
    let got = world.ranks(|p| {
        let made = cases.iter().flatten().map(|(parts, old, weight)| {
            let (x, old) = (put(p, &parts[p.rank()])?, put(p, old)?);
            let before = bits(&old);
            let norm = ResidualNorm::new(&put(p, weight)?, 1e-5)?;
            let made = p.all_reduce_norm(&x, &old, &norm)?;
            assert_eq!(bits(&old), before, "the residual before stays as it is");
            Ok(made)
        });
        made.collect::<Result<Vec<_>>>()
    });
    for (at, (parts, old, weight)) in cases.iter().flatten().enumerate() {
        let (dims, dtype) = (old.dims(), old.dtype());
        let want = normed(parts, old, weight, 1e-5);
        let first = &got[0][at];
        for Residual { sum, normed } in got.iter().map(|made| &made[at]) {
            let case = format!("{dtype:?} {dims:?}");
            assert_eq!([sum.dims(), normed.dims()], [dims, dims]);
            // The sum over ranks is rounded, then what the residual makes of it, then the norm.
            close(sum, &want[0], 2.0 * tolerance(dtype), &case);
            close(normed, &want[1], 3.0 * tolerance(dtype), &case);
            assert_eq!(bits(sum), bits(&first.sum), "{case}");
            assert_eq!(bits(normed), bits(&first.normed), "{case}");
        }
    }
}

/// What each rank does by itself: behind a sum, it is what comes with the sum, bit for bit.
fn a_residual_and_a_norm_of_own_rows_take_no_other_rank(world: &World) {
    let shapes = [&[1, 8][..], &[5, 24], &[2, 3, 16], &[0, 8], &[7, 13]];
    let cases = FLOATS.map(|dtype| {
        shapes.map(|dims| {
            let weight = random(&dims[dims.len() - 1..], dtype);
            (random(dims, dtype), random(dims, dtype), weight)
        })
    });
    let got = world.ranks(|p| {
        let made = cases.iter().flatten().map(|(x, old, weight)| {
            let (x, old) = (put(p, x)?, put(p, old)?);
            let norm = ResidualNorm::new(&put(p, weight)?, 1e-5)?;
            let alone = p.residual_norm(&x, &old, &norm)?;
            // Rows whose length the fused call takes on every device.
            if weight.dim(0)? % 8 == 0 {
                let behind = p.residual_norm(&p.all_reduce(&x)?, &old, &norm)?;
                let fused = p.all_reduce_norm(&x, &old, &norm)?;
                assert_eq!(bits(&behind.sum), bits(&fused.sum));
                assert_eq!(bits(&behind.normed), bits(&fused.normed));
            }
            Ok(alone)
        });
        made.collect::<Result<Vec<_>>>()
    });
    for made in got {
        for ((x, old, weight), Residual { sum, normed: rows }) in cases.iter().flatten().zip(made) {
            let (dims, dtype) = (x.dims(), x.dtype());
            let case = format!("{dtype:?} {dims:?}");
            let want = normed(std::slice::from_ref(x), old, weight, 1e-5);
            assert_eq!([sum.dims(), rows.dims()], [dims, dims]);
            close(&sum, &want[0], tolerance(dtype), &case);
            close(&rows, &want[1], 2.0 * tolerance(dtype), &case);
        }
    }
}

fn a_gate_is_silu_of_the_first_half_times_the_second(world: &World) {
    let shapes = [
        &[64][..],
        &[5, 16],
        &[2, 3, 14],
        &[0, 8],
        &[3, 0],
        &[4, 4104],
    ];
    let cases = FLOATS.map(|dtype| shapes.map(|dims| random(dims, dtype)));
    let got = world.ranks(|p| {
        let odd = p.silu_mul(&put(p, &random(&[3, 7], DType::F32))?);
        assert!(odd.unwrap_err().to_string().contains("from.shape"));
        let made = cases.iter().flatten().map(|x| p.silu_mul(&put(p, x)?));
        made.collect::<Result<Vec<_>>>()
    });
    for made in got {
        for (x, gated) in cases.iter().flatten().zip(made) {
            let mut dims = x.dims().to_vec();
            let both = std::mem::replace(dims.last_mut().unwrap(), x.dims()[x.rank() - 1] / 2);
            let rows = values(x);
            let rows = rows.chunks(both.max(1)).flat_map(|row| {
                let (gate, up) = row.split_at(row.len() / 2);
                let silu = |x: f64| x / (1.0 + (-x).exp());
                gate.iter().zip(up).map(move |(&g, &u)| silu(g) * u)
            });
            let want = Want::plain(rows.collect());
            let case = format!("{:?} {:?}", x.dtype(), x.dims());
            assert_eq!(gated.dims(), dims, "{case}");
            close(&gated, &want, tolerance(x.dtype()), &case);
        }
    }
}

fn residuals_and_weights_that_do_not_fit_are_named(world: &World) {
    world.ranks(|p| {
        let new = |dims: &[usize]| put(p, &random(dims, DType::F32));
        let x = new(&[3, 8])?;
        let norm = ResidualNorm::new(&new(&[8])?, 1e-5)?;
        let refused = |told: candle_core::Error, field: &str| {
            let told = told.to_string();
            assert!(told.contains(field), "{told}");
        };
        let other = new(&[3, 7])?;
        refused(
            p.all_reduce_norm(&x, &other, &norm).unwrap_err(),
            "residual",
        );
        let narrow = ResidualNorm::new(&new(&[7])?, 1e-5)?;
        refused(p.all_reduce_norm(&x, &x, &narrow).unwrap_err(), "weight");
        refused(p.residual_norm(&x, &other, &norm).unwrap_err(), "residual");
        refused(p.residual_norm(&x, &x, &narrow).unwrap_err(), "weight");
        let matrix = ResidualNorm::new(&x, 1e-5);
        refused(matrix.unwrap_err(), "weight");
        // The group goes on.
        p.all_reduce_norm(&x, &x, &norm).map(drop)
    });
}

/// The sum of as many of a value as there are ranks, as f32 has it.
fn times(size: usize, value: f64) -> f64 {
    f64::from((1..size).fold(value as f32, |sum, _| sum + value as f32))
}

fn inputs_may_lie_anyhow_and_stay_as_they_are(world: &World) {
    let wide = random(&[6, 8], DType::F32);
    world.ranks(|p| {
        let wide = put(p, &wide)?;
        let before = bits(&wide);
        for x in [wide.narrow(0, 2, 3)?, wide.t()?] {
            let got = p.all_reduce(&x)?;
            let want: Vec<f64> = values(&x).iter().map(|&v| times(p.size(), v)).collect();
            assert_eq!(values(&got), want);
        }
        assert_eq!(bits(&wide), before);
        Ok(())
    });
}

fn in_place_changes_what_the_layout_covers_and_nothing_else(world: &World) {
    let whole = random(&[4, 3], DType::F32);
    let want = values(&whole);
    let got = world.ranks(|p| {
        let own = put(p, &whole)?.force_contiguous()?;
        own.narrow(0, 1, 2)?.inplace_op1(&AllReduce::sum(p))?;
        Ok(own)
    });
    for own in got {
        for (i, (got, &want)) in values(&own).into_iter().zip(&want).enumerate() {
            let size = if (3..9).contains(&i) { world.size } else { 1 };
            assert_eq!(got, times(size, want), "element {i}");
        }
    }
}

fn other_reductions_are_there_too(world: &World) {
    let parts = parts(world, &[17], DType::F32);
    let of = |op: fn(f64, f64) -> f64| -> Vec<f64> {
        let all: Vec<_> = parts.iter().map(values).collect();
        let column = |i: usize| all.iter().map(|of| of[i]).reduce(op).unwrap();
        (0..17).map(column).collect()
    };
    let got = world.ranks(|p| {
        let x = put(p, &parts[p.rank()])?;
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

fn all_gather_is_cat_along_any_dimension(world: &World) {
    let types = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::F64,
        DType::U8,
        DType::U32,
        DType::I64,
    ];
    let cuts = [
        (0, [2, 0, 5, 1]),
        (1, [3, 1, 0, 2]),
        (2, [1, 2, 3, 4]),
        (1, [0, 0, 0, 0]),
    ];
    let cases = types.map(|dtype| {
        cuts.map(|(dim, counts)| {
            let counts = &counts[..world.size];
            counts
                .iter()
                .map(|&n| part(dim, n, dtype))
                .collect::<Vec<_>>()
        })
    });
    let got = world.ranks(|p| {
        let mut made = Vec::new();
        for cases in &cases {
            for (parts, (dim, counts)) in cases.iter().zip(cuts) {
                let own = put(p, &parts[p.rank()])?;
                made.push(p.all_gather(&own, dim, Some(&counts[..p.size()]))?);
            }
        }
        Ok(made)
    });
    for made in got {
        let mut made = made.into_iter();
        for (parts, (dim, counts)) in cases.iter().flat_map(|cases| cases.iter().zip(cuts)) {
            let (got, want) = (made.next().unwrap(), Tensor::cat(parts, dim).unwrap());
            assert_eq!(got.dims(), want.dims());
            assert_eq!(got.dtype(), want.dtype());
            let case = format!("{:?} {dim} {counts:?}", want.dtype());
            assert_eq!(bits(&got), bits(&want), "{case}");
        }
    }
}

fn part(dim: usize, count: usize, dtype: DType) -> Tensor {
    let mut dims = [3, 4, 2];
    dims[dim] = count;
    let values = (random(&dims, DType::F32) * 100.0).unwrap();
    values.abs().unwrap().to_dtype(dtype).unwrap()
}

fn all_gather_of_equal_parts_needs_no_counts(world: &World) {
    let parts = parts(world, &[2, 5], DType::F16);
    let got = world.ranks(|p| {
        let own = put(p, &parts[p.rank()])?;
        Ok([p.all_gather(&own, 0, None)?, p.all_gather(&own, 1, None)?])
    });
    for (dim, made) in got.iter().flat_map(|made| made.iter().enumerate()) {
        assert_eq!(bits(made), bits(&Tensor::cat(&parts, dim).unwrap()));
    }
}

fn reduce_scatter_gives_rows_of_the_sum(world: &World) {
    let size = world.size;
    for rows in [None, Some([4, 0, 2, 1])] {
        let counts = rows.map(|r| r[..size].to_vec());
        let total = counts.as_ref().map_or(7, |c| c.iter().sum());
        let cases = FLOATS.map(|dtype| parts(world, &[total, 3, 2], dtype));
        let got = world.ranks(|p| {
            let made = cases.iter().map(|parts| {
                let own = put(p, &parts[p.rank()])?;
                p.reduce_scatter(&own, counts.as_deref())
            });
            made.collect::<Result<Vec<_>>>()
        });
        let even = [[7, 0, 0, 0], [4, 3, 0, 0], [3, 2, 2, 0], [2, 2, 2, 1]];
        let wanted = counts.unwrap_or_else(|| even[size - 1][..size].to_vec());
        for (at, parts) in cases.iter().enumerate() {
            let got: Vec<_> = got.iter().map(|made| made[at].clone()).collect();
            let want = in_order(parts, parts[0].dtype()).unwrap();
            assert_eq!(bits(&cat(&got, 0)), bits(&want), "{wanted:?}");
            let rows: Vec<_> = got.iter().map(|t| t.dims()[0]).collect();
            assert_eq!(rows, wanted);
        }
    }
}

fn gathering_what_was_scattered_is_the_sum(world: &World) {
    let parts = parts(world, &[9, 4], DType::F32);
    let rows = [[9, 0, 0, 0], [5, 4, 0, 0], [3, 3, 3, 0], [3, 2, 2, 2]][world.size - 1];
    let got = world.ranks(|p| {
        let x = put(p, &parts[p.rank()])?;
        let own = p.reduce_scatter(&x, None)?;
        p.barrier()?;
        let all = p.all_gather(&own, 0, Some(&rows[..p.size()]))?;
        assert!(all.device().same_device(p.place()));
        Ok((all, p.all_reduce(&x)?))
    });
    for (gathered, reduced) in got {
        assert_eq!(bits(&gathered), bits(&reduced));
    }
}
