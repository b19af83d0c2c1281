//! A step of decoding in one graph: captured once, and launched for as long as nothing but its numbers changes.

use super::{rank::Rank, tally::Tally};
use crate::{Error, Result};
use brigade::{Bootstrap, Replay, group::agree};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use std::{any::Any, sync::Arc};

/// Where a step finds the last token of each active sequence, and leaves the next one: nothing is uploaded between steps.
#[derive(Clone)]
pub(super) struct Slots {
    /// Which sequences.
    pub(super) active: Vec<usize>,
    /// u32, one for each of them.
    pub(super) tokens: Tensor,
    /// Where these tokens stand in their sequences, likewise.
    pub(super) positions: Tensor,
}

impl Slots {
    /// For sequences with their last tokens, and how many tokens were read of each before.
    pub(super) fn new(
        active: &[(usize, u32)],
        read: &[usize],
        place: &Device,
    ) -> candle_core::Result<Self> {
        let tokens: Vec<u32> = active.iter().map(|&(_, token)| token).collect();
        let positions: Vec<u32> = active.iter().map(|&(s, _)| read[s] as u32).collect();
        Ok(Self {
            active: active.iter().map(|&(sequence, _)| sequence).collect(),
            tokens: Tensor::new(tokens, place)?,
            positions: Tensor::new(positions, place)?,
        })
    }

    /// The position of the n-th of them, `[1]`.
    pub(super) fn position(&self, n: usize) -> candle_core::Result<Tensor> {
        self.positions.narrow(0, n, 1)
    }

    /// The end of a step that has chosen these tokens.
    pub(super) fn advance(&self, chosen: &Tensor) -> candle_core::Result<()> {
        self.tokens.slice_set(chosen, 0, 0)?;
        let next = (&self.positions + 1.0)?;
        self.positions.slice_set(&next, 0, 0)
    }
}

/// What became of the wish to capture steps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Graphs {
    /// Steps that were captured: each time that a sequence ends, that their span doubles, or that ranks are lost.
    pub captured: u64,
    /// Steps that ran from a graph.
    pub launched: u64,
    /// Why none could be captured: then all ran call by call.
    pub refused: Option<String>,
}

/// The graph of the present step, as far as there is one.
#[derive(Default)]
pub(super) struct Graph {
    /// Of the last step that ran call by call.
    span: Option<usize>,
    step: Option<(Box<dyn Replay>, Tally)>,
    pub(super) counts: Graphs,
}

impl Graph {
    /// Where others have counted before.
    pub(super) fn counting_from(counts: Graphs) -> Self {
        Self {
            counts,
            ..Self::default()
        }
    }

    /// The next step is another one.
    pub(super) fn forget(&mut self) {
        (self.span, self.step) = (None, None);
    }

    /// Runs a step: the first of its kind call by call, so that everything is loaded that a capture cannot load; the second is captured.
    pub(super) fn run(
        &mut self,
        rank: &mut Rank,
        (slots, span): (&Slots, usize),
        boot: &dyn Bootstrap,
    ) -> Result<()> {
        if self.span != Some(span) {
            self.forget();
            rank.step(slots, span)?;
            self.span = Some(span);
            return Ok(());
        }
        if self.step.is_none() {
            self.step = Some(capture(rank, (slots, span), boot)?);
            self.counts.captured += 1;
        }
        if let Some((replay, tally)) = &self.step {
            replay.launch(rank.attention.stream())?;
            rank.tally.again(tally);
            self.counts.launched += 1;
        }
        Ok(())
    }
}

/// Captures a step on all ranks, or on none: halves of buffers alternate as calls are issued, so one rank's calls and another's graph would miss each
/// other. Ranks meet here, too, as those should whose graphs are large.
fn capture(
    rank: &mut Rank,
    (slots, span): (&Slots, usize),
    boot: &dyn Bootstrap,
) -> Result<(Box<dyn Replay>, Tally)> {
    let device = Arc::clone(rank.attention.device());
    let on = rank.attention.stream().clone();
    let before = std::mem::take(&mut rank.tally);
    let mut refused = None;
    let captured = device.capture(&on, &mut || {
        rank.step(slots, span).map_err(|error| {
            refused = Some(error.to_string());
            match error {
                Error::Brigade(ours) => ours,
                _ => brigade::Error::Closed,
            }
        })
    });
    let tally = std::mem::replace(&mut rank.tally, before);
    let captured = captured.map_err(|error| refused.unwrap_or_else(|| error.to_string()));
    match agree(boot, "capture of a step", captured, rank.within) {
        Ok(replay) => Ok((replay, tally)),
        Err(error) => {
            // Who is lost did not come either, which is a loss and no refusal: a call tells.
            rank.meet()?;
            Err(Error::NotCaptured(error.to_string()))
        }
    }
}

/// While it is held, this thread's uploads of a few bytes (dims and strides, of candle's) stay where graphs read them.
#[cfg(feature = "cuda")]
pub(super) fn keep_uploads(place: &Device) -> Option<Box<dyn Any>> {
    match place {
        Device::Cuda(gpu) => Some(Box::new(gpu.enable_cuda_graph_htod_cache())),
        _ => None,
    }
}

/// There are none.
#[cfg(not(feature = "cuda"))]
pub(super) fn keep_uploads(_: &Device) -> Option<Box<dyn Any>> {
    None
}
