//! Between a send and its receive the stream goes on: nothing of the exchange is left there that waits, and what was sent is no longer
//! read where it came from.

use super::{back::Back, by_rank, came::check, config, drawn, here, send};
use crate::{
    backend::Rank, check::assert_close, experts::own::Own, matrix::Matrix, oracle, suite::World,
};
use brigade_device::{Buffer, CombineCast, DataType, GemmParams, Output, ScaleFormat};
use rand::Rng;

/// A product that every rank makes on its stream, and what it is.
struct Product {
    a: Matrix,
    b: Matrix,
    want: Vec<f64>,
}

impl Product {
    /// Enqueues it behind what the stream has, and waits for the stream.
    fn run(&self, rank: &Rank) {
        let (a, b) = (rank.upload(&self.a), rank.upload(&self.b));
        let mut d = rank.poisoned(DataType::F32, &[self.a.rows(), self.b.columns()]);
        let output = Output::Into(d.view_mut());
        let params = GemmParams::new(&a, &b);
        rank.device.gemm(&rank.stream, &params, output).unwrap();
        let end = rank.stream.record().unwrap();
        rank.settle(Ok(())).unwrap();
        assert!(end.done().unwrap(), "the stream's work is not over");
        let got = rank.values(d.view());
        assert_close(&got, &self.want, DataType::F32, "between send and receive");
    }
}

/// A rank does not send before all others have sent, and made a product behind that on the same stream, to its end. What they have sent
/// from is overwritten then, before anybody receives.
///
/// Whoever left a wait on the stream would wait for that rank, and for ever, since that rank waits for everybody.
pub fn apart(world: &World) {
    let mut rng = world.rng();
    let (m, k, n) = (24, 40, 32);
    let a = Matrix::random(&mut rng, DataType::F32, &[m, k], 1.0);
    let b = Matrix::random(&mut rng, DataType::F32, &[k, n], 1.0);
    let want = oracle::multiply(&a, false, &b, false);
    let product = Product { a, b, want };
    let casts = [
        None,
        None,
        Some(CombineCast::Fp8(ScaleFormat::F32)),
        Some(CombineCast::LogFmt10),
        None,
    ];
    let rounds: Vec<_> = casts
        .into_iter()
        .enumerate()
        .map(|(i, cast)| {
            let round = drawn(&mut rng, world.size, (12, 128, 3, 2 * world.size + 1));
            let (case, back) = if i % 2 == 0 {
                here(round)
            } else {
                by_rank(round)
            };
            let back = match cast {
                Some(CombineCast::LogFmt10) => back.in_logfmt(),
                cast => Back { cast, ..back },
            };
            (case, back, rng.random_range(0..world.size))
        })
        .collect();
    world.run(&config(), move |rank| {
        let mut exchange = rank.low_latency();
        let (slot, _) = exchange.slots();
        // What is loaded first waits for others where they share a GPU.
        product.run(rank);
        rank.meet();
        for (case, back, late) in &rounds {
            let is_late = rank.rank == *late;
            let mut own = Own::of(rank, case);
            let mut made = back.rows(rank, case);
            // Uploads are behind them.
            rank.settle(Ok(())).unwrap();
            if is_late {
                rank.meet();
            }
            let sent = send(&mut rank.lease(), slot, (&own, case), back.weighted).unwrap();
            product.run(rank);
            overwrite(rank, &mut own.rows);
            if !is_late {
                rank.meet();
            }
            rank.meet();
            let there = sent.receive(&mut rank.lease()).unwrap();
            check(rank, case, &there);
            if is_late {
                rank.meet();
            }
            let p = back.params(&made, &own);
            let returned = rank.lease().low_latency_combine(&there, p).unwrap();
            product.run(rank);
            overwrite(rank, &mut made);
            if !is_late {
                rank.meet();
            }
            rank.meet();
            back.receive(rank, &mut rank.lease(), case, returned);
        }
    });
}

fn overwrite(rank: &Rank, rows: &mut Buffer) {
    rank.device
        .fill(&rank.stream, rows.view_mut(), 0xFF)
        .unwrap();
}
