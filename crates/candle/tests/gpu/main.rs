//! Layers on GPUs, against sums in f64. Built with the feature `cuda`; BRIGADE_TEST_DEVICE=cuda demands two GPUs, and where that is
//! not set and there are fewer, joining says what is missing.
#![cfg(feature = "cuda")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests panic on what is not as promised"
)]

#[path = "../layers/common.rs"]
#[allow(dead_code, reason = "what ranks on the CPU need is not asked for")]
mod common;

use brigade::{Activation, Error, FaultKind, ParallelMode, cuda};
use brigade_candle::{
    Adapter, AllReduce, ColumnParallelLinear, ExpertParallel, GatedExperts, GatherLinear,
    LinearReduceScatter, Parallel, RowParallelLinear, Runs, VocabParallelEmbedding,
    VocabParallelHead, brigade, brigade_error, cut,
};
use candle_core::{DType, Device, Module, Result, Tensor};
use common::{FLOATS, Want, biased, bits, close, config, product, random, tolerance, values};
use std::{sync::Barrier, time::Duration};

const RANKS: usize = 2;
const PATIENCE: Duration = Duration::from_secs(60);

/// What two ranks make, each on a GPU of its own; `None`, with the reason looked at, where there are fewer.
fn ranks<R: Send>(
    mode: ParallelMode,
    work: impl Fn(&Parallel, &Device) -> Result<R> + Sync,
) -> Option<Vec<R>> {
    let demanded = std::env::var("BRIGADE_TEST_DEVICE").is_ok_and(|d| d == "cuda");
    let found = cuda::devices().map_or(0, |gpus| gpus.len());
    if found < RANKS {
        assert!(!demanded, "{found} GPUs, {RANKS} are demanded");
        assert!(cuda::CudaDevice::new(found).is_err());
        return None;
    }
    let places: Vec<_> = (0..RANKS)
        .map(|gpu| Device::new_cuda(gpu).unwrap())
        .collect();
    Some(std::thread::scope(|s| {
        let ranks: Vec<_> = brigade::group::threads(RANKS)
            .into_iter()
            .zip(&places)
            .map(|(boot, place)| {
                let work = &work;
                s.spawn(move || {
                    let parallel = Parallel::join(place, &boot, &config(mode)).unwrap();
                    let made = work(&parallel, place).unwrap();
                    parallel.sync(PATIENCE).ok();
                    made
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    }))
}

#[test]
fn ops_give_the_same_bits_on_all_ranks() {
    for dtype in FLOATS {
        let parts = [random(&[33, 7], dtype), random(&[33, 7], dtype)];
        let sum: Vec<f64> = values(&parts[0])
            .iter()
            .zip(values(&parts[1]))
            .map(|(a, b)| a + b)
            .collect();
        let sum = Want::plain(sum);
        let got = ranks(ParallelMode::Tp, |p, place| {
            let x = parts[p.rank()].to_device(place)?;
            let made = p.all_reduce(&x)?;
            let own = p.reduce_scatter(&x, Some(&[20, 13]))?;
            let back = p.all_gather(&own, 0, Some(&[20, 13]))?;
            let turned = p.all_gather(&x.t()?, 1, None)?;
            x.inplace_op1(&AllReduce::sum(p))?;
            let cpu = |t: &Tensor| t.to_device(&Device::Cpu);
            Ok([cpu(&made)?, cpu(&x)?, cpu(&back)?, cpu(&turned)?])
        });
        for [made, in_place, back, turned] in got.iter().flatten() {
            close(made, &sum, tolerance(dtype), "sum");
            assert_eq!(bits(made), bits(in_place));
            assert_eq!(bits(made), bits(back));
            let both = parts.each_ref().map(|t| t.t().unwrap());
            assert_eq!(bits(turned), bits(&Tensor::cat(&both, 1).unwrap()));
        }
    }
}

#[test]
fn linears_are_what_they_are_on_one_device() {
    for (dtype, (m, k, n)) in FLOATS.into_iter().flat_map(|d| {
        [(8, 64, 96), (5, 7, 11), (300, 256, 130), (1, 13, 3)].map(|shape| (d, shape))
    }) {
        let (x, weight) = (random(&[m, k], dtype), random(&[n, k], dtype));
        let bias = random(&[n], dtype);
        let want = biased(product(&x, &weight), &bias);
        let name = format!("{dtype:?}, {m} x {k} x {n}");
        let allowed = 2.0 * tolerance(dtype);
        let back = ranks(ParallelMode::Tp, |p, place| {
            let on = |t: &Tensor| t.to_device(place);
            let (x, weight, bias) = (on(&x)?, on(&weight)?, on(&bias)?);
            let part = want.columns(n, cut::share(n, 1, RANKS, p.rank())?);
            let linear = ColumnParallelLinear::new(p, &weight, Some(&bias))?;
            close(&linear.forward(&x)?, &part, allowed, &name);
            close(
                &linear.gathered(n, None)?.forward(&x)?,
                &want,
                allowed,
                &name,
            );
            let own = cut::tensor(p, &x, 1)?;
            let linear = RowParallelLinear::new(p, &weight, Some(&bias))?;
            close(&linear.forward(&own)?, &want, allowed, &name);
            let rows = [m - m / 3, m / 3];
            let mine = x.narrow(0, p.rank() * rows[0], rows[p.rank()])?;
            let linear = GatherLinear::new(p, &weight, Some(&bias))?;
            let y = linear.forward_rows(&mine, Some(&rows), &Runs::none())?;
            close(&y, &part, allowed, &name);
            let twin = LinearReduceScatter::new(p, &weight, Some(&bias))?;
            let y = twin.forward_rows(&own, Some(&rows), &Runs::none())?;
            y.to_device(&Device::Cpu)
        });
        if let Some(back) = back {
            close(&Tensor::cat(&back, 0).unwrap(), &want, allowed, &name);
        }
    }
}

#[test]
fn rows_have_adapters_of_their_own() {
    let (x, weight) = (random(&[6, 32], DType::F16), random(&[24, 32], DType::F16));
    let (a, b) = (random(&[4, 32], DType::F16), random(&[24, 4], DType::F16));
    let mut want = product(&x, &weight);
    let low = product(&x.narrow(0, 2, 3).unwrap(), &a).values;
    let low = Tensor::from_vec(low, (3, 4), &Device::Cpu).unwrap();
    for (at, added) in product(&low, &b).values.into_iter().enumerate() {
        want.add(2 * 24 + at, 0.5 * added);
    }
    let runs = Runs::of([(2, None), (3, Some(0)), (1, None)]);
    ranks(ParallelMode::Tp, |p, place| {
        let on = |t: &Tensor| t.to_device(place);
        let adapter = Adapter::from_peft(&on(&a)?, &on(&b)?, 2.0)?;
        let own = cut::share(32, 1, RANKS, p.rank())?;
        let linear = RowParallelLinear::new(p, &on(&weight)?, None)?;
        let linear = linear.with_adapters(vec![adapter.rows(own)?])?;
        let y = linear.forward_lora(&cut::tensor(p, &on(&x)?, 1)?, &runs)?;
        close(&y, &want, 2e-3, "adapters");
        Ok(())
    });
}

#[test]
fn a_step_of_a_model_chooses_the_words_of_one_device() {
    let (words, hidden) = (103, 64);
    let table = random(&[words, hidden], DType::F32);
    let (up, down) = (
        random(&[90, hidden], DType::F32),
        random(&[hidden, 90], DType::F32),
    );
    let ids = Tensor::new(&[5u32, 102, 0, 51, 52], &Device::Cpu).unwrap();
    let one = || -> Result<Tensor> {
        let x = table.index_select(&ids, 0)?;
        let y = x.matmul(&up.t()?)?.silu()?.matmul(&down.t()?)?;
        (x + y)?.matmul(&table.t()?)?.argmax(1)
    };
    let want = one().unwrap().to_vec1::<u32>().unwrap();
    ranks(ParallelMode::Tp, |p, place| {
        let on = |t: &Tensor| t.to_device(place);
        let embedding = VocabParallelEmbedding::new(p, &on(&table)?)?;
        let head = VocabParallelHead::from_shard(p, embedding.table(), words)?;
        let up = ColumnParallelLinear::new(p, &on(&up)?, None)?.with_activation(Activation::Silu);
        let down = RowParallelLinear::new(p, &on(&down)?, None)?;
        let x = embedding.forward(&on(&ids)?)?;
        let x = (&x + down.forward(&up.forward(&x)?)?)?;
        assert_eq!(head.argmax(&x)?.to_vec1::<u32>()?, want);
        assert_eq!(head.forward(&x)?.dims(), [5, words]);
        // A word that nobody has is NaN, since nobody looks at ids on a GPU.
        let lost = embedding.forward(&Tensor::new(&[1u32, 103], place)?)?;
        let nan: Vec<bool> = values(&lost).iter().map(|v| v.is_nan()).collect();
        assert_eq!(nan, [vec![false; hidden], vec![true; hidden]].concat());
        Ok(())
    });
}

#[test]
fn tokens_come_back_with_the_sum_of_their_experts() {
    let (x, weights) = (random(&[7, 40], DType::F32), random(&[7, 2], DType::F32));
    let experts: Vec<_> = (0..3).map(|_| random(&[40, 40], DType::F32)).collect();
    let ids: Vec<u32> = (0..14).map(|i| (i * 5 % 7) % 3).collect();
    let mut want = Want::plain(vec![0.0; 7 * 40]);
    let factors = values(&weights);
    for (at, &id) in ids.iter().enumerate() {
        let row = x.narrow(0, at / 2, 1).unwrap();
        let made = product(&row, &experts[id as usize]).values;
        for (column, made) in made.into_iter().enumerate() {
            want.add(at / 2 * 40 + column, factors[at] * made);
        }
    }
    ranks(ParallelMode::Ep, |p, place| {
        let ids = Tensor::from_vec(ids.clone(), (7, 2), place)?;
        let (x, weights) = (x.to_device(place)?, weights.to_device(place)?);
        let layer = ExpertParallel::new(p, 3, 7);
        let y = layer.forward(&x, &ids, &weights, |number, rows| {
            rows.matmul(&experts[number].to_device(place)?.t()?)
        })?;
        // candle's product on a GPU may round its factors.
        close(&y, &want, 1e-3, "experts");
        Ok(())
    });
}

#[test]
fn experts_multiply_in_groups() {
    let (hidden, inner) = (40, 24);
    for dtype in FLOATS {
        let (x, weights) = (random(&[7, hidden], dtype), random(&[7, 2], DType::F32));
        let gate_up = random(&[3, 2 * inner, hidden], dtype);
        let down = random(&[3, hidden, inner], dtype);
        let ids: Vec<u32> = (0..14).map(|i| (i * 5 % 7) % 3).collect();
        let mut want = Want::plain(vec![0.0; 7 * hidden]);
        let factors = values(&weights);
        for (at, &id) in ids.iter().enumerate() {
            let row = x.narrow(0, at / 2, 1).unwrap();
            let both = product(&row, &gate_up.get(id as usize).unwrap()).values;
            let (gate, up) = both.split_at(inner);
            let gated = gate.iter().zip(up);
            let gated: Vec<f64> = gated.map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let gated = Tensor::from_vec(gated, (1, inner), &Device::Cpu).unwrap();
            let made = product(&gated, &down.get(id as usize).unwrap()).values;
            for (column, made) in made.into_iter().enumerate() {
                want.add(at / 2 * hidden + column, factors[at] * made);
            }
        }
        ranks(ParallelMode::Ep, |p, place| {
            let on = |t: &Tensor| t.to_device(place);
            let ids = Tensor::from_vec(ids.clone(), (7, 2), place)?;
            let layer = ExpertParallel::new(p, 3, 7);
            let own = layer.own()?;
            let part = |all: &Tensor| on(&all.narrow(0, own.start, own.len())?);
            let experts = GatedExperts::new(&part(&gate_up)?, &part(&down)?)?;
            let (x, weights) = (on(&x)?, on(&weights)?);
            for layer in [layer.clone(), layer.with_max_recv(2 * 14)] {
                let y = layer.forward_grouped(&x, &ids, &weights, &experts)?;
                close(&y, &want, 3.0 * tolerance(dtype), "experts in groups");
            }
            Ok(())
        });
    }
}

#[test]
fn a_rank_that_is_lost_is_a_typed_error() {
    let first = Barrier::new(RANKS);
    let x = random(&[12, 12], DType::F32);
    ranks(ParallelMode::Tp, |p, place| {
        let x = x.to_device(place)?;
        p.all_reduce(&x)?;
        p.sync(PATIENCE)?;
        first.wait();
        if p.rank() == 1 {
            return Ok(());
        }
        let error = p.all_reduce(&x).and_then(|_| p.sync(PATIENCE)).unwrap_err();
        let fault = brigade_error(&error).and_then(Error::fault).unwrap();
        assert_eq!((fault.kind, fault.peer), (FaultKind::PeerLost, 1));
        Ok(())
    });
}
