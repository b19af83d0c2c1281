//! A small model over several ranks, and on one device: an embedding, a feed-forward block whose rows are spread over ranks too, and
//! a head that chooses the next word.
//!
//! `cargo run -p brigade-candle --example tensor_parallel`, with `-- 4` for four ranks.
#![allow(clippy::print_stdout)]

use brigade::{Activation, CommConfig, DataType, ParallelMode, group::ThreadGroup};
use brigade_candle::{
    ColumnParallelLinear, GatherLinear, LinearReduceScatter, Parallel, RowParallelLinear, Runs,
    VocabParallelEmbedding, VocabParallelHead, brigade, cut,
};
use candle_core::{DType, Device, Module, Result, Tensor};

const WORDS: usize = 1003;
const HIDDEN: usize = 96;
const INNER: usize = 250;
const TOKENS: usize = 37;

/// The whole model, as a checkpoint would hold it.
struct Weights {
    /// `[WORDS, HIDDEN]`, of the embedding and of the head.
    table: Tensor,
    /// `[INNER, HIDDEN]`
    up: Tensor,
    /// `[HIDDEN, INNER]`
    down: Tensor,
}

impl Weights {
    fn new(place: &Device) -> Result<Self> {
        Ok(Self {
            table: Tensor::randn(0f32, 1.0, (WORDS, HIDDEN), place)?,
            up: Tensor::randn(0f32, 0.1, (INNER, HIDDEN), place)?,
            down: Tensor::randn(0f32, 0.1, (HIDDEN, INNER), place)?,
        })
    }

    /// candle alone, on one device.
    fn on_one_device(&self, ids: &Tensor) -> Result<Tensor> {
        let x = self.table.index_select(ids, 0)?;
        let inner = x.matmul(&self.up.t()?)?.silu()?;
        let x = (&x + inner.matmul(&self.down.t()?)?)?;
        x.matmul(&self.table.t()?)?.argmax(1)
    }
}

// ANCHOR: join
fn join(boot: &ThreadGroup, place: &Device) -> Result<Parallel> {
    Parallel::join(place, boot, &CommConfig::new(ParallelMode::Tp))
}
// ANCHOR_END: join

// ANCHOR: first
/// Columns of `up` and rows of `down` are spread over ranks. Every rank has all rows.
struct FeedForward {
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl FeedForward {
    fn new(parallel: &Parallel, weights: &Weights) -> Result<Self> {
        let up = ColumnParallelLinear::new(parallel, &weights.up, None)?;
        Ok(Self {
            up: up.with_activation(Activation::Silu),
            down: RowParallelLinear::new(parallel, &weights.down, None)?,
        })
    }
}

impl Module for FeedForward {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&self.up.forward(x)?)
    }
}
// ANCHOR_END: first

// ANCHOR: scattered
/// The same where rows are spread over ranks as well: what travels does so beside the products.
struct ScatteredFeedForward {
    up: GatherLinear,
    down: LinearReduceScatter,
}

impl ScatteredFeedForward {
    fn new(parallel: &Parallel, weights: &Weights) -> Result<Self> {
        let up = GatherLinear::new(parallel, &weights.up, None)?;
        Ok(Self {
            up: up.with_activation(Activation::Silu),
            down: LinearReduceScatter::new(parallel, &weights.down, None)?,
        })
    }

    /// `[own rows, HIDDEN]` to the same; `rows` are those of each rank.
    fn forward(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor> {
        let none = Runs::none();
        let inner = self.up.forward_rows(x, Some(rows), &none)?;
        self.down.forward_rows(&inner, Some(rows), &none)
    }
}
// ANCHOR_END: scattered

/// One rank's part: the words that follow, which are the same on every rank.
fn one_rank(boot: &ThreadGroup, weights: &Weights, ids: &Tensor) -> Result<[Tensor; 2]> {
    let parallel = &join(boot, &Device::Cpu)?;
    let embedding = VocabParallelEmbedding::new(parallel, &weights.table)?;
    let head = VocabParallelHead::from_shard(parallel, embedding.table(), WORDS)?;

    let x = embedding.forward(ids)?;
    let block = FeedForward::new(parallel, weights)?;
    let words = head.argmax(&(&x + block.forward(&x)?)?)?;

    // Each rank goes on with its own rows, and all come together for the head.
    let rows: Vec<usize> = (0..parallel.size())
        .map(|rank| Ok(cut::share(TOKENS, 1, parallel.size(), rank)?.len()))
        .collect::<Result<_>>()?;
    let block = ScatteredFeedForward::new(parallel, weights)?;
    let x = embedding.forward_scattered(ids, Some(&rows))?;
    let x = (&x + block.forward(&x, &rows)?)?;
    let also = head.argmax(&parallel.all_gather(&x, 0, Some(&rows))?)?;

    let moved = parallel.comm().traffic().moved_bytes;
    println!(
        "rank {}: {} of {INNER} inner features, {} of {WORDS} words, {} rows; {moved} bytes moved",
        parallel.rank(),
        block.up.weight().dim(0)?,
        head.own().len(),
        rows[parallel.rank()],
    );
    Ok([words, also])
}

/// What the group's memory is for: the longest prompt, the widest rows. In bytes for each rank.
// ANCHOR: memory
fn sized(parallel: &Parallel, size: usize) -> Result<u64> {
    let config = CommConfig::new(ParallelMode::Tp).for_linears(8192, 4096, DataType::BF16, size);
    parallel.memory_need(&config, size)
}
// ANCHOR_END: memory

fn main() -> Result<()> {
    let size = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => 3,
    };
    let weights = Weights::new(&Device::Cpu)?;
    let ids: Vec<u32> = (0..TOKENS as u32).map(|i| i * 27 % WORDS as u32).collect();
    let ids = Tensor::new(ids, &Device::Cpu)?;
    // ANCHOR: threads
    let words = std::thread::scope(|s| {
        let ranks: Vec<_> = brigade::group::threads(size)
            .into_iter()
            .map(|boot| {
                let (weights, ids) = (&weights, &ids);
                s.spawn(move || one_rank(&boot, weights, ids))
            })
            .collect();
        let ended = ranks.into_iter().map(|rank| rank.join());
        ended.collect::<std::thread::Result<Vec<_>>>()
    });
    // ANCHOR_END: threads
    let want = weights.on_one_device(&ids)?.to_vec1::<u32>()?;
    let Ok(words) = words else {
        return Err(candle_core::Error::msg("a rank panicked"));
    };
    for words in words {
        for words in words? {
            assert_eq!(words.dtype(), DType::U32);
            assert_eq!(words.to_vec1::<u32>()?, want);
        }
    }
    let alone = join(&brigade::group::threads(1).remove(0), &Device::Cpu)?;
    let mib = sized(&alone, 4)? as f64 / f64::from(1 << 20);
    println!(
        "all ranks chose the words of one device; four ranks of a larger model would take {mib:.0} MiB each"
    );
    Ok(())
}
