use super::{
    Hold, Theme, World,
    oracle::{close, product, put, random, values},
};
use brigade_candle::{
    brigade::{
        AllReduceAlgorithm, AllReduceParams, DataType, Error, GemmParams, MemoryType, Output,
        ReduceOp,
    },
    brigade_error, data_type, dtype_of,
};
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Storage, Tensor, Var};

pub const THEMES: &[Theme] = &[
    Theme {
        name: "lending",
        sizes: 1..=1,
        hold: Hold::OnHost,
        contracts: contracts![
            what_is_lent_is_the_tensors_own_memory,
            who_writes_waits_until_the_tensor_is_back,
            a_recorded_call_is_refused_because_candle_would_not_wait_for_it,
            every_type_that_both_have_keeps_its_name,
        ],
    },
    Theme {
        name: "lending",
        sizes: 1..=1,
        hold: Hold::Everywhere,
        contracts: contracts![
            what_is_made_is_where_it_was_written,
            other_operations_take_tensors_as_they_are,
            a_view_that_was_kept_is_refused_once_the_tensor_is_back,
            a_loan_that_is_never_ended_keeps_the_memory,
        ],
    },
    Theme {
        name: "lending",
        sizes: 1..=4,
        hold: Hold::Everywhere,
        contracts: contracts![a_choice_that_has_no_layer_is_made_through_the_communicator],
    },
];

fn address(tensor: &Tensor) -> u64 {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => {
            values.as_ptr() as u64 + 4 * layout.start_offset() as u64
        }
        other => panic!("{other:?}"),
    }
}

fn field(error: &Error) -> &'static str {
    match error {
        Error::Invalid { field, .. } => field,
        other => panic!("{other}"),
    }
}

fn what_is_lent_is_the_tensors_own_memory(world: &World) {
    let x = random(&[4, 5], DType::F32);
    world.ranks(|p| {
        let lent = p.lend(&x)?;
        assert_eq!(lent.view().address(), address(&x));
        assert_eq!(lent.view().shape().dims(), [4, 5]);
        let rows = x.narrow(0, 1, 2)?;
        let lent = p.lend(&rows)?;
        assert_eq!(lent.view().address(), address(&x) + 20);
        assert_eq!(lent.view().dtype(), DataType::F32);
        let turned = x.t()?;
        let refused = p.lend(&turned).err().unwrap();
        assert_eq!(field(brigade_error(&refused).unwrap()), "layout");
        let deep = x.reshape(&[1, 1, 1, 1, 1, 4, 5][..])?;
        let refused = p.lend(&deep).err().unwrap();
        assert_eq!(field(brigade_error(&refused).unwrap()), "shape");
        Ok(())
    });
}

fn what_is_made_is_where_it_was_written(world: &World) {
    world.ranks(|p| {
        let mut written = 0;
        let made = p.make(DType::F32, (3, 2), |to| {
            written = to.as_view().address();
            p.device().fill(p.stream(), to, 0x3f)
        })?;
        assert_eq!(p.lend(&made)?.view().address(), written);
        let want = f64::from(f32::from_bits(0x3f3f_3f3f));
        assert_eq!(values(&made), [want; 6]);
        let failed = p.make(DType::F32, 3, |_| Err(Error::Closed)).err();
        assert!(matches!(
            brigade_error(&failed.unwrap()),
            Some(Error::Closed)
        ));
        Ok(())
    });
}

fn other_operations_take_tensors_as_they_are(world: &World) {
    let (a, b) = (random(&[3, 4], DType::F32), random(&[4, 5], DType::F32));
    world.ranks(|p| {
        let (at_a, at_b) = (put(p, &a)?, put(p, &b)?);
        let (lent_a, lent_b) = (p.lend(&at_a)?, p.lend(&at_b)?);
        let y = p.make(DType::F32, (3, 5), |to| {
            let params = GemmParams::new(lent_a.view(), lent_b.view());
            let made = p.device().gemm(p.stream(), &params, Output::Into(to))?;
            assert!(made.is_none());
            Ok(())
        })?;
        let want = product(&a, &b.t()?.contiguous()?);
        close(&y, &want, 1e-5, "product");
        let buffer = p.device().gemm(
            p.stream(),
            &GemmParams::new(lent_a.view(), lent_b.view()),
            Output::Allocate(DataType::F32),
        );
        let copied = p.tensor(buffer.unwrap().unwrap().view())?;
        assert_eq!(values(&copied), values(&y));
        Ok(())
    });
}

