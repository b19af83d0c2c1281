//! All-to-all of rows that lists name: every row lies where its receiver wants it, bit for bit, and nothing else is touched.

use crate::{
    backend::Rank,
    check::{assert_bits, assert_kind, expect_fault, expect_invalid, expect_unsupported},
    copies::noise,
    faults::AMPLE,
    gather_linear::config,
    ops,
    suite::{Suite, World},
};
use brigade_device::{
    AllToAllRowsParams, Buffer, CommConfig, DataType, Error, FaultKind, Lease, Plan, Result,
    RowPayload,
};
use rand::{Rng, rngs::StdRng, seq::IndexedRandom, seq::SliceRandom};

/// Types and elements of a row, from one byte to more than a block of threads copies at a time.
const PAYLOADS: [&[(DataType, usize)]; 6] = [
    &[(DataType::U8, 1)],
    &[(DataType::BF16, 5), (DataType::U8, 3)],
    &[
        (DataType::F32, 64),
        (DataType::U8, 17),
        (DataType::I64, 1),
        (DataType::F8E4M3, 33),
    ],
    &[(DataType::F16, 8), (DataType::I32, 0), (DataType::F32, 1)],
    &[(DataType::BF16, 400)],
    &[(DataType::I8, 7), (DataType::U8, 250)],
];

/// What every rank sends to every rank, and where it goes.
pub struct Case {
    payloads: Vec<(DataType, usize)>,
    /// Rows that each rank has, and has room for.
    rows: Vec<[usize; 2]>,
    /// Rows that a rank (first index) sends to each.
    send: Vec<Vec<Vec<i32>>>,
    /// Where a rank (first index) puts what comes from each.
    recv: Vec<Vec<Vec<i32>>>,
    /// Length of the lists of rows, of which the last few are not named, and how many at the beginning are not.
    room: usize,
    gap: usize,
    /// Of each rank, for each payload.
    data: Vec<Vec<Vec<u8>>>,
}

impl Case {
    /// So many rows from a rank (first index) to each.
    pub fn new(rng: &mut StdRng, payloads: &[(DataType, usize)], counts: &[Vec<usize>]) -> Self {
        let sums = |i: usize| {
            let sent: usize = counts[i].iter().sum();
            let came: usize = counts.iter().map(|to| to[i]).sum();
            (sent, came)
        };
        let all = (0..counts.len()).map(sums);
        let room = all.clone().map(|(sent, came)| sent.max(came)).max();
        let rows: Vec<_> = all
            .map(|(sent, came)| [rng.random_range(sent.min(1)..=sent + 1), came + 3])
            .collect();
        Self::with_rows(rng, payloads, counts, rows, room.unwrap_or(0) + 4)
    }

    fn with_rows(
        rng: &mut StdRng,
        payloads: &[(DataType, usize)],
        counts: &[Vec<usize>],
        rows: Vec<[usize; 2]>,
        room: usize,
    ) -> Self {
        let size = counts.len();
        let (mut send, mut recv, mut data) = (vec![], vec![], vec![]);
        for rank in 0..size {
            let [have, fit] = rows[rank];
            let named = |rng: &mut StdRng| match have {
                0 => none(rng, have),
                _ if rng.random_ratio(1, 12) => none(rng, have),
                _ => rng.random_range(0..have as i32),
            };
            let to: Vec<Vec<i32>> = (0..size)
                .map(|to| (0..counts[rank][to]).map(|_| named(rng)).collect())
                .collect();
            send.push(to);
            let mut places: Vec<i32> = (0..fit as i32).collect();
            places.shuffle(rng);
            let mut places = places.into_iter();
            let from: Vec<Vec<i32>> = (0..size)
                .map(|from| {
                    let places = places.by_ref().take(counts[from][rank]);
                    places
                        .map(|p| match rng.random_ratio(1, 12) {
                            true => none(rng, fit),
                            false => p,
                        })
                        .collect()
                })
                .collect();
            recv.push(from);
            let bytes = payloads.iter().map(|(dtype, n)| have * n * dtype.bytes());
            data.push(bytes.map(|n| noise(rng, n)).collect());
        }
        Self {
            payloads: payloads.to_vec(),
            rows,
            send,
            recv,
            room,
            gap: rng.random_range(0..=2),
            data,
        }
    }

