//! Weights that go back with rows: each from the one rank that has the expert, so they are told apart and nothing is added.

use super::{Along, MachineWays, Over};
use crate::{
    rail_ways::{RowWords, rows_of_machines, take_entries, turned},
    *,
};

/// So many f32 are a multiple of [`DispatchParams::ROW_BYTES`].
const COLUMNS: usize = DispatchParams::ROW_BYTES / 4;

impl Over<'_> {
    /// The dispatch by which weights go back to the ranks that rows came along the rail to.
    pub(super) fn weights_call(&self, made: &DispatchCall) -> DispatchCall {
        // As many rows as there is room for may not all be there.
        let all = self.machines.size() * made.max_tokens;
        DispatchCall {
            max_tokens: all.max(made.max_recv.unwrap_or(0)),
            hidden: made.k.next_multiple_of(COLUMNS),
            dtype: DataType::F32,
            beside_bytes: PerRank::new(),
            k: 1,
            weights: false,
            placement: PlacementCall::Ranks,
            arrangement: Arrangement::Dense,
            max_recv: None,
            received_ids: ReceivedIds::Local,
            again: false,
            gathered: false,
            cast: None,
            choice: None,
        }
    }

    /// What `weights`, `[rows, k]`, says of the experts of own tokens: `[tokens, k]`, 0 for none.
    pub(super) fn weights_back(
        &self,
        turn: &mut Turn,
        (handle, ways): (&Handle, &MachineWays),
        weights: View<'_>,
        signed: &Call,
    ) -> Result<Buffer> {
        let on = turn.stream().clone();
        let (device, made) = (self.device(), handle.call());
        let row = RowWords {
            k: made.k,
            weights: made.weights,
        };
        let weights = device.download::<f32>(&on, weights)?;
        let owners = self.owners(&ways.first);
        let rail = match &ways.inside {
            None => {
                let mut rail = vec![0.0; ways.came_words.len() / row.count() * row.k];
                let own = self.group.rank..self.group.rank + 1;
                for (i, words) in ways.came_words.chunks_exact(row.count()).enumerate() {
                    let at = i * row.k..(i + 1) * row.k;
                    let from = weights.get(at.clone()).unwrap_or_default();
                    take_entries(owners, row, words, &own, from, &mut rail[at]);
                }
                rail
            }
            Some(inside) => self.weights_inside(turn, (handle, ways, inside), &weights, row)?,
        };
        let count = self.machines.count();
        let along = Along {
            over: self,
            on: &on,
            signed,
            rows: &turned(&ways.rows, count),
        };
        let rail = device.upload(&on, &rail, &[rail.len() / row.k, row.k])?;
        let came = along.go(&rail)?;
        let came = self.read::<f32>(&on, came.view())?;
        let me = self.machines.machine_of(self.group.rank);
        let sent = rows_of_machines(&ways.rows[me * count..][..count]);
        let mut back = vec![0.0; handle.tokens() * row.k];
        let rows = ways.sent_words.chunks_exact(row.count());
        for ((words, machine), from) in rows.zip(sent).zip(came.chunks_exact(row.k)) {
            let ranks = self.machines.inside(machine);
            let at = usize::try_from(words[1]).unwrap_or(usize::MAX);
            let to = back.chunks_exact_mut(row.k).nth(at);
            if let Some(to) = to {
                take_entries(owners, row, words, &ranks, from, to);
            }
        }
        device.upload(&on, &back, &[handle.tokens(), row.k])
    }

    /// To the ranks of the rail: `[rows that came along it, k]`.
    fn weights_inside(
        &self,
        turn: &mut Turn,
        (handle, ways, inside): (&Handle, &MachineWays, &Handle),
        weights: &[f32],
        row: RowWords,
    ) -> Result<Vec<f32>> {
        let on = turn.stream().clone();
        let (device, call) = (self.device(), self.weights_call(handle.call()));
        let sources = device.download::<i32>(&on, handle.sources())?;
        let local = |source: i32| match usize::try_from(source) {
            Ok(source) => self.machines.local_of(source) as i32,
            Err(_) => -1,
        };
        let to: Vec<i32> = sources.chunks_exact(4).map(|s| local(s[0])).collect();
        let mut rows = vec![0f32; to.len() * call.hidden];
        for (to, from) in rows
            .chunks_exact_mut(call.hidden)
            .zip(weights.chunks_exact(row.k))
        {
            to[..row.k].copy_from_slice(from);
        }
        let ids = device.upload(&on, &to, &[to.len(), 1])?;
        let rows = device.upload(&on, &rows, &[to.len(), call.hidden])?;
        let got = self.inside.experts()?.dispatch(
            turn,
            DispatchParams {
                rows: rows.view(),
                beside: &[],
                route: Route::Experts {
                    routing: Routing {
                        ids: ids.view(),
                        placement: Placement::Ranks,
                    },
                    weights: None,
                },
                arrangement: Arrangement::Dense,
                max_tokens: call.max_tokens,
                max_recv: None,
                received_ids: ReceivedIds::Local,
                totals: None,
                waits: None,
                cast: None,
                choice: None,
            },
        )?;
        let came = device.download::<f32>(&on, got.rows.view())?;
        let first = device.download::<i32>(&on, got.handle.offsets())?;
        // A rank has rows of this rail in the order in which they came along it.
        let positions = self.read::<i32>(&on, inside.layout().positions.view())?;
        let ranks = self.machines.ranks();
        let here = self
            .machines
            .inside(self.machines.machine_of(self.group.rank));
        let owners = self.owners(&ways.first);
        let mut rail = vec![0.0; ways.came_words.len() / row.count() * row.k];
        for (i, words) in ways.came_words.chunks_exact(row.count()).enumerate() {
            let positions = positions.get(i * ranks..(i + 1) * ranks);
            for (local, &position) in positions.unwrap_or_default().iter().enumerate() {
                let at = first.get(local).map_or(-1, |first| first + position);
                let (0.., Ok(at)) = (position, usize::try_from(at)) else {
                    continue;
                };
                let from = came.chunks_exact(call.hidden).nth(at).unwrap_or_default();
                let rank = here.start + local;
                let to = &mut rail[i * row.k..(i + 1) * row.k];
                take_entries(owners, row, words, &(rank..rank + 1), from, to);
            }
        }
        Ok(rail)
    }
}
