//! Where rows of all ranks meet: a half of the gather region, with own rows handed out ahead of the call or copied there.

use crate::{
    comm::CudaComm, core::Reserved, linear::no_zero_points, memory::check_reach, steps::Use,
};
use brigade_device::{
    Buffer, Chunk, DataType, Error, Filled, GatheredParts, LinearCall, Operand, PerRank, Reason,
    Result, Shape, Turn, check_rows,
};
use brigade_plan::gathered::{Span, scales_shape};
use brigade_sync::{Area, Layout};
use std::ops::Range;

/// Where the rows of one call lie in the user buffer.
pub(crate) struct Rows {
    pub(crate) of: Use,
    counts: PerRank,
    pub(crate) dtype: DataType,
    pub(crate) values: Span,
    pub(crate) scales: Option<Span>,
    /// Own rows and their scales, if they have to be copied there.
    pub(crate) source: Option<Vec<Buffer>>,
}

impl Rows {
    /// Values, or scales.
    pub(crate) fn span(&self, i: usize) -> &Span {
        match &self.scales {
            Some(scales) if i > 0 => scales,
            _ => &self.values,
        }
    }

    /// Where values and scales of a piece of a chunk lie.
    pub(crate) fn places(
        &self,
        c: usize,
        pieces: usize,
        p: usize,
    ) -> impl Iterator<Item = Range<usize>> {
        let rows = brigade_plan::rows::piece(self.counts[c], pieces, p);
        std::iter::once(&self.values)
            .chain(&self.scales)
            .map(move |span| span.piece(c, &rows, p))
    }
}

impl CudaComm {
    pub(crate) fn run_own_chunk(
        &self,
        turn: &Turn,
        rows_per_rank: &[usize],
        columns: usize,
        dtype: DataType,
    ) -> Result<(Buffer, Filled)> {
        let (rank, size) = (self.core.rank(), self.core.size());
        let total = check_rows("rows_per_rank", rows_per_rank, size)?;
        let row_bytes = columns * dtype.bytes();
        let capacity = self.core.config.gather_bytes;
        if total.saturating_mul(row_bytes) > capacity {
            return Err(Reason::new(
                "capacity",
                format!("{total} rows of {row_bytes} bytes do not fit a user buffer of {capacity}"),
                "raise gather_bytes",
            )
            .into());
        }
        let origin = self.core.control.origin();
        let (of, ticket) = {
            let mut issue = self.core.issue.lock();
            let of = match &issue.reserved {
                Some(reserved) => reserved.of,
                None => issue.next(Area::Gather),
            };
            issue.tickets += 1;
            let ticket = issue.tickets;
            issue.reserved = Some(Reserved {
                of,
                ticket,
                rows: rows_per_rank.into(),
                columns,
                dtype,
            });
            (of, ticket)
        };
        self.core.prepare(turn.stream(), |job| {
            job.steps.reserve(of);
            Ok(())
        })?;
        let first: usize = rows_per_rank[..rank].iter().sum();
        let own = rows_per_rank[rank];
        let range = first * row_bytes..(first + own) * row_bytes;
        let shape = Shape::new(&[own, columns])?;
        let views = &self.core.views.own[of.half.index()];
        let buffer = self.core.window(of, range, views, dtype, shape)?;
        Ok((
            buffer,
            Filled::new(turn, (origin, ticket), own, columns, dtype),
        ))
    }

    /// Where the rows of a call go, if they fit.
    pub(crate) fn reserve(&self, call: &LinearCall, chunk: &Chunk<'_>) -> Result<Option<Rows>> {
        let config = &self.core.config;
        let values = Span::values(call);
        let scales = Span::scales(Layout::scales_offset(config), call);
        let fits = values.all().len() <= config.gather_bytes
            && scales
                .as_ref()
                .is_none_or(|s| s.all().len() <= config.gather_scale_bytes);
        let mut issue = self.core.issue.lock();
        let source = match chunk {
            Chunk::Resident(filled) => {
                filled.check(self.core.control.origin())?;
                let handed_out = |r: &Reserved| r.ticket == filled.ticket() && r.holds(call);
                if !issue.reserved.as_ref().is_some_and(handed_out) {
                    return Err(Error::invalid(
                        "chunk",
                        "a token of own rows that were used, handed out anew, or meant for other shapes",
                        "the token of the last own_chunk, with the same rows_per_rank, columns and type",
                    ));
                }
                None
            }
            Chunk::Copy(_) if !fits => return Ok(None),
            Chunk::Copy(rows) => Some(self.own_rows(rows)?),
        };
        let of = match issue.reserved.take() {
            Some(reserved) => reserved.of,
            None => issue.next(Area::Gather),
        };
        drop(issue);
        Ok(Some(Rows {
            of,
            counts: call.rows.clone(),
            dtype: call.input,
            values,
            scales,
            source,
        }))
    }

    /// Own rows, and their scales.
    pub(crate) fn own_rows(&self, rows: &Operand<'_>) -> Result<Vec<Buffer>> {
        let mut list = vec![rows.kernel().retain()];
        if let Operand::Quantized(q) = rows {
            no_zero_points(q)?;
            list.push(q.scales().retain());
        }
        for buffer in &list {
            check_reach(&self.gpu().card, "chunk.memory", buffer)?;
        }
        Ok(list)
    }

    /// The gathered rows, as this rank's views see them: while the call goes on, and after it until the next one.
    pub(crate) fn gathered(
        &self,
        call: &LinearCall,
        rows: &Rows,
        shape: Shape,
    ) -> Result<GatheredParts> {
        let views = &self.core.views.all[rows.of.half.index()];
        let window =
            |span: &Span, dtype, shape| self.core.window(rows.of, span.all(), views, dtype, shape);
        let scales = rows.scales.as_ref().map(|span| {
            let buffer = window(span, DataType::F32, scales_shape(call)?)?;
            Ok::<_, Error>((buffer, call.scheme))
        });
        Ok(GatheredParts {
            kernel: window(&rows.values, call.input, shape)?,
            scales: scales.transpose()?,
            rows: call.rows.clone(),
        })
    }
}