    /// Bytes that a rank sends to others.
    pub fn moved(&self, rank: usize) -> usize {
        let others = self.send[rank]
            .iter()
            .enumerate()
            .filter(|(to, _)| *to != rank);
        let rows: usize = others.map(|(_, list)| list.len()).sum();
        rows * self
            .payloads
            .iter()
            .map(|(d, n)| n * d.bytes())
            .sum::<usize>()
    }

    /// Makes the call, and asserts what arrives.
    pub fn run(&self, rank: &Rank) {
        let own = Own::of(rank, self);
        let plan = own.call(&mut rank.lease()).unwrap();
        assert!(matches!(plan, Plan::Queued { .. }), "{plan:?}");
        self.check(rank, &own);
    }

    fn check(&self, rank: &Rank, own: &Own) {
        self.check_over(rank, own, |bytes, _| vec![0xFF; bytes]);
    }

    /// The same where something lay there before: so many bytes for each payload.
    fn check_over(&self, rank: &Rank, own: &Own, before: impl Fn(usize, usize) -> Vec<u8>) {
        let me = rank.rank;
        for (i, &(dtype, n)) in self.payloads.iter().enumerate() {
            let each = n * dtype.bytes();
            let mut want = before(self.rows[me][1] * each, i);
            for (from, places) in self.recv[me].iter().enumerate() {
                for (&sent, &place) in self.send[from][me].iter().zip(places) {
                    let Some(place) = index(place, self.rows[me][1]) else {
                        continue;
                    };
                    let row = match index(sent, self.rows[from][0]) {
                        Some(row) => &self.data[from][i][row * each..][..each],
                        None => &vec![0; each][..],
                    };
                    want[place * each..][..each].copy_from_slice(row);
                }
            }
            let what = format!("payload {i}, rows of {n} {dtype}");
            let came = rank.raw(own.to[i].view());
            // What stopped the group says more than what lies there then.
            rank.comm()
                .check()
                .unwrap_or_else(|e| panic!("{what}: {e}"));
            assert_bits(&came, &want, dtype, &what);
        }
    }

    /// Offsets and rows, as the call takes them. Where nothing is named lies what must not be looked at.
    fn list(&self, of: &[Vec<i32>]) -> (Vec<i32>, Vec<i32>) {
        let mut rows = vec![1; self.gap];
        let mut offsets = vec![rows.len() as i32];
        for list in of {
            rows.extend(list);
            offsets.push(rows.len() as i32);
        }
        rows.resize(self.room, 0);
        (offsets, rows)
    }
}

/// A number that names none of so many rows.
fn none(rng: &mut StdRng, rows: usize) -> i32 {
    *[-1, rows as i32, i32::MAX, i32::MIN].choose(rng).unwrap()
}

fn index(row: i32, rows: usize) -> Option<usize> {
    usize::try_from(row).ok().filter(|&row| row < rows)
}

/// A rank's buffers.
struct Own {
    from: Vec<Buffer>,
    to: Vec<Buffer>,
    /// Offsets and rows of what is sent, and of what comes.
    lists: [Buffer; 4],
}

impl Own {
    fn of(rank: &Rank, case: &Case) -> Self {
        let me = rank.rank;
        let [have, fit] = case.rows[me];
        let payloads = case.payloads.iter().zip(&case.data[me]);
        let (send, recv) = (case.list(&case.send[me]), case.list(&case.recv[me]));
        let integers = |list: Vec<i32>| {
            rank.upload_bytes(DataType::I32, &[list.len()], bytemuck::cast_slice(&list))
        };
        Self {
            from: payloads
                .map(|(&(dtype, n), bytes)| rank.upload_bytes(dtype, &[have, n], bytes))
                .collect(),
            to: case
                .payloads
                .iter()
                .map(|&(dtype, n)| rank.poisoned(dtype, &[fit, n]))
                .collect(),
            lists: [send.0, send.1, recv.0, recv.1].map(integers),
        }
    }

    fn call(&self, lease: &mut Lease<'_>) -> Result<Plan> {
        let mut to = self.to.clone();
        let payloads: Vec<_> = self
            .from
            .iter()
            .zip(&mut to)
            .map(|(from, to)| RowPayload {
                from: from.view(),
                to: to.view_mut(),
            })
            .collect();
        let [send_offsets, send_rows, recv_offsets, recv_rows] =
            self.lists.each_ref().map(Buffer::view);
        lease.all_to_all_rows(AllToAllRowsParams {
            payloads: &payloads,
            send_offsets,
            send_rows,
            recv_offsets,
            recv_rows,
        })
    }

