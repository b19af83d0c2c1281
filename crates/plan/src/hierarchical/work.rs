//! What a step reads and writes: places in a slot, and ranges of the caller's tensors.

use super::{Slices, Step, slices::is_one_shot};
use brigade_device::{DataType, HierarchicalCall, Part, PerRank, Phase};
use std::ops::Range;

/// Elements at the front of a part of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which.
    pub part: Part,
    /// Of which type.
    pub dtype: DataType,
    /// How many.
    pub elements: usize,
}

/// Elements of a place, and where they are in the caller's tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// In the place.
    pub place: Range<usize>,
    /// In the tensor.
    pub tensor: Range<usize>,
}

/// One phase of one slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// What is done.
    pub phase: Phase,
    /// With what.
    pub from: Place,
    /// Where the result goes.
    pub to: Place,
    /// Elements of each: inside a machine, of its ranks' shares; along a rail, and where pieces are added, of its machines' pieces.
    pub pieces: PerRank,
    /// What is taken out of the caller's input first; nothing where the phase before has made it.
    pub take: Vec<Piece>,
    /// What is given to the caller's output then; nothing where another phase goes on with it.
    pub give: Vec<Piece>,
}

impl Slices {
    /// What `rank` of all machines does in a step of these phases.
    pub fn work(
        &self,
        call: &HierarchicalCall,
        phases: &[Phase],
        rank: usize,
        step: Step,
    ) -> Option<Work> {
        let Step { phase, slice } = step;
        let of = *phases.get(phase)?;
        let (first, last) = (phase == 0, phase + 1 == phases.len());
        let machines = call.machines;
        let (machine, local) = (machines.machine_of(rank), machines.local_of(rank));
        let (input, output) = (call.dtype, call.output);
        let travels = if machines.ranks() == 1 { input } else { output };
        let (rail, shares) = (self.rail(slice, local), self.shares(slice));
        let (own, share) = (rail[machine], rail.iter().sum());
        let all = shares.iter().sum();
        let place = |part, dtype, elements| Place {
            part,
            dtype,
            elements,
        };
        // Of one shot, every machine's share comes and is added; of two, each machine adds its piece of all.
        let one_shot = is_one_shot(phases);
        let adds = if one_shot { share } else { own };
        let collected = place(Part::Collected, travels, adds * machines.count());
        let sum = place(Part::Sum, output, own);
        let back = place(Part::Rail, output, share);
        let each = || PerRank::from_elem(adds, machines.count());
        let (from, to, pieces) = match of {
            Phase::ReduceInside => (
                place(Part::Input, input, all),
                place(Part::Share, output, share),
                shares,
            ),
            Phase::Collect => (place(Part::Share, travels, share), collected, rail),
            Phase::Diffuse if one_shot => (place(Part::Share, travels, share), collected, each()),
            Phase::Add if one_shot => (collected, back, each()),
            Phase::Add => (collected, sum, each()),
            Phase::Diffuse => (sum, back, rail),
            Phase::GatherInside => (back, place(Part::Output, output, all), shares),
        };
        // What goes out of a piece, or into one, is this rank's own.
        let own_piece = || {
            vec![Piece {
                place: 0..own,
                tensor: self.own(slice, rank),
            }]
        };
        let when = |is: bool, piece: bool| match (is, piece) {
            (false, _) => Vec::new(),
            (true, true) => own_piece(),
            (true, false) => self.runs(slice),
        };
        Some(Work {
            phase: of,
            from,
            to,
            pieces,
            take: when(first, of == Phase::Diffuse && !one_shot),
            give: when(last, of == Phase::Add && !one_shot),
        })
    }

    /// Where all pieces of a slice lie. Neighbours in the slot and in the tensor count as one; those without elements do not count.
    fn runs(&self, slice: usize) -> Vec<Piece> {
        let mut runs: Vec<Piece> = Vec::new();
        let mut place = 0;
        for tensor in self.pieces(slice).filter(|piece| !piece.is_empty()) {
            let end = place + tensor.len();
            match runs.last_mut() {
                Some(run) if run.tensor.end == tensor.start => {
                    run.tensor.end = tensor.end;
                    run.place.end = end;
                }
                _ => runs.push(Piece {
                    place: place..end,
                    tensor,
                }),
            }
            place = end;
        }
        runs
    }
}
