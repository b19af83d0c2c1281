//! Where rows go, in groups of up to 1024 ranks: asks nobody, so one device can be any rank of them.

use crate::{backend::Routes, check::expect_invalid, suite::World};
use brigade_device::{
    Buffer, DataType, ExpertLayout, Group, MemoryType, ParallelMode, Placement, PlacementCall,
    Routing, Stream,
};
use brigade_plan::routes;
use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

const SIZES: [usize; 11] = [1, 2, 3, 5, 8, 16, 72, 255, 512, 1000, 1024];
const KS: [usize; 8] = [1, 2, 4, 6, 8, 10, 22, 32];
const EXPERTS: [usize; 10] = [8, 9, 11, 60, 64, 127, 128, 256, 1000, 1024];
const TOKENS: [usize; 7] = [0, 1, 3, 128, 512, 1025, 4096];

/// Where experts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placed {
    Even,
    Map,
    Ranks,
}

const PLACES: [Placed; 3] = [Placed::Even, Placed::Map, Placed::Ranks];

#[derive(Debug)]
struct Case {
    size: usize,
    rank: usize,
    tokens: usize,
    k: usize,
    experts: usize,
    placed: Placed,
    /// Ids are i64.
    wide: bool,
    ids: Vec<i64>,
    /// Slots of every expert that has some, `copies` at most.
    map: Vec<Vec<i32>>,
    copies: usize,
    per_rank: usize,
}

impl Case {
    fn new(
        rng: &mut StdRng,
        (size, tokens, k, experts): (usize, usize, usize, usize),
        placed: Placed,
    ) -> Self {
        let (copies, per_rank) = (rng.random_range(1..=4), rng.random_range(1..=9));
        let known = if placed == Placed::Ranks {
            size
        } else {
            experts
        } as i64;
        let wide = rng.random();
        // What names no expert, of which some would if a part of it were left out.
        let nobody = match wide {
            false => [-1, -7, known, i64::from(i32::MIN), i64::from(i32::MAX)],
            true => [-1, known, i64::MIN, i64::MAX, 1 << 32 | (known - 1)],
        };
        // Few experts for many tokens, or any.
        let some = rng.random_range(1..=known);
        let narrow = rng.random_range(0..3) == 0;
        let none = rng.random_range(2..20);
        let ids = (0..tokens * k)
            .map(|_| match rng.random_range(0..none) {
                0 => nobody.choose(rng).copied().unwrap_or(-1),
                _ if narrow => some - 1,
                _ => rng.random_range(0..known),
            })
            .collect();
        let slots = (per_rank * size) as i32;
        let map = (0..experts)
            .map(|_| {
                let there = rng.random_range(0..=copies);
                (0..there).map(|_| rng.random_range(0..slots)).collect()
            })
            .collect();
        Self {
            size,
            rank: *[0, size - 1, rng.random_range(0..size)]
                .choose(rng)
                .unwrap_or(&0),
            tokens,
            k,
            experts,
            placed,
            wide,
            ids,
            map,
            copies,
            per_rank,
        }
    }

    /// Whose each slot is.
    fn owners(&self) -> Vec<usize> {
        let of = |rank: usize| match self.placed {
            Placed::Even => {
                let more = usize::from(rank < self.experts % self.size);
                self.experts / self.size + more
            }
            Placed::Map => self.per_rank,
            Placed::Ranks => 1,
        };
        let each = (0..self.size).map(|rank| std::iter::repeat_n(rank, of(rank)));
        each.flatten().collect()
    }

    fn slot(&self, token: usize, id: i64) -> Option<usize> {
        let known = match self.placed {
            Placed::Ranks => self.size,
            Placed::Even | Placed::Map => self.experts,
        };
        let id = (0..known as i64).contains(&id).then_some(id as usize)?;
        if self.placed != Placed::Map {
            return Some(id);
        }
        let copies = &self.map[id];
        if copies.is_empty() {
            return None;
        }
        Some(copies[(token + self.rank) % copies.len()] as usize)
    }

