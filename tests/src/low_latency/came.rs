//! What must have come of a low-latency dispatch.

use crate::{
    backend::Rank,
    check::assert_bits,
    experts::{case::Case, casts::diff_of_blocks, own::i32s},
    matrix::{to_f32, to_f64},
    quantized::fp8,
};
use brigade_device::{Buffer, DataType, Fp8Cast, LowLatencyDispatched, ScaleFormat, View};

/// What each expert of a rank must get: source rank, token, and which of the token's experts it is, as bits.
pub fn received(case: &Case, rank: usize) -> Vec<Vec<[i32; 3]>> {
    let of_expert = |expert: usize| {
        let tokens = (0..case.size).flat_map(|s| (0..case.tokens(s)).map(move |t| (s, t)));
        let row = |(source, token): (usize, usize)| {
            let names = |&entry: &usize| case.local(rank, source, token, entry) == Some(expert);
            let bits: u32 = (0..case.k).filter(names).map(|entry| 1 << entry).sum();
            (bits > 0).then_some([source as i32, token as i32, bits as i32])
        };
        tokens.filter_map(row).collect()
    };
    (0..case.slots()[rank]).map(of_expert).collect()
}

/// What has come, kept beyond its slot: what a graph writes anew in every replay.
pub struct Kept {
    pub rows: Buffer,
    scales: Option<Buffer>,
    pub counts: Buffer,
    ranges: Buffer,
    pub sources: Buffer,
}

impl Kept {
    pub fn of(got: &LowLatencyDispatched<'_>) -> Self {
        Self {
            rows: got.rows().retain(),
            scales: got.scales().map(|scales| scales.retain()),
            counts: got.counts().retain(),
            ranges: got.ranges().retain(),
            sources: got.sources().retain(),
        }
    }

    pub fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        let all = [&self.rows, &self.counts, &self.ranges, &self.sources];
        all.into_iter().chain(&self.scales)
    }

    /// Asserts what has come.
    pub fn check(&self, rank: &Rank, case: &Case) {
        let want = received(case, rank.rank);
        let room = case.max_tokens * case.size;
        let counts: Vec<i32> = want.iter().map(|rows| rows.len() as i32).collect();
        assert_eq!(i32s(rank, &self.counts), counts, "counts");
        assert_eq!(
            self.rows.shape().dims(),
            [want.len(), room, case.hidden],
            "rows"
        );
        let ranges = i32s(rank, &self.ranges);
        let from = |rows: &[[i32; 3]], rank: usize| {
            let before = rows.iter().filter(|row| row[0] < rank as i32).count();
            let theirs = rows.iter().filter(|row| row[0] == rank as i32).count();
            [before as i32, theirs as i32]
        };
        let of_ranks = |rows: &Vec<[i32; 3]>| (0..case.size).flat_map(|r| from(rows, r)).collect();
        let of_experts: Vec<Vec<i32>> = want.iter().map(of_ranks).collect();
        assert_eq!(ranges, of_experts.concat(), "ranges");
        let sources = i32s(rank, &self.sources);
        let rows = rank.raw(self.rows.view());
        let scales = self.scales.as_ref().map(|scales| rank.raw(scales.view()));
        for (expert, want) in want.iter().enumerate() {
            let first = expert * room;
            let named = &sources[first * 3..][..want.len() * 3];
            assert_eq!(named, want.as_flattened(), "sources of expert {expert}");
            for (i, &[source, token, _]) in want.iter().enumerate() {
                let each = case.hidden * case.dtype.bytes();
                let sent = &case.rows[source as usize][token as usize * each..][..each];
                let at = first + i;
                match (case.cast, &scales) {
                    (Some(cast), Some(scales)) => {
                        let scales = scales_of(case, cast, scales, (expert, i));
                        let row = &rows[at * case.hidden..][..case.hidden];
                        check_cast(case, cast, (row, &scales), sent);
                    }
                    _ => assert_bits(&rows[at * each..][..each], sent, case.dtype, "a row"),
                }
            }
        }
    }

    /// The numbers of rows that were cast, each where it lies; NaNs where none is.
    pub fn dequantized(&self, rank: &Rank, case: &Case) -> Vec<f64> {
        let (cast, hidden) = (case.cast.unwrap(), case.hidden);
        let scales = rank.raw(self.scales.as_ref().unwrap().view());
        let rows = rank.raw(self.rows.view());
        let room = case.max_tokens * case.size;
        let mut all = vec![f64::NAN; rows.len()];
        for (expert, want) in received(case, rank.rank).iter().enumerate() {
            for i in 0..want.len() {
                let scales = scales_of(case, cast, &scales, (expert, i));
                let row = (expert * room + i) * hidden..(expert * room + i + 1) * hidden;
                let values = dequantized(cast, &rows[row.clone()], &scales);
                all[row].copy_from_slice(&values);
            }
        }
        all
    }
}

