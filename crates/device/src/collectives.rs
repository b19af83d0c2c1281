//! Parameters of collectives.

use crate::{
    AllReduceAlgorithm, Call, DataType, Error, PerRank, ReduceOp, Result, View, ViewMut,
    params::{float, resident},
};

/// Every rank gets the reduction of all inputs.
#[derive(Debug)]
pub struct AllReduceParams<'a> {
    /// Result, and input too unless `from` is given. Same shape on every rank.
    pub data: ViewMut<'a>,
    /// Input, if it is to be kept. The result may then be f32 where the input is f16 or bf16.
    pub from: Option<View<'a>>,
    /// How values are combined.
    pub op: ReduceOp,
    /// Forced algorithm.
    pub choice: Option<AllReduceAlgorithm>,
}

impl AllReduceParams<'_> {
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self) -> Result<()> {
        check_all_reduce(&self.data, self.from)
    }
}

/// Checks what an all-reduce reads and writes.
pub(crate) fn check_all_reduce(data: &ViewMut<'_>, from: Option<View<'_>>) -> Result<()> {
    data.check_writable()?;
    let data = data.as_view();
    let (field, from) = from.map_or(("data", data), |from| ("from", from));
    reduction(field, from, "data", data)?;
    if from.shape() != data.shape() {
        return Err(Error::invalid("from.shape", from.shape(), data.shape()));
    }
    Ok(())
}

/// Types a reduction can take and give: equal ones, or f32 out of f16 and bf16.
fn reduction(
    from_field: &'static str,
    from: View<'_>,
    to_field: &'static str,
    to: View<'_>,
) -> Result<()> {
    float(from_field, from.dtype())?;
    summed(to_field, from.dtype(), to.dtype())?;
    resident(to_field, Some(to.memory()), from.memory())
}

/// Sums of a type are of the same, or f32.
pub(crate) fn summed(field: &'static str, from: DataType, to: DataType) -> Result<()> {
    if to == from || to == DataType::F32 {
        return Ok(());
    }
    let want = match from {
        DataType::F32 => "f32".to_string(),
        narrow => format!("{narrow} or f32"),
    };
    Err(Error::invalid(field, to, want))
}

/// Checks a row count per rank.
///
/// # Errors
/// [`Error::Invalid`] naming `field` if there is not one count for each rank of the group.
pub fn check_rows(field: &'static str, rows: &[usize], size: usize) -> Result<usize> {
    if rows.len() != size {
        return Err(Error::invalid(
            field,
            format!("{} counts", rows.len()),
            format!("one for each of {size} ranks"),
        ));
    }
    rows.iter()
        .try_fold(0usize, |sum, &r| sum.checked_add(r))
        .ok_or_else(|| Error::invalid(field, format!("{rows:?}"), "a sum that does not overflow"))
}

/// Checks that `v` has `rows` rows of `row_len` elements of `dtype`.
fn rows_of(
    field: &'static str,
    v: View<'_>,
    rows: usize,
    row_len: usize,
    dtype: DataType,
) -> Result<()> {
    if v.dtype() != dtype {
        return Err(Error::invalid(field, v.dtype(), dtype));
    }
    if v.shape().dims().is_empty() || v.shape().rows() != rows || v.shape().row_len() != row_len {
        return Err(Error::invalid(
            field,
            v.shape(),
            format!("{rows} rows of {row_len}"),
        ));
    }
    Ok(())
}

/// Every rank gets all rows, in rank order.
#[derive(Debug)]
pub struct AllGatherParams<'a> {
    /// Own rows, `[rows_per_rank[rank], ..]`.
    pub from: View<'a>,
    /// Rows of each rank, the same list on every rank. May be 0.
    pub rows_per_rank: &'a [usize],
    /// All rows, `[sum of rows_per_rank, ..]`.
    pub to: ViewMut<'a>,
}

impl AllGatherParams<'_> {
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self, rank: usize, size: usize) -> Result<()> {
        let total = check_rows("rows_per_rank", self.rows_per_rank, size)?;
        let row_len = self.to.shape().row_len();
        let dtype = self.to.dtype();
        rows_of("from", self.from, self.rows_per_rank[rank], row_len, dtype)?;
        rows_of("to", self.to.as_view(), total, row_len, dtype)?;
        self.to.check_writable()?;
        resident("to", Some(self.to.memory()), self.from.memory())
    }
}

