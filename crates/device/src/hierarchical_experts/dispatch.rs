//! Rows to experts on other machines: along the rail, then inside.

use super::{Along, MachineWays, ONE_BY_ONE, Over, no_waits, only_inside, row_words, ways_of};
use crate::{
    rail_ways::{Arrived, inward, square},
    routing::countable_times,
    *,
};
use std::sync::Arc;

/// What comes of a dispatch's rows on their way.
struct Travelling {
    rows: Buffer,
    scales: Option<Buffer>,
    beside: Vec<Buffer>,
}

impl From<Dispatched> for Travelling {
    fn from(of: Dispatched) -> Self {
        Self {
            rows: of.rows,
            scales: of.scales,
            beside: of.beside,
        }
    }
}

impl Travelling {
    /// All that goes beside rows where these are plain.
    fn all_beside(&self) -> Vec<View<'_>> {
        self.scales
            .iter()
            .chain(&self.beside)
            .map(Buffer::view)
            .collect()
    }

    /// All of it, if a group was stopped by then.
    fn poison_if_stopped(&self, parts: &dyn ExpertParts, on: &Stream) -> Result<()> {
        let mut all = [&self.rows]
            .into_iter()
            .chain(&self.scales)
            .chain(&self.beside);
        all.try_for_each(|buffer| parts.poison_if_stopped(on, buffer))
    }

    /// What came beside rows, told apart again.
    fn of(rows: Buffer, mut beside: Vec<Buffer>, with_scales: bool) -> Self {
        let scales = (with_scales && !beside.is_empty()).then(|| beside.remove(0));
        Self {
            rows,
            scales,
            beside,
        }
    }
}

impl Along<'_> {
    fn all(&self, of: &Travelling) -> Result<Travelling> {
        Ok(Travelling {
            rows: self.go(&of.rows)?,
            scales: of.scales.as_ref().map(|s| self.go(s)).transpose()?,
            beside: of
                .beside
                .iter()
                .map(|b| self.go(b))
                .collect::<Result<_>>()?,
        })
    }
}

