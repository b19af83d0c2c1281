//! Dispatch by gathering: all ranks hear which rows are for them, and then get everybody's.

use super::{Arguments, Came, Own, Written, count_of, cut, in_pieces, round, starts};
use crate::{job::Active, memory::reading, routing::integers};
use brigade_device::{HandleParts, Result, Ways};
use brigade_plan::dispatch::{Load, Section, Sections, ways_rows};
use brigade_sync::Area;

/// Once it is known whose tokens are for this rank, everybody's rows pass by, and it keeps those.
pub(super) fn gather(
    active: &mut Active<'_>,
    a: &Arguments,
    sent: &[Vec<i32>],
    own: &Own<'_>,
    came: &mut [Came],
) -> Result<()> {
    let wanted: Vec<Vec<i32>> = match &a.ways {
        Ways::New(_) => {
            if a.gathered.is_none() {
                let half = active.job.core.control.layout().half_bytes(Area::Dispatch);
                let rows = ways_rows(&a.call, half, a.group.size);
                in_pieces(active, a, (Load::Ways, rows), sent, own, came)?;
            }
            let tokens = |c: &Came| integers(&c.sections[Section::Token.index()]);
            came.iter().map(tokens).collect()
        }
        Ways::Again(parts) => tokens_of(parts)?,
    };
    let tokens = a.rows.shape().rows();
    let sections = Sections::part(&a.call, Load::Rest, a.piece_rows);
    let by = a.carrier(Area::Dispatch);
    for first in starts(a.call.max_tokens, a.piece_rows) {
        let _span = tracing::info_span!(target: "brigade::comm", "gather", first).entered();
        round(
            active,
            by,
            |to, out| {
                let rows = cut(first, a.piece_rows, tokens);
                out[..8].copy_from_slice(&(sent[to].len() as u64).to_le_bytes());
                for (i, token) in rows.clone().enumerate() {
                    own.write(to, token as i32, i, &sections, out);
                }
                Written {
                    bytes: sections.bytes,
                    moved: rows.len() * sections.all_bytes(),
                }
            },
            |from, part| {
                came[from].rows = count_of(part);
                let there = first..first + a.piece_rows;
                let tokens = wanted[from].iter().map(|&token| token as usize);
                for token in tokens.filter(|token| there.contains(token)) {
                    for (i, section) in came[from].sections.iter_mut().enumerate() {
                        let (start, end) = (token - first, token - first + 1);
                        let row = sections.at(i, start).end..sections.at(i, end).end;
                        section.extend_from_slice(&part[row]);
                    }
                }
            },
        )?;
    }
    Ok(())
}

/// Tokens of each rank whose rows are here, in their order.
fn tokens_of(parts: &HandleParts) -> Result<Vec<Vec<i32>>> {
    reading(&[&parts.sources], |inputs| {
        let mut tokens = vec![Vec::new(); parts.group.size];
        for source in integers::<i32>(inputs[0]).chunks_exact(4) {
            // What cannot be is found where rows are arranged.
            let list = usize::try_from(source[0]).ok();
            if let Some(list) = list.and_then(|rank| tokens.get_mut(rank)) {
                list.push(source[1]);
            }
        }
        for list in &mut tokens {
            list.sort_unstable();
            list.dedup();
        }
        Ok(tokens)
    })
}
