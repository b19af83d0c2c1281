//! Rows back from experts on other machines: added up inside, along the rail, and added up.

use super::{Along, ONE_BY_ONE, Over, no_waits, ways_of};
use crate::{
    rail_ways::turned,
    routing::{countable, countable_times},
    *,
};

impl Over<'_> {
    /// Checks a combine, and whether all that it is made of can be. Nothing is enqueued.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field; [`Error::Unsupported`] with `across-machines` for what does not go across machines.
    pub(super) fn check_combine(&self, p: &CombineParams<'_>) -> Result<CombineCall> {
        let call = p.check(&self.group, self.parts.origin())?;
        let ways = ways_of(p.handle)?;
        no_waits(p.waits.is_some())?;
        let into = match &p.output {
            Output::Into(view) => Some(view.as_view()),
            Output::Allocate(_) => None,
        };
        self.reach(&[
            ("rows.memory", Some(p.rows)),
            ("weights.memory", p.weights),
            ("output.memory", into),
        ])?;
        let mut biases = p.biases.iter();
        biases.try_for_each(|bias| self.parts.reaches("biases.memory", *bias))?;
        if call.weights && ways.inside.is_some() {
            let made = p.handle.call();
            countable_times("handle.max_tokens", made.max_tokens, self.machines.size())?;
            countable("handle.max_recv", made.max_recv.unwrap_or(0))?;
            let part = self.weights_call(made);
            self.inside.plan(&Call::Dispatch(part))?;
        }
        let out = CombineCall {
            dtype: call.output,
            k: ways.out.call().k,
            arrangement: ONE_BY_ONE,
            sum: CombineSum::Expert,
            weights: false,
            choice: None,
            ..call.clone()
        };
        if let Some(inside) = &ways.inside {
            let part = CombineCall {
                max_tokens: inside.call().max_tokens,
                dtype: call.dtype,
                k: inside.call().k,
                choice: call.choice,
                ..out.clone()
            };
            self.inside.plan(&Call::Combine(part))?;
        }
        self.inside.plan(&Call::Combine(out))?;
        Ok(call)
    }

    /// Makes a combine that was checked.
    ///
    /// # Errors
    /// As [`HierarchyLease::combine`].
    pub(super) fn combine(
        &self,
        turn: &mut Turn,
        p: CombineParams<'_>,
        call: &CombineCall,
    ) -> Result<Combined> {
        let on = turn.stream().clone();
        let (device, experts) = (self.device(), self.inside.experts()?);
        let ways = ways_of(p.handle)?;
        let given = match &p.output {
            Output::Into(view) => Some(view.as_view().retain()),
            Output::Allocate(_) => None,
        };
        let mut back = || -> Result<Combined> {
            let sums = match &ways.inside {
                None => self.converted(&on, p.rows, call.output)?,
                Some(inside) => {
                    let sums = experts.combine(
                        turn,
                        CombineParams {
                            rows: p.rows,
                            handle: inside,
                            sum: CombineSum::Expert,
                            weights: None,
                            biases: &[],
                            output: Output::Allocate(call.output),
                            waits: None,
                            choice: p.choice,
                        },
                    )?;
                    sums.d
                        .ok_or_else(|| Error::invalid("d", "none", "a new buffer"))?
                }
            };
            let signed = Call::Combine(call.clone());
            let along = Along {
                over: self,
                on: &on,
                signed: &signed,
                rows: &turned(&ways.rows, self.machines.count()),
            };
            let rows = along.go(&sums)?;
            let biases = p
                .biases
                .iter()
                .map(|bias| self.converted(&on, *bias, call.output));
            let biases = biases.collect::<Result<Vec<Buffer>>>()?;
            let biases: Vec<_> = biases.iter().map(Buffer::view).collect();
            let mut into = given.clone();
            let mut combined = experts.combine(
                turn,
                CombineParams {
                    rows: rows.view(),
                    handle: &ways.out,
                    sum: CombineSum::Expert,
                    weights: None,
                    biases: &biases,
                    output: match &mut into {
                        Some(d) => Output::Into(d.view_mut()),
                        None => Output::Allocate(call.output),
                    },
                    waits: None,
                    choice: None,
                },
            )?;
            if let Some(d) = combined.d.as_ref().or(given.as_ref()) {
                self.parts.poison_if_stopped(&on, d)?;
            }
            if let Some(weights) = p.weights {
                let ways = (p.handle, ways);
                let back = self.weights_back(turn, ways, weights, &signed)?;
                combined.weights = Some(back);
            }
            Ok(combined)
        };
        let done = back();
        if let (Err(_), Some(mut d)) = (&done, given) {
            // Nobody is to take what is there for a result. Whoever keeps the buffer busy writes to it anyhow.
            let _ = device.fill(&on, d.view_mut(), 0xFF);
        }
        done
    }

    /// The same in another type, if it has not that one.
    fn converted(&self, on: &Stream, from: View<'_>, dtype: DataType) -> Result<Buffer> {
        if from.dtype() == dtype {
            return Ok(from.retain());
        }
        let device = self.device();
        let mut to = device.allocate(on, MemoryType::Device, dtype, from.shape().dims())?;
        device.convert(on, to.view_mut(), from)?;
        Ok(to)
    }
}