    /// What the contract says, token by token.
    fn want(&self) -> routes::Routes {
        let owners = self.owners();
        let mut want = routes::Routes {
            slots: vec![],
            positions: vec![-1; self.tokens * self.size],
            sent: vec![],
            sent_offsets: vec![0],
            rows_per_slot: vec![0; owners.len()],
        };
        let mut goes = vec![vec![]; self.size];
        for token in 0..self.tokens {
            let mut ranks = vec![];
            for entry in 0..self.k {
                let slot = self.slot(token, self.ids[token * self.k + entry]);
                want.slots.push(slot.map_or(-1, |s| s as i32));
                if let Some(slot) = slot {
                    want.rows_per_slot[slot] += 1;
                    ranks.push(owners[slot]);
                }
            }
            ranks.sort_unstable();
            ranks.dedup();
            for rank in ranks {
                want.positions[token * self.size + rank] = goes[rank].len() as i32;
                goes[rank].push(token as i32);
            }
        }
        for list in goes {
            want.sent.extend(list);
            want.sent_offsets.push(want.sent.len() as i32);
        }
        let room = self.tokens * self.k.min(self.size);
        assert!(want.sent.len() <= room, "more than {room} rows of {self:?}");
        want.sent.resize(room, -1);
        want
    }

    /// The map as it lies in memory, with -1 behind the last.
    fn lying(&self) -> Vec<i32> {
        let of = |slots: &Vec<i32>| {
            (0..self.copies)
                .map(|i| slots.get(i).copied().unwrap_or(-1))
                .collect::<Vec<_>>()
        };
        self.map.iter().flat_map(of).collect()
    }

    /// What they are, and not what is in them.
    fn about(&self) -> String {
        format!(
            "rank {} of {}, {} tokens, k {}, {} experts, {:?}, i64 {}, {} copies, {} slots",
            self.rank,
            self.size,
            self.tokens,
            self.k,
            self.experts,
            self.placed,
            self.wide,
            self.copies,
            self.per_rank
        )
    }

    fn check(&self, device: &dyn Routes, on: &Stream) {
        let want = self.want();
        let map = self.lying();
        let placement = match self.placed {
            Placed::Even => PlacementCall::Even {
                experts: self.experts,
            },
            Placed::Map => PlacementCall::Map {
                experts: self.experts,
                copies: self.copies,
                per_rank: self.per_rank,
            },
            Placed::Ranks => PlacementCall::Ranks,
        };
        let chooser = routes::Chooser {
            placement,
            map: &map,
            rank: self.rank,
            size: self.size,
        };
        let planned = routes::Routes::new(&self.ids, self.k, &chooser);
        assert!(planned == want, "planned for {}", self.about());
        let upload = |dtype, dims: &[usize], bytes: &[u8]| {
            let mut buffer = device
                .allocate(on, MemoryType::Device, dtype, dims)
                .unwrap();
            device.write(on, buffer.view_mut(), bytes).unwrap();
            buffer
        };
        let dims = [self.tokens, self.k];
        let ids = if self.wide {
            upload(DataType::I64, &dims, bytemuck::cast_slice(&self.ids))
        } else {
            let narrow: Vec<i32> = self.ids.iter().map(|&id| id as i32).collect();
            upload(DataType::I32, &dims, bytemuck::cast_slice(&narrow))
        };
        let dims = [self.experts, self.copies];
        let slots = upload(DataType::I32, &dims, bytemuck::cast_slice(&map));
        let routing = Routing {
            ids: ids.view(),
            placement: match self.placed {
                Placed::Even => Placement::Even {
                    experts: self.experts,
                },
                Placed::Map => Placement::Map {
                    slots: slots.view(),
                    per_rank: self.per_rank,
                },
                Placed::Ranks => Placement::Ranks,
            },
        };
        let group = Group {
            mode: ParallelMode::Ep,
            rank: self.rank,
            size: self.size,
        };
        poison(device, on, &want);
        let layout = device.layout(on, routing, group).unwrap();
        let ExpertLayout {
            slots,
            positions,
            sent,
            sent_offsets,
            rows_per_slot,
        } = &layout;
        for (name, got, want) in [
            ("slots", slots, &want.slots),
            ("positions", positions, &want.positions),
            ("sent", sent, &want.sent),
            ("sent_offsets", sent_offsets, &want.sent_offsets),
            ("rows_per_slot", rows_per_slot, &want.rows_per_slot),
        ] {
            same(name, &integers(device, on, got), want, self);
        }
    }
}

