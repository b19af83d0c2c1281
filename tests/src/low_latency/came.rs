//! What must have come of a low-latency dispatch.

use crate::{
    backend::Rank,
    check::assert_bits,
    experts::{back::diff, case::Case, own::i32s},
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

/// Asserts that a row that was cast is what was sent, as far as fp8 can tell.
fn check_cast(case: &Case, cast: Fp8Cast, (row, scales): (&[u8], &[u8]), sent: &[u8]) {
    let scale = |block: usize| match cast.format {
        ScaleFormat::Ue8m0 => 2f64.powi(i32::from(scales[block]) - 127),
        _ => f64::from(to_f32(DataType::F32, scales)[block]),
    };
    let original = to_f64(case.dtype, sent);
    let (mut back, mut want) = (vec![], vec![]);
    for (column, x) in original.into_iter().enumerate() {
        let s = scale(column / 128);
        if cast.format != ScaleFormat::F32 {
            assert_eq!(s.log2().fract(), 0.0, "{s} is no power of two");
        }
        // Blocks of very different sizes count the same.
        let size = 10f64.powi((column / 128 % 9) as i32 - 4);
        back.push(fp8(row[column]) * s / size);
        want.push(x / size);
    }
    let limit = match cast.format {
        ScaleFormat::F32 => 2e-3,
        _ => 8e-3,
    };
    let diff = diff(&back, &want);
    assert!(diff < limit, "{diff:e} of {cast:?}");
}