fn a_view_that_was_kept_is_refused_once_the_tensor_is_back(world: &World) {
    let x = random(&[8], DType::F32);
    world.ranks(|p| {
        let (device, on) = (p.device(), p.stream());
        let x = put(p, &x)?;
        let mut to = device.allocate(on, MemoryType::Device, DataType::F32, &[8]);
        let to = to.as_mut().unwrap();
        let lent = p.lend(&x)?;
        let kept = lent.view().retain();
        // While it is lent, a kept view is as good as any.
        device.copy(on, to.view_mut(), kept.view()).unwrap();
        // It was lent for reading alone.
        let mut wanted = kept.clone();
        let refused = device.fill(on, wanted.view_mut(), 0).unwrap_err();
        assert_eq!(field(&refused), "buffer");
        assert!(refused.to_string().contains("for reading"), "{refused}");
        drop(lent);
        let refused = device.copy(on, to.view_mut(), kept.view()).unwrap_err();
        assert!(refused.to_string().contains("given back"), "{refused}");

        let mut kept = None;
        let made = p.make(DType::F32, 8, |to| {
            kept = Some(to.as_view().retain());
            device.fill(on, to, 0)
        })?;
        let refused = device.fill(on, kept.unwrap().view_mut(), 1).unwrap_err();
        assert!(refused.to_string().contains("given back"), "{refused}");
        assert_eq!(values(&made), [0.0; 8]);
        Ok(())
    });
}

/// Writes all of a tensor.
struct Clear;

impl InplaceOp1 for Clear {
    fn name(&self) -> &'static str {
        "clear"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        // Not only written: replaced, so that the old memory is freed.
        *storage = CpuStorage::F32(vec![0.0; 8]);
        Ok(())
    }
}

fn who_writes_waits_until_the_tensor_is_back(world: &World) {
    let x = random(&[8], DType::F32);
    let before = values(&x);
    world.ranks(|p| {
        let lent = p.lend(&x)?;
        let (device, on) = (p.device(), p.stream());
        std::thread::scope(|s| {
            let writer = s.spawn(|| x.inplace_op1(&Clear));
            // However far the writer is by now, nothing is written.
            for _ in 0..1000 {
                let mut seen = [0u8; 32];
                device.read(on, lent.view(), &mut seen).unwrap();
                let seen = seen
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .map(|&b| f64::from(f32::from_ne_bytes(b)));
                assert_eq!(seen.collect::<Vec<_>>(), before);
            }
            drop(lent);
            writer.join().unwrap()
        })?;
        assert_eq!(values(&x), [0.0; 8]);
        Ok(())
    });
}

fn a_loan_that_is_never_ended_keeps_the_memory(world: &World) {
    world.ranks(|p| {
        let (device, on) = (p.device(), p.stream());
        let var = Var::from_tensor(&put(p, &random(&[8], DType::F32))?)?;
        let x = var.as_detached_tensor();
        let before = values(&x);
        let lent = p.lend(&x)?;
        let kept = lent.view().retain();
        std::mem::forget(lent);
        drop((x, var));
        let mut seen = [0u8; 32];
        device.read(on, kept.view(), &mut seen).unwrap();
        let seen = seen
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&b| f64::from(f32::from_ne_bytes(b)));
        assert_eq!(seen.collect::<Vec<_>>(), before);
        Ok(())
    });
}

fn a_recorded_call_is_refused_because_candle_would_not_wait_for_it(world: &World) {
    let x = random(&[4], DType::F32);
    world.ranks(|p| {
        let mut told = Vec::new();
        let graph = p.device().capture(p.stream(), &mut || {
            let made = p.make(DType::F32, 4, |_| Ok(()));
            for error in [p.all_reduce(&x).err(), made.err()] {
                told.push(brigade_error(&error.unwrap()).unwrap().to_string());
            }
            Ok(())
        });
        drop(graph);
        assert_eq!(told.len(), 2);
        for told in told {
            assert!(told.contains("cannot be captured"), "{told}");
        }
        Ok(())
    });
}

fn every_type_that_both_have_keeps_its_name(_: &World) {
    let both = [
        DType::U8,
        DType::U32,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::BF16,
        DType::F16,
        DType::F32,
        DType::F64,
        DType::F8E4M3,
    ];
    for dtype in both {
        let ours = data_type(dtype).unwrap();
        assert_eq!(ours.bytes(), dtype.size_in_bytes());
        assert_eq!(dtype_of(ours).unwrap(), dtype);
    }
    assert!(data_type(DType::F4).is_err() && dtype_of(DataType::QI8).is_err());
}

fn a_choice_that_has_no_layer_is_made_through_the_communicator(world: &World) {
    let x = random(&[6], DType::F32);
    let sums = world.ranks(|p| {
        let x = put(p, &x)?;
        let lent = p.lend(&x)?;
        p.make(DType::F32, 6, |data| {
            let params = AllReduceParams {
                data,
                from: Some(lent.view()),
                op: ReduceOp::Sum,
                choice: Some(AllReduceAlgorithm::OneShotPull),
            };
            p.comm().lease(p.stream())?.all_reduce(params).map(drop)
        })
    });
    let all: Vec<_> = sums.iter().map(values).collect();
    assert!(all.iter().all(|sum| sum == &all[0]));
    let want = (1..world.size).fold(x.clone(), |sum, _| (sum + &x).unwrap());
    assert_eq!(all[0], values(&want));
}