fn integers(device: &dyn Routes, on: &Stream, buffer: &Buffer) -> Vec<i32> {
    let mut bytes = vec![0; buffer.bytes()];
    device.read(on, buffer.view(), &mut bytes).unwrap();
    bytemuck::pod_collect_to_vec(&bytes)
}

/// Leaves memory behind that is not empty, for buffers of these sizes.
fn poison(device: &dyn Routes, on: &Stream, like: &routes::Routes) {
    let lists = [
        &like.slots,
        &like.positions,
        &like.sent,
        &like.sent_offsets,
        &like.rows_per_slot,
    ];
    let used = lists.map(|list| {
        let dims = [list.len()];
        let buffer = device.allocate(on, MemoryType::Device, DataType::I32, &dims);
        let mut buffer = buffer.unwrap();
        device.fill(on, buffer.view_mut(), 0x5A).unwrap();
        buffer
    });
    drop(used);
}

fn same(name: &str, got: &[i32], want: &[i32], case: &Case) {
    assert_eq!(got.len(), want.len(), "{name}: {}", case.about());
    let wrong = (0..got.len()).find(|&i| got[i] != want[i]);
    if let Some(i) = wrong {
        let (got, want) = (got[i], want[i]);
        panic!("{name}[{i}] is {got} instead of {want}: {}", case.about());
    }
}

/// Every number of tokens with every k; every size, and every number of experts, with each placement; and all else at random.
pub fn of_any_group(world: &World) {
    let mut rng = world.rng();
    let device = world.backend.routes().unwrap().unwrap();
    let on = device.stream(0).unwrap();
    let mut any = |size: Option<usize>,
                   tokens: Option<usize>,
                   k: Option<usize>,
                   experts: Option<usize>,
                   placed: Option<Placed>| {
        let mut of = |given: Option<usize>, all: &[usize]| {
            given.or_else(|| all.choose(&mut rng).copied()).unwrap_or(1)
        };
        let sizes = (
            of(size, &SIZES),
            of(tokens, &TOKENS),
            of(k, &KS),
            of(experts, &EXPERTS),
        );
        let placed = placed.or_else(|| PLACES.choose(&mut rng).copied());
        Case::new(&mut rng, sizes, placed.unwrap_or(Placed::Even)).check(&*device, &on);
    };
    for tokens in TOKENS {
        for k in KS {
            any(None, Some(tokens), Some(k), None, None);
        }
    }
    for placed in PLACES {
        for size in SIZES {
            any(Some(size), None, None, None, Some(placed));
        }
        for experts in EXPERTS {
            any(None, None, None, Some(experts), Some(placed));
        }
    }
    any(Some(1024), Some(4096), Some(32), Some(1024), None);
}

/// A group that cannot be is refused.
pub fn of_no_group(world: &World) {
    let device = world.backend.routes().unwrap().unwrap();
    let on = device.stream(0).unwrap();
    let memory = MemoryType::Device;
    let ids = device
        .allocate(&on, memory, DataType::I32, &[3, 2])
        .unwrap();
    let layout = |rank, size| {
        let routing = Routing {
            ids: ids.view(),
            placement: Placement::Even { experts: 8 },
        };
        let mode = ParallelMode::Ep;
        device.layout(&on, routing, Group { mode, rank, size })
    };
    for size in [0, 1025, 1 << 40, usize::MAX] {
        let what = format!("{size} ranks");
        assert_eq!(expect_invalid(layout(0, size), &what), "group.size");
    }
    for (rank, size) in [(1, 1), (5, 2), (usize::MAX, 1024)] {
        let what = format!("rank {rank} of {size}");
        assert_eq!(expect_invalid(layout(rank, size), &what), "group.rank");
    }
    layout(1023, 1024).unwrap();
}