    /// Makes the call, and waits for it.
    fn settle(&self, rank: &Rank) -> Result<()> {
        let lease = rank.comm().lease(&rank.stream);
        let result = lease.and_then(|mut lease| self.call(&mut lease));
        rank.settle(result.map(drop))
    }
}

fn table(rng: &mut StdRng, size: usize, most: usize) -> Vec<Vec<usize>> {
    let row = |_| (0..size).map(|_| rng.random_range(0..=most)).collect();
    (0..size).map(row).collect()
}

/// Any small call, for stress.
pub fn draw(rng: &mut StdRng, size: usize) -> Case {
    let most = rng.random_range(0..40);
    let counts = table(rng, size, most);
    let payloads = PAYLOADS.choose(rng).unwrap();
    Case::new(rng, payloads, &counts)
}

/// Some from every rank to every rank, from some to one, from none to any.
fn ragged(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let mut cases = vec![];
    for payloads in PAYLOADS {
        let to_one = |rng: &mut StdRng| -> Vec<Vec<usize>> {
            let one = rng.random_range(0..size);
            let row = |from: usize| (0..size).map(move |to| if to == one { 3 * from } else { 0 });
            (0..size).map(|from| row(from).collect()).collect()
        };
        let all = [
            table(&mut rng, size, 9),
            to_one(&mut rng),
            vec![vec![0; size]; size],
            table(&mut rng, size, 60),
        ];
        cases.extend(all.map(|counts| Case::new(&mut rng, payloads, &counts)));
    }
    world.run(&config(), move |rank| {
        cases.iter().for_each(|case| case.run(rank));
    });
}

/// Many times what the queues hold, in both directions at once, from queues of one entry on.
fn more_than_fits(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    for part in [256, 1088, 8192] {
        let cases: Vec<_> = [0, 1, 5]
            .map(|i| {
                let mut counts = table(&mut rng, size, 150);
                counts[0][size - 1] = 400;
                Case::new(&mut rng, PAYLOADS[i], &counts)
            })
            .into();
        let wide = Case::new(&mut rng, PAYLOADS[4], &vec![vec![2; size]; size]);
        let config = CommConfig {
            fifo_bytes: part * size,
            ..config()
        };
        world.run(&config, move |rank| {
            for case in &cases {
                let each = case.payloads.iter().map(|(d, n)| d.bytes() * n);
                if each.map(|n| n.next_multiple_of(16)).sum::<usize>() + 64 <= part {
                    case.run(rank);
                    case.run(rank);
                }
            }
            if part > 1000 {
                wide.run(rank);
                return;
            }
            let refused = Own::of(rank, &wide).call(&mut rank.lease());
            let code = expect_unsupported(refused, "a row that no entry holds");
            assert_eq!(code, brigade_plan::reason::CAPACITY);
        });
    }
}

/// Queues of so many entries, and of so many bytes, as the configuration says: from one entry of one row on.
fn settings(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    // A row of the second payloads, with what an entry begins with, takes no more than 192 bytes.
    for (depth, entry_bytes) in [
        (Some(1), Some(192)),
        (Some(2), Some(320)),
        (Some(1), None),
        (Some(512), Some(192)),
        (None, Some(4160)),
        (Some(32), None),
    ] {
        let config = CommConfig {
            fifo_bytes: (128 << 10) * size,
            fifo_depth: depth,
            fifo_entry_bytes: entry_bytes,
            ..config()
        };
        let mut counts = table(&mut rng, size, 60);
        counts[0][size - 1] = 300;
        let case = Case::new(&mut rng, PAYLOADS[1], &counts);
        let wide = Case::new(&mut rng, PAYLOADS[4], &vec![vec![2; size]; size]);
        world.run(&config, move |rank| {
            let plan = Own::of(rank, &case).call(&mut rank.lease()).unwrap();
            let Plan::Queued {
                depth: d,
                entry_bytes: b,
                ..
            } = plan
            else {
                panic!("{plan} goes through no queues")
            };
            assert_eq!((d, b), (depth.unwrap_or(d), entry_bytes.unwrap_or(b)));
            case.run(rank);
            case.run(rank);
            // 800 bytes of a row, and what an entry begins with. Where that is left to the plan, there are fewer queues of larger ones.
            if entry_bytes.is_none_or(|bytes| bytes >= 928) {
                wide.run(rank);
                return;
            }
            let refused = Own::of(rank, &wide).call(&mut rank.lease());
            match refused {
                Err(Error::Unsupported(why)) => {
                    assert_eq!(why.code, brigade_plan::reason::CAPACITY);
                    assert!(why.remedy.contains("fifo_entry_bytes"), "{why}");
                }
                other => panic!("an entry of {b} bytes took a row: {other:?}"),
            }
        });
    }
    // What cannot be is no ballot either.
    world.run(&config(), move |rank| {
        for (field, depth, entry_bytes) in [
            ("fifo_depth", Some(3), None),
            ("fifo_depth", Some(0), Some(64)),
            ("fifo_depth", Some(1 << 17), None),
            ("fifo_entry_bytes", None, Some(0)),
            ("fifo_entry_bytes", Some(2), Some(100)),
        ] {
            let wrong = CommConfig {
                fifo_depth: depth,
                fifo_entry_bytes: entry_bytes,
                ..config()
            };
            let joined = rank.try_join_another(&wrong).map(drop);
            assert_eq!(expect_invalid(joined, field), field);
        }
        // Settings are voted on.
        let other = CommConfig {
            fifo_depth: (rank.rank == 0).then_some(2),
            ..config()
        };
        match rank.try_join_another(&other).map(drop) {
            Err(Error::Group { .. }) => assert!(size > 1, "a rank alone agrees"),
            other => assert!(size == 1 && other.is_ok(), "{other:?}"),
        }
    });
}