impl Over<'_> {
    /// Checks a dispatch, and whether all that it is made of can be. Nothing is enqueued.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the field; [`Error::Unsupported`] with `across-machines` for what does not go across machines.
    pub(super) fn check_dispatch(&self, p: &DispatchParams<'_>) -> Result<DispatchCall> {
        let call = p.check(&self.group, self.parts.origin())?;
        if call.arrangement != Arrangement::Dense {
            let what = format!("rows that lie {:?}", call.arrangement);
            return Err(only_inside(what, "take them Dense, and sort them by their ids").into());
        }
        if call.gathered {
            let what = "ids that every rank has".to_string();
            return Err(only_inside(what, "give each rank's own ids").into());
        }
        if call.cast.is_some_and(|cast| cast.column_major) {
            let what = "scales that lie by columns".to_string();
            return Err(only_inside(what, "take them by rows, and transpose them").into());
        }
        let beside = call.beside_bytes.len() + usize::from(call.cast.is_some());
        if beside >= DispatchParams::MOST_BESIDE {
            let what = format!("{beside} things beside rows, scales of a cast among them,");
            return Err(only_inside(what, "put some of them together").into());
        }
        no_waits(p.waits.is_some())?;
        self.check_given(p, &call)?;
        if let Route::Again(handle) = &p.route {
            ways_of(handle)?;
        }
        countable_times("max_tokens", call.max_tokens, self.machines.count())?;
        for part in self.parts_of(&call) {
            self.inside.plan(&Call::Dispatch(part))?;
        }
        Ok(call)
    }

    /// What one rank alone may have wrong is found before anything begins that all take part in.
    fn check_given(&self, p: &DispatchParams<'_>, call: &DispatchCall) -> Result<()> {
        if let Some(totals) = &p.totals {
            let slots = Shape::new(&[self.parts.own_slots(call.placement)])?;
            params::check_totals_of(totals, slots, p.rows.memory())?;
        }
        self.reach(&[("rows.memory", Some(p.rows))])?;
        if let Route::Experts { routing, weights } = &p.route {
            let map = match routing.placement {
                Placement::Map { slots, .. } => Some(slots),
                Placement::Even { .. } | Placement::Ranks => None,
            };
            self.reach(&[
                ("ids.memory", Some(routing.ids)),
                ("placement.slots.memory", map),
                ("weights.memory", *weights),
            ])?;
        }
        let mut beside = p.beside.iter();
        beside.try_for_each(|view| self.parts.reaches("beside.memory", *view))
    }

    /// The dispatches inside that one is made of.
    fn parts_of(&self, call: &DispatchCall) -> Vec<DispatchCall> {
        let (out, inside) = self.most(call.k);
        let experts = self.places();
        let first = DispatchCall {
            k: out,
            weights: true,
            placement: PlacementCall::Even { experts },
            arrangement: ONE_BY_ONE,
            max_recv: None,
            received_ids: ReceivedIds::Local,
            choice: None,
            ..call.clone()
        };
        let mut beside = PerRank::new();
        if let Some(cast) = call.cast {
            let (dtype, n) = cast.scales(call.hidden);
            beside.push(n * dtype.bytes());
        }
        beside.extend(call.beside_bytes.iter().copied());
        if !call.again {
            beside.push(row_words(call).count() * DataType::I32.bytes());
        }
        let second = DispatchCall {
            max_tokens: self.machines.count() * call.max_tokens,
            dtype: call.wire_type(),
            beside_bytes: beside,
            k: inside,
            max_recv: call.max_recv,
            cast: None,
            choice: call.choice,
            ..first.clone()
        };
        let mut all = vec![first];
        if !self.stays(call) {
            all.push(second);
        }
        all
    }

    /// Whether rows that came along the rail are where they should be.
    fn stays(&self, call: &DispatchCall) -> bool {
        self.machines.ranks() == 1 && call.max_recv.is_none()
    }

    /// Makes a dispatch that was checked.
    ///
    /// # Errors
    /// As [`HierarchyLease::dispatch`].
    pub(super) fn dispatch(
        &self,
        turn: &mut Turn,
        p: DispatchParams<'_>,
        call: &DispatchCall,
    ) -> Result<Dispatched> {
        match &p.route {
            Route::Again(handle) => {
                let handle = *handle;
                self.dispatch_again(turn, p, (call, handle))
            }
            Route::Experts { routing, weights } => {
                let ways = (*routing, *weights);
                self.dispatch_new(turn, p, call, ways)
            }
            Route::Gathered(_) => {
                Err(only_inside("ids that every rank has".into(), "give own ids").into())
            }
        }
    }

    fn dispatch_new(
        &self,
        turn: &mut Turn,
        p: DispatchParams<'_>,
        call: &DispatchCall,
        (routing, weights): (Routing<'_>, Option<View<'_>>),
    ) -> Result<Dispatched> {
        let on = turn.stream().clone();
        let (device, row) = (self.device(), row_words(call));
        let (layout, first) = self.parts.layout(&on, routing)?;
        let owners = self.owners(&first);
        let outward = self.outward(&on, (&layout, &first), row, weights)?;
        let packed = self.pack(turn, &p, (&outward.machines, row.k))?;
        let signed = Call::Dispatch(call.clone());
        let rows = self.counted(&on, &signed, &outward.counts, call.max_tokens)?;
        let along = Along {
            over: self,
            on: &on,
            signed: &signed,
            rows: &rows,
        };
        let (out, plan) = (packed.handle.clone(), packed.plan.clone());
        let words = [outward.words.len() / row.count(), row.count()];
        // Before anything is under way that waits for another machine: a copy of many bytes waits for the stream.
        let words = device.upload(&on, &outward.words, &words)?;
        let rail = along.all(&packed.into())?;
        let words = along.go(&words)?;
        let known = self.read::<i32>(&on, words.view())?;
        let (came, inside, words, plan) = if self.stays(call) {
            rail.poison_if_stopped(self.parts, &on)?;
            (rail, None, known.clone(), plan)
        } else {
            let places = inward(owners, self.group.rank, row, &known)?;
            let (_, most) = self.most(row.k);
            let places = device.upload(&on, &places, &[known.len() / row.count(), most])?;
            let ones = ones(device, &on, &places)?;
            let mut beside = rail.all_beside();
            beside.push(words.view());
            let route = self.to_places(&places, &ones);
            let params = self.inside_params(&p, &rail.rows, &beside, route);
            let mut got = self.inside.experts()?.dispatch(turn, params)?;
            let words = got.beside.pop();
            let words = words.ok_or_else(|| Error::invalid("beside", 0, "words of rows"))?;
            let counts = device.download::<i32>(&on, got.counts.view())?;
            let came: usize = counts.iter().map(|&n| n.max(0) as usize).sum();
            let mut words = self.read::<i32>(&on, words.view())?;
            words.truncate(came * row.count());
            let (handle, plan) = (got.handle, got.plan);
            let came = Travelling::of(got.rows, got.beside, call.cast.is_some());
            (came, Some(handle), words, plan)
        };
        let room = came.rows.shape().rows();
        let kind = (row, call.received_ids);
        let arrived = Arrived::new(owners, self.group.rank, kind, &words, room)?;
        let of_machines: Vec<i32> = (0..self.machines.count())
            .map(|m| arrived.received[self.machines.inside(m)].iter().sum())
            .collect();
        let integers = |values: &[i32], shape: &[usize]| device.upload(&on, values, shape);
        let ways = MachineWays {
            out,
            inside,
            rows,
            sent_words: outward.words,
            came_words: known,
            first,
            received: integers(&of_machines, &[of_machines.len()])?,
        };
        let parts = HandleParts {
            group: self.group,
            origin: self.parts.origin(),
            call: call.clone(),
            layout,
            own_weights: weights.map(|w| w.retain()),
            received: integers(&arrived.received, &[self.group.size])?,
            sources: integers(&arrived.sources, &[room, 4])?,
            offsets: integers(&arrived.offsets, &[self.group.size + 1])?,
            rows_of: None,
            ids: integers(&arrived.ids, &[room, row.k])?,
            weights: match row.weights {
                true => Some(device.upload(&on, &arrived.weights, &[room, row.k])?),
                false => None,
            },
            counts: integers(&arrived.counts, &[arrived.counts.len()])?,
            in_place: None,
            machines: Some(Arc::new(ways)),
        };
        self.add_totals(&on, p.totals, &parts)?;
        Ok(given(came, parts, plan))
    }

    /// The same ways as before: nothing is known anew, and no host waits for any count, unless `totals` are wanted.
    fn dispatch_again(
        &self,
        turn: &mut Turn,
        p: DispatchParams<'_>,
        (call, handle): (&DispatchCall, &Handle),
    ) -> Result<Dispatched> {
        let on = turn.stream().clone();
        let ways = ways_of(handle)?;
        let experts = self.inside.experts()?;
        let own = own_params(&p, Route::Again(&ways.out));
        let packed = experts.dispatch(turn, own)?;
        let signed = Call::Dispatch(call.clone());
        let along = Along {
            over: self,
            on: &on,
            signed: &signed,
            rows: &ways.rows,
        };
        let plan = packed.plan.clone();
        let rail = along.all(&packed.into())?;
        let (came, plan) = match &ways.inside {
            None => {
                rail.poison_if_stopped(self.parts, &on)?;
                (rail, plan)
            }
            Some(inside) => {
                let beside = rail.all_beside();
                let route = Route::Again(inside);
                let params = self.inside_params(&p, &rail.rows, &beside, route);
                let got = experts.dispatch(turn, params)?;
                let plan = got.plan.clone();
                let came = Travelling::of(got.rows, got.beside, call.cast.is_some());
                (came, plan)
            }
        };
        let parts = handle.parts().clone();
        self.add_totals(&on, p.totals, &parts)?;
        Ok(given(came, parts, plan))
    }

    /// Own rows to places that are their machines.
    fn pack(
        &self,
        turn: &mut Turn,
        p: &DispatchParams<'_>,
        (machines, k): (&[i32], usize),
    ) -> Result<Dispatched> {
        let on = turn.stream().clone();
        let device = self.device();
        let (local, count) = (
            self.machines.local_of(self.group.rank),
            self.machines.count(),
        );
        let first = (local * count) as i32;
        let place = |&machine: &i32| if machine < 0 { -1 } else { first + machine };
        let places: Vec<i32> = machines.iter().map(place).collect();
        let shape = [p.rows.shape().rows(), self.most(k).0];
        let places = device.upload(&on, &places, &shape)?;
        let ones = ones(device, &on, &places)?;
        let params = own_params(p, self.to_places(&places, &ones));
        self.inside.experts()?.dispatch(turn, params)
    }

    /// Those of the dispatch inside.
    fn inside_params<'a>(
        &self,
        p: &DispatchParams<'_>,
        rows: &'a Buffer,
        beside: &'a [View<'a>],
        route: Route<'a>,
    ) -> DispatchParams<'a> {
        DispatchParams {
            rows: rows.view(),
            beside,
            route,
            arrangement: ONE_BY_ONE,
            max_tokens: self.machines.count() * p.max_tokens,
            max_recv: p.max_recv,
            received_ids: ReceivedIds::Local,
            totals: None,
            waits: None,
            cast: None,
            choice: p.choice,
        }
    }

    /// To places, each with a weight of 1.
    fn to_places<'a>(&self, places: &'a Buffer, ones: &'a Buffer) -> Route<'a> {
        Route::Experts {
            routing: Routing {
                ids: places.view(),
                placement: Placement::Even {
                    experts: self.places(),
                },
            },
            weights: Some(ones.view()),
        }
    }

    /// Rows of each machine for each, along this rail.
    fn counted(&self, on: &Stream, signed: &Call, counts: &[i32], most: usize) -> Result<PerRank> {
        let (device, count) = (self.device(), self.machines.count());
        let own = device.upload(on, counts, &[count])?;
        let all = [count * count];
        let mut all = device.allocate(on, MemoryType::Device, DataType::I32, &all)?;
        let pieces = PerRank::from_elem(count, count);
        self.parts.rail()?.diffuse(
            on,
            RailParams {
                call: signed,
                pieces: &pieces,
                from: own.view(),
                to: all.view_mut(),
                within: self.parts.within(),
            },
        )?;
        let all = self.read::<i32>(on, all.view())?;
        Ok(square(&all, most)?.into())
    }

    fn add_totals(
        &self,
        on: &Stream,
        totals: Option<ViewMut<'_>>,
        parts: &HandleParts,
    ) -> Result<()> {
        let Some(totals) = totals else {
            return Ok(());
        };
        params::check_totals(&totals, &parts.counts)?;
        let device = self.device();
        let counts = device.download::<i32>(on, parts.counts.view())?;
        let before = self.read::<i64>(on, totals.as_view())?;
        let sums = before.iter().zip(counts);
        // As on one machine.
        let sums = sums.map(|(t, n)| t.wrapping_add(i64::from(n)));
        let sums: Vec<i64> = sums.collect();
        device.write(on, totals, bytemuck::cast_slice(&sums))
    }
}

/// Those of a dispatch to oneself.
fn own_params<'a>(p: &'a DispatchParams<'_>, route: Route<'a>) -> DispatchParams<'a> {
    DispatchParams {
        rows: p.rows,
        beside: p.beside,
        route,
        arrangement: ONE_BY_ONE,
        max_tokens: p.max_tokens,
        max_recv: None,
        received_ids: ReceivedIds::Local,
        totals: None,
        waits: None,
        cast: p.cast,
        choice: None,
    }
}

fn given(came: Travelling, parts: HandleParts, plan: Plan) -> Dispatched {
    Dispatched {
        rows: came.rows,
        scales: came.scales,
        beside: came.beside,
        ids: parts.ids.clone(),
        weights: parts.weights.clone(),
        counts: parts.counts.clone(),
        handle: Handle::new(parts),
        plan,
    }
}

/// As many ones as places.
fn ones(device: &dyn Device, on: &Stream, places: &Buffer) -> Result<Buffer> {
    let shape = places.shape();
    device.upload(on, &vec![1f32; shape.len()], shape.dims())
}
