//! What ranks move, layer by layer, is what the schedules' formulas say: no byte more, none less.
#![allow(clippy::unwrap_used)]

mod common;

use brigade::OverlapMode;
use brigade_demo::{
    Source, Synthetic,
    parallel::{Generated, Kind, LayerReport, Phase, generate},
    shard,
};
use common::{CHUNKED, options};

/// One whose rows four ranks do not divide, and one that leaves two of four ranks without rows.
fn cases() -> [Vec<Vec<u32>>; 2] {
    [
        vec![
            vec![5, 309],
            (0..20).collect(),
            vec![3, 77, 500, 12, 12, 0, 511],
        ],
        vec![vec![5, 309]],
    ]
}

const MAX_TOKENS: usize = 5;

/// A token at which the last sequence ends on its way, while no other sequence ever says it.
fn end(model: &Synthetic, prompts: &[Vec<u32>]) -> u32 {
    let free = common::answers(model, prompts, u32::MAX, MAX_TOKENS, None);
    let (last, others) = free.split_last().unwrap();
    let new = |&i: &usize| !last[..i].contains(&last[i]) && !others.concat().contains(&last[i]);
    last[(1..MAX_TOKENS - 1).find(new).unwrap()]
}

/// A run, and what its formulas are made of.
struct Case {
    ranks: usize,
    mode: OverlapMode,
    /// Rows of each prompt.
    prompts: Vec<usize>,
    /// Bytes of a hidden state.
    hidden: usize,
    /// Sequences that each decoding step goes on with.
    active: Vec<usize>,
}

impl Case {
    fn total(&self) -> usize {
        self.prompts.iter().sum()
    }

    /// Rows of a rank: the first ranks have one more where ranks do not divide them.
    fn rows(&self, rank: usize) -> usize {
        self.total() / self.ranks + usize::from(rank < self.total() % self.ranks)
    }

    /// Last rows of prompts that lie on a rank.
    fn last_rows(&self, rank: usize) -> usize {
        let first: usize = (0..rank).map(|r| self.rows(r)).sum();
        let own = first..first + self.rows(rank);
        let ends = self.prompts.iter().scan(0, |end, rows| {
            *end += rows;
            Some(*end - 1)
        });
        ends.filter(|last| own.contains(last)).count()
    }

    /// Bytes that one gather-linear moves.
    fn gather(&self, rank: usize) -> usize {
        let rows = match self.mode {
            // Everything passes on, but what the next rank had first.
            OverlapMode::Ring => self.total() - self.rows((rank + 1) % self.ranks),
            // Own rows go to everybody.
            _ => self.rows(rank) * (self.ranks - 1),
        };
        rows * self.hidden
    }

    /// Bytes that one twin moves.
    fn scatter(&self, rank: usize) -> usize {
        let rows = match self.mode {
            // Own rows come from everybody.
            OverlapMode::Off => self.rows(rank) * (self.ranks - 1),
            // Parts go to their owners.
            _ => self.total() - self.rows(rank),
        };
        rows * self.hidden
    }

    /// Calls, and bytes of a rank, for a phase and kind; the layers are those of the model.
    fn want(&self, phase: Phase, kind: Kind, layers: usize, rank: usize) -> (usize, usize) {
        let peers = self.ranks - 1;
        // The best logit and its token, f64 each.
        let choice = 2 * 8;
        let (steps, decoded) = (self.active.len(), self.active.iter().sum::<usize>());
        match (phase, kind) {
            (Phase::Prefill, Kind::Embedding) => (1, self.rows(rank) * peers * self.hidden),
            (Phase::Prefill, Kind::QueryKeyValue | Kind::GateUp) => {
                (layers, layers * self.gather(rank))
            }
            (Phase::Prefill, Kind::AttentionOutput | Kind::Down) => {
                (layers, layers * self.scatter(rank))
            }
            (Phase::Prefill, Kind::Head) => {
                let others = self.prompts.len() - self.last_rows(rank);
                (1, others * self.hidden)
            }
            (Phase::Prefill, Kind::Choice) => (1, self.prompts.len() * peers * choice),
            (Phase::Decode, Kind::Embedding) => (steps, decoded * peers * self.hidden),
            (Phase::Decode, Kind::AttentionOutput | Kind::Down) => {
                (steps * layers, layers * decoded * peers * self.hidden)
            }
            (Phase::Decode, Kind::Choice) => (steps, decoded * peers * choice),
            (Phase::Decode, other) => panic!("{} moves nothing", other.name()),
        }
    }
}

const KINDS: [(Phase, Kind); 11] = [
    (Phase::Prefill, Kind::Embedding),
    (Phase::Prefill, Kind::QueryKeyValue),
    (Phase::Prefill, Kind::AttentionOutput),
    (Phase::Prefill, Kind::GateUp),
    (Phase::Prefill, Kind::Down),
    (Phase::Prefill, Kind::Head),
    (Phase::Prefill, Kind::Choice),
    (Phase::Decode, Kind::Embedding),
    (Phase::Decode, Kind::AttentionOutput),
    (Phase::Decode, Kind::Down),
    (Phase::Decode, Kind::Choice),
];

fn plan_of(layer: &LayerReport, ranks: usize, mode: OverlapMode) -> bool {
    match layer.kind {
        Kind::QueryKeyValue | Kind::AttentionOutput | Kind::GateUp | Kind::Down
            if layer.phase == Phase::Prefill =>
        {
            let mode = if ranks == 1 { OverlapMode::Off } else { mode };
            layer.plan.split(' ').next() == Some(&mode.to_string())
        }
        _ => !layer.plan.is_empty(),
    }
}