/// Rows that go where others come from: what is sent is what was there before.
fn in_place(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let cases: Vec<_> = (0..4)
        .map(|i| {
            let counts = table(&mut rng, size, 10);
            let rows = vec![[11 * size; 2]; size];
            Case::with_rows(&mut rng, PAYLOADS[i], &counts, rows, 10 * size + 2)
        })
        .collect();
    world.run(&config(), move |rank| {
        for case in &cases {
            let mut own = Own::of(rank, case);
            own.to = own.from.clone();
            own.call(&mut rank.lease()).unwrap();
            case.check_over(rank, &own, |_, i| case.data[rank.rank][i].clone());
        }
    });
}

/// A graph follows what the lists say when it is replayed.
fn captured(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let cases: Vec<_> = (0..12)
        .map(|_| {
            let counts = table(&mut rng, size, 12);
            let rows = vec![[20, 14 * size]; size];
            Case::with_rows(&mut rng, PAYLOADS[2], &counts, rows, 12 * size + 2)
        })
        .collect();
    world.run(&config(), move |rank| {
        let mut own = Own::of(rank, &cases[0]);
        let graph = rank
            .device
            .capture(&rank.stream, &mut || own.call(&mut rank.lease()).map(drop))
            .unwrap();
        // Making a graph may wait for the GPU, and so for a peer's replay where ranks share one.
        rank.meet();
        for (day, case) in cases.iter().enumerate() {
            let new = Own::of(rank, case);
            let (device, on) = (&rank.device, &rank.stream);
            let pairs = own.from.iter_mut().zip(&new.from);
            for (to, from) in pairs.chain(own.lists.iter_mut().zip(&new.lists)) {
                device.copy(on, to.view_mut(), from.view()).unwrap();
            }
            for to in &mut own.to {
                device.fill(on, to.view_mut(), 0xFF).unwrap();
            }
            graph.launch(on).unwrap().sync(AMPLE).unwrap();
            case.check(rank, &own);
            if day % 3 == 1 {
                new.call(&mut rank.lease()).unwrap();
                case.check(rank, &new);
            }
        }
    });
}

/// A pair that disagrees about its count is a mismatch on every rank; so is one that a rank makes with itself.
fn disagreeing_pair(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let receiver = rng.random_range(0..size);
    let sender = rng.random_range(0..size);
    let case = Case::new(&mut rng, PAYLOADS[1], &vec![vec![3; size]; size]);
    let mut wrong = Case::new(&mut rng, PAYLOADS[1], &vec![vec![3; size]; size]);
    wrong.recv[receiver][sender].push(-1);
    world.run(&config(), move |rank| {
        let own = Own::of(rank, &wrong);
        let result = own.settle(rank);
        // A rank that had no part in it may have ended the call, and hears of it in the next one.
        let result = result.and_then(|()| ops::barrier().run(rank).result);
        let record = expect_fault(result, "a pair that disagrees");
        assert_kind(&record, FaultKind::Mismatch, "a pair that disagrees");
        let pair = (record.rank as usize, record.peer as usize);
        assert_eq!(pair, (receiver, sender), "{record}");
        assert_eq!((record.expected, record.seen), (4, 3), "{record}");
        rank.comm().reset(AMPLE).unwrap();
        case.run(rank);
    });
}

