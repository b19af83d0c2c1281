//! Memory that somebody lends for reading is never written, whatever is asked to write it.

use crate::{
    backend::Rank,
    check::{assert_bits, expect_invalid},
    copies::noise,
    gather_linear::config,
    suite::{Suite, World},
};
use brigade_device::{
    Access, Activation, AllGatherParams, AllReduceParams, AllToAllParams, BroadcastParams, Buffer,
    DataType, GemmParams, Loan, Output, RecvParams, ReduceOp, ReduceScatterParams, Result,
};
use std::sync::Arc;

const ROWS: usize = 8;

/// The same memory, lent for reading.
fn lent(buffer: &Buffer) -> Loan {
    let owner = Arc::new(buffer.clone());
    let (memory, dims) = (buffer.memory(), buffer.shape());
    // SAFETY: the owner keeps memory of this size; only this rank has it, and writes nothing there.
    unsafe {
        Buffer::lend(
            buffer.address(),
            memory,
            buffer.dtype(),
            dims.dims(),
            Access::Read,
            owner,
        )
    }
    .unwrap()
}

/// Asserts that a call says what it was given.
fn assert_refused<T>(result: Result<T>, what: &str) {
    assert_eq!(expect_invalid(result, what), "buffer", "{what}");
}

fn operations(rank: &Rank, there: &mut Loan, square: &Buffer) {
    let (device, on) = (&rank.device, &rank.stream);
    assert_refused(device.fill(on, there.view_mut(), 1), "fill");
    assert_refused(device.copy(on, there.view_mut(), square.view()), "copy");
    let bytes = [0; ROWS * ROWS * 4];
    assert_refused(device.write(on, there.view_mut(), &bytes), "write");
    let halves = rank.poisoned(DataType::F16, &[ROWS, ROWS]);
    let converted = device.convert(on, there.view_mut(), halves.view());
    assert_refused(converted, "convert");
    let turned = device.transpose(on, there.view_mut(), square.view());
    assert_refused(turned, "transpose");
    let product = GemmParams::new(square, square);
    let product = device.gemm(on, &product, Output::Into(there.view_mut()));
    assert_refused(product, "gemm");
    let output = Output::Into(there.view_mut());
    let ended = device.bias_activation(on, square.view(), None, Activation::Relu, output);
    assert_refused(ended, "bias_activation");
}

fn collectives(rank: &Rank, there: &mut Loan, square: &Buffer) {
    let mut lease = rank.lease();
    let sum = lease.all_reduce(AllReduceParams {
        data: there.view_mut(),
        from: Some(square.view()),
        op: ReduceOp::Sum,
        choice: None,
    });
    assert_refused(sum, "all_reduce");
    // One rank has all rows, or gets them, so that all of them fit.
    let rows = |of: usize| -> Vec<usize> {
        let rows_of = |r| if r == of { ROWS } else { 0 };
        (0..rank.size).map(rows_of).collect()
    };
    let nobody = square.slice(0, 0).unwrap();
    let own = if rank.rank == 0 { square } else { &nobody };
    let gathered = lease.all_gather(AllGatherParams {
        from: own.view(),
        rows_per_rank: &rows(0),
        to: there.view_mut(),
    });
    assert_refused(gathered, "all_gather");
    let scattered = lease.reduce_scatter(ReduceScatterParams {
        from: square.view(),
        rows_per_rank: &rows(rank.rank),
        to: there.view_mut(),
        op: ReduceOp::Sum,
    });
    assert_refused(scattered, "reduce_scatter");
    let exchanged = lease.all_to_all(AllToAllParams {
        from: square.view(),
        send_rows: &rows(0),
        to: there.view_mut(),
        recv_rows: &rows(0),
    });
    assert_refused(exchanged, "all_to_all");
    if rank.size > 1 {
        let root = (rank.rank + 1) % rank.size;
        let data = there.view_mut();
        assert_refused(lease.broadcast(BroadcastParams { data, root }), "broadcast");
        let (to, peer) = (there.view_mut(), root);
        assert_refused(lease.recv(RecvParams { to, peer }), "recv");
    }
}

fn read_only(world: &World) {
    let bytes = noise(&mut world.rng(), ROWS * ROWS * 4);
    world.run(&config(), move |rank| {
        let dims = [ROWS, ROWS];
        let memory = rank.upload_bytes(DataType::F32, &dims, &bytes);
        let square = rank.upload_bytes(DataType::F32, &dims, &bytes);
        let mut there = lent(&memory);
        operations(rank, &mut there, &square);
        collectives(rank, &mut there, &square);
        rank.settle(Ok(())).unwrap();
        assert_bits(&rank.raw(there.view()), &bytes, DataType::F32, "as lent");
    });
}

pub(super) fn add(suite: &mut Suite) {
    suite.add("device/loans/read_only", read_only);
}
