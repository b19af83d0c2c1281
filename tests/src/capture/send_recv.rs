//! Data that goes to the next rank while it comes from the one before.

use super::{Captured, DAYS, Subject};
use crate::{backend::Rank, check::assert_bits, copies::noise, send_recv::swap_around};
use brigade_device::{DataType, RecvParams, SendParams};
use rand::{Rng, rngs::StdRng};

struct Around {
    days: Vec<Vec<Vec<u8>>>,
}

/// Of any length: less than a slot holds, or several times as much.
pub(super) fn subject(rng: &mut StdRng, size: usize) -> Box<dyn Subject> {
    let most = [100, 300_000][rng.random_range(0..2)];
    let len = rng.random_range(1..most);
    let day = |_| (0..size).map(|_| noise(rng, len)).collect();
    Box::new(Around {
        days: (0..DAYS).map(day).collect(),
    })
}

impl Subject for Around {
    fn capture(&self, rank: &Rank) -> Captured {
        let (me, size, dtype) = (rank.rank, rank.size, DataType::U8);
        let from = rank.upload_bytes(dtype, &[self.days[0][me].len()], &self.days[0][me]);
        let to = rank.poisoned(dtype, &[self.days[0][me].len()]);
        Captured::new(rank, from, to, |from, to| {
            rank.lease()
                .send_recv(
                    SendParams {
                        from: from.view(),
                        peer: (me + 1) % size,
                    },
                    RecvParams {
                        to: to.view_mut(),
                        peer: (me + size - 1) % size,
                    },
                )
                .unwrap();
        })
    }
    fn input(&self, rank: usize, day: usize) -> Vec<u8> {
        self.days[day][rank].clone()
    }
    fn check(&self, rank: &Rank, day: usize, output: &[u8]) {
        let from = (rank.rank + rank.size - 1) % rank.size;
        assert_bits(output, &self.days[day][from], DataType::U8, "a replay");
    }
    fn eager(&self, rank: &Rank, day: usize) {
        swap_around(rank, &self.days[day]);
    }
}