/// Offsets that lead out of their list, or back in it, stop the group.
fn bad_offsets(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let culprit = rng.random_range(0..size);
    let case = Case::new(&mut rng, PAYLOADS[1], &vec![vec![3; size]; size]);
    world.run(&config(), move |rank| {
        for (list, offset) in [
            (0, -1),
            (0, 1 << 20),
            (2, i32::MIN),
            (2, case.room as i32 + 1),
        ] {
            let mut own = Own::of(rank, &case);
            // Nobody stops the group while others are still in the last call.
            rank.meet();
            if rank.rank == culprit {
                let mut offsets = rank.raw(own.lists[list].view());
                let last = offsets.len() - 4;
                offsets[last..].copy_from_slice(&offset.to_ne_bytes());
                own.lists[list] = rank.upload_bytes(DataType::I32, &[size + 1], &offsets);
            }
            let result = own.settle(rank);
            let result = result.and_then(|()| ops::barrier().run(rank).result);
            let record = expect_fault(result, "offsets");
            assert_kind(&record, FaultKind::Overflow, "offsets");
            assert_eq!(record.rank as usize, culprit, "{record}");
            assert_eq!(record.expected, case.room as u64, "{record}");
            rank.comm().reset(AMPLE).unwrap();
            case.run(rank);
        }
    });
}

/// What is wrong is named.
fn refused(world: &World) {
    let mut rng = world.rng();
    let size = world.size;
    let case = Case::new(&mut rng, PAYLOADS[1], &vec![vec![2; size]; size]);
    world.run(&config(), move |rank| {
        let mut lease = rank.lease();
        let mut with = |field: &str, change: &dyn Fn(&mut Own)| {
            let mut own = Own::of(rank, &case);
            change(&mut own);
            assert_eq!(expect_invalid(own.call(&mut lease), field), field);
        };
        let fit = case.rows[rank.rank][1];
        with("payloads", &|own| own.from.clear());
        with("payloads", &|own| {
            own.from = vec![own.from[0].clone(); 5];
            own.to = vec![own.to[0].clone(); 5];
        });
        with("payloads.from", &|own| {
            own.from[1] = rank.poisoned(DataType::U8, &[99, 3]);
        });
        with("payloads.to", &|own| {
            own.to[1] = rank.poisoned(DataType::U8, &[fit + 1, 3]);
        });
        with("payloads.to", &|own| {
            own.to[0] = rank.poisoned(DataType::F16, &[fit, 5]);
        });
        with("payloads.to", &|own| {
            own.to[0] = rank.poisoned(DataType::BF16, &[fit, 6]);
        });
        let lists = ["send_offsets", "send_rows", "recv_offsets", "recv_rows"];
        for (i, field) in lists.into_iter().enumerate() {
            with(field, &|own| {
                own.lists[i] = rank.poisoned(DataType::I64, &[size + 1]);
            });
            with(field, &|own| {
                let length = if i % 2 == 0 { size + 2 } else { 4 };
                let dims = [vec![length], vec![length, 2]][i % 2].clone();
                own.lists[i] = rank.poisoned(DataType::I32, &dims);
            });
        }
        Own::of(rank, &case).call(&mut lease).unwrap();
    });
    let none = CommConfig {
        fifo_bytes: 0,
        ..config()
    };
    let case = Case::new(&mut rng, PAYLOADS[1], &vec![vec![2; size]; size]);
    world.run(&none, move |rank| {
        let refused = Own::of(rank, &case).call(&mut rank.lease());
        let code = expect_unsupported(refused, "no queues");
        assert_eq!(code, brigade_plan::reason::CAPACITY);
    });
}

/// Adds the contracts.
pub fn add(suite: &mut Suite) {
    if !suite.backend().engines().dispatches {
        return;
    }
    suite.add("all_to_all_rows/ragged", ragged);
    suite.add("all_to_all_rows/more_than_fits", more_than_fits);
    suite.add("all_to_all_rows/settings", settings);
    suite.add("all_to_all_rows/in_place", in_place);
    suite.add("all_to_all_rows/captured", captured);
    suite.add("all_to_all_rows/disagreeing_pair", disagreeing_pair);
    suite.add("all_to_all_rows/bad_offsets", bad_offsets);
    suite.add("all_to_all_rows/refused", refused);
}