/// Asserts what has come.
pub fn check(rank: &Rank, case: &Case, got: &LowLatencyDispatched<'_>) {
    Kept::of(got).check(rank, case);
}

/// The scales of an expert's row, as they would lie by rows.
fn scales_of(case: &Case, cast: Fp8Cast, scales: &[u8], (expert, i): (usize, usize)) -> Vec<u8> {
    let (dtype, per_row) = cast.scales(case.hidden);
    let (bytes, room) = (dtype.bytes(), case.max_tokens * case.size);
    let place = |block: usize| match (cast.column_major, cast.format) {
        (false, _) => (expert * room + i) * per_row + block,
        (true, ScaleFormat::Ue8m0) => {
            let word = (expert * per_row / 4 + block / 4) * room + i;
            word * 4 + block % 4
        }
        (true, _) => (expert * per_row + block) * room + i,
    };
    let blocks = (0..per_row).map(|block| &scales[place(block) * bytes..][..bytes]);
    blocks.flatten().copied().collect()
}

/// All that is promised of what has come, but where rows of ranks begin: nothing behind an expert's rows.
pub fn promised(rank: &Rank, got: &LowLatencyDispatched<'_>, cast: Option<Fp8Cast>) -> Vec<u8> {
    let counts = i32s(rank, &got.counts().retain());
    let mut all: Vec<u8> = bytemuck::cast_slice(&counts).to_vec();
    // So many runs of an expert, each with a place for every row.
    let mut keep = |view: View<'_>, runs: usize| {
        let (bytes, room) = (rank.raw(view), got.rows().shape().dims()[1]);
        let each = bytes.len() / (counts.len() * runs * room).max(1);
        for run in 0..counts.len() * runs {
            let there = counts[run / runs] as usize;
            all.extend(&bytes[run * room * each..][..there * each]);
        }
    };
    keep(got.sources(), 1);
    keep(got.rows(), 1);
    if let (Some(scales), Some(cast)) = (got.scales(), cast) {
        let hidden = got.rows().shape().columns();
        keep(scales, cast.words_by_columns(hidden).unwrap_or(1));
    }
    all
}

/// The numbers of a row that was cast.
fn dequantized(cast: Fp8Cast, row: &[u8], scales: &[u8]) -> Vec<f64> {
    let scale = |block: usize| match cast.format {
        ScaleFormat::Ue8m0 => 2f64.powi(i32::from(scales[block]) - 127),
        _ => f64::from(to_f32(DataType::F32, scales)[block]),
    };
    let blocks = row.chunks(128).enumerate().flat_map(|(block, values)| {
        let s = scale(block);
        if cast.format != ScaleFormat::F32 {
            assert_eq!(s.log2().fract(), 0.0, "{s} is no power of two");
        }
        values.iter().map(move |&x| fp8(x) * s)
    });
    blocks.collect()
}

/// Asserts that a row that was cast is what was sent, as far as fp8 can tell.
fn check_cast(case: &Case, cast: Fp8Cast, (row, scales): (&[u8], &[u8]), sent: &[u8]) {
    let (came, sent) = (dequantized(cast, row, scales), to_f64(case.dtype, sent));
    // A row by itself may have an unlucky block.
    let limit = match cast.format {
        ScaleFormat::F32 => 2e-3,
        _ => 8e-3,
    };
    let diff = diff_of_blocks(&came, &sent, case.hidden);
    assert!(diff < limit, "{diff:e} of {cast:?}");
}