fn check(case: &Case, layers: usize, got: &Generated) {
    let found: Vec<(Phase, Kind)> = got.layers.iter().map(|l| (l.phase, l.kind)).collect();
    assert_eq!(found, KINDS);
    for layer in &got.layers {
        let about = format!(
            "{} of {} on {} ranks, {}: {}",
            layer.kind.name(),
            layer.phase.name(),
            case.ranks,
            case.mode,
            layer.plan
        );
        assert!(plan_of(layer, case.ranks, case.mode), "{about}");
        let want: Vec<(usize, usize)> = (0..case.ranks)
            .map(|rank| case.want(layer.phase, layer.kind, layers, rank))
            .collect();
        assert_eq!(layer.calls, want[0].0 as u64, "calls: {about}");
        let bytes: Vec<u64> = want.iter().map(|w| w.1 as u64).collect();
        assert_eq!(layer.moved_bytes, bytes, "{about}");
    }
}

#[test]
fn every_kind_of_layer_moves_what_its_schedule_says() {
    let model = Synthetic::new(Synthetic::small_config(), 5).unwrap();
    let config = model.config();
    let modes = [
        OverlapMode::Off,
        OverlapMode::Ring,
        CHUNKED(1).unwrap(),
        CHUNKED(3).unwrap(),
    ];
    for prompts in cases() {
        let end = end(&model, &prompts);
        for ranks in 1..=4 {
            for mode in modes {
                let options = options(ranks, MAX_TOKENS, Some(mode));
                let got = generate(&model, &prompts, end, &options, &mut |_, _| {}).unwrap();
                assert!((2..MAX_TOKENS).contains(&got.tokens.last().unwrap().len()));
                let steps = got.tokens.iter().map(Vec::len).max().unwrap();
                let goes_on = |step| got.tokens.iter().filter(|t| t.len() > step).count();
                let case = Case {
                    ranks,
                    mode,
                    prompts: prompts.iter().map(Vec::len).collect(),
                    hidden: config.hidden * 4,
                    active: (1..steps).map(goes_on).collect(),
                };
                check(&case, config.layers, &got);
            }
        }
    }
}

/// The formulas by hand for one case, so that they do not only agree with themselves.
#[test]
fn twenty_nine_rows_on_four_ranks_move_these_bytes() {
    let case = |mode| Case {
        ranks: 4,
        mode,
        prompts: vec![2, 20, 7],
        hidden: 384,
        active: vec![3, 2, 2, 2],
    };
    let ring = case(OverlapMode::Ring);
    assert_eq!([0, 1, 2, 3].map(|r| ring.rows(r)), [8, 7, 7, 7]);
    assert_eq!([0, 1, 2, 3].map(|r| ring.last_rows(r)), [1, 0, 1, 1]);
    assert_eq!([0, 1, 2, 3].map(|r| ring.gather(r) / 384), [22, 22, 22, 21]);
    assert_eq!(
        [0, 1, 2, 3].map(|r| ring.scatter(r) / 384),
        [21, 22, 22, 22]
    );
    let off = case(OverlapMode::Off);
    assert_eq!([0, 1, 2, 3].map(|r| off.gather(r) / 384), [24, 21, 21, 21]);
    assert_eq!([0, 1, 2, 3].map(|r| off.scatter(r) / 384), [24, 21, 21, 21]);
}

/// Sixty-four KiB are the last that an all-reduce moves in one shot, which is to and from everybody.
#[test]
fn many_sequences_are_summed_in_two_shots() {
    let model = Synthetic::new(Synthetic::small_config(), 5).unwrap();
    let hidden = model.config().hidden;
    for (sequences, two_shot) in [(170, false), (171, true)] {
        let prompts: Vec<Vec<u32>> = (0..sequences)
            .map(|i| vec![i, 2 * i, 3 * i % 512])
            .collect();
        let ranks = 3;
        let options = options(ranks, 2, None);
        let got = generate(&model, &prompts, u32::MAX, &options, &mut |_, _| {}).unwrap();
        assert_eq!(
            got.tokens,
            common::answers(&model, &prompts, u32::MAX, 2, None)
        );
        let down = got
            .layers
            .iter()
            .find(|l| (l.phase, l.kind) == (Phase::Decode, Kind::Down));
        let down = down.unwrap();
        assert_eq!(down.plan.starts_with("TwoShot"), two_shot, "{}", down.plan);
        let elements = prompts.len() * hidden;
        for (rank, &moved) in down.moved_bytes.iter().enumerate() {
            let own = elements / ranks + usize::from(rank < elements % ranks);
            let elements = if two_shot {
                // Its own share from every peer, then the sums of the others' shares.
                own * (ranks - 1) + (elements - own)
            } else {
                elements * (ranks - 1)
            };
            assert_eq!(moved, (4 * elements * model.config().layers) as u64);
        }
    }
}

#[test]
fn a_rank_holds_its_shard_and_no_more() {
    let model = Synthetic::new(Synthetic::small_config(), 5).unwrap();
    for ranks in 1..=6 {
        let options = options(ranks, 0, None);
        let got = generate(&model, &[vec![1]], 2, &options, &mut |_, _| {}).unwrap();
        let shards = shard::plan(model.config(), ranks).unwrap();
        let want: Vec<u64> = shards
            .iter()
            .map(|s| 4 * s.parameters(model.config()))
            .collect();
        assert_eq!(got.weight_bytes, want);
        assert!(got.layers.is_empty());
    }
}