/// Every rank gets its rows of the reduction of all inputs.
#[derive(Debug)]
pub struct ReduceScatterParams<'a> {
    /// All rows, `[sum of rows_per_rank, ..]`.
    pub from: View<'a>,
    /// Rows that each rank gets, the same list on every rank. May be 0.
    pub rows_per_rank: &'a [usize],
    /// Own rows of the result, `[rows_per_rank[rank], ..]`; f32 is allowed where the input is f16 or bf16.
    pub to: ViewMut<'a>,
    /// How values are combined.
    pub op: ReduceOp,
}

impl ReduceScatterParams<'_> {
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self, rank: usize, size: usize) -> Result<()> {
        let total = check_rows("rows_per_rank", self.rows_per_rank, size)?;
        let row_len = self.from.shape().row_len();
        reduction("from", self.from, "to", self.to.as_view())?;
        rows_of("from", self.from, total, row_len, self.from.dtype())?;
        let own = self.rows_per_rank[rank];
        self.to.check_writable()?;
        rows_of("to", self.to.as_view(), own, row_len, self.to.dtype())
    }
}

/// Every rank gets the root's data.
#[derive(Debug)]
pub struct BroadcastParams<'a> {
    /// Input on the root, result elsewhere. Same shape on every rank.
    pub data: ViewMut<'a>,
    /// Who has the data.
    pub root: usize,
}

impl BroadcastParams<'_> {
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self, rank: usize, size: usize) -> Result<()> {
        if self.root >= size {
            let want = format!("a rank below {size}");
            return Err(Error::invalid("root", self.root, want));
        }
        if self.root == rank {
            return Ok(());
        }
        self.data.check_writable()
    }
}

/// Every rank sends rows to every rank. Counts may differ for every pair, and may be 0.
#[derive(Debug)]
pub struct AllToAllParams<'a> {
    /// Rows to send, those for rank 0 first: `[sum of send_rows, ..]`.
    pub from: View<'a>,
    /// Rows for each rank.
    pub send_rows: &'a [usize],
    /// Rows received, those of rank 0 first: `[sum of recv_rows, ..]`.
    pub to: ViewMut<'a>,
    /// Rows of each rank. What a sender sends and a receiver expects must agree.
    pub recv_rows: &'a [usize],
}

impl AllToAllParams<'_> {
    /// # Errors
    /// [`Error::Invalid`] naming the field.
    pub fn check(&self, rank: usize, size: usize) -> Result<()> {
        let send = check_rows("send_rows", self.send_rows, size)?;
        let recv = check_rows("recv_rows", self.recv_rows, size)?;
        let row_len = self.from.shape().row_len();
        rows_of("from", self.from, send, row_len, self.from.dtype())?;
        rows_of("to", self.to.as_view(), recv, row_len, self.from.dtype())?;
        self.to.check_writable()?;
        if self.send_rows[rank] != self.recv_rows[rank] {
            return Err(Error::invalid(
                "recv_rows",
                format!("{} from itself", self.recv_rows[rank]),
                format!("{}, as sent", self.send_rows[rank]),
            ));
        }
        resident("to", Some(self.to.memory()), self.from.memory())
    }
}

/// Data for one peer, who calls `recv` with the same shape and type.
#[derive(Debug)]
pub struct SendParams<'a> {
    /// What to send.
    pub from: View<'a>,
    /// To whom.
    pub peer: usize,
}

/// Data from one peer, who calls `send`.
#[derive(Debug)]
pub struct RecvParams<'a> {
    /// Where it goes.
    pub to: ViewMut<'a>,
    /// From whom.
    pub peer: usize,
}

/// What both sides of a message sign, for backends: how many elements of which type.
pub fn message_signature(elements: usize, dtype: DataType) -> u32 {
    let rows = PerRank::from_slice(&[elements]);
    Call::AllGather {
        rows,
        row_len: 0,
        dtype,
    }
    .signature()
}

/// Checks a peer's number.
///
/// # Errors
/// [`Error::Invalid`] if it is this rank, or none of the group.
pub fn check_peer(peer: usize, rank: usize, size: usize) -> Result<()> {
    if peer < size && peer != rank {
        Ok(())
    } else {
        Err(Error::invalid(
            "peer",
            peer,
            format!("a rank below {size} other than {rank}"),
        ))
    }
}
