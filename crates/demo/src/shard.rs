//! Which part of a model each rank of a tensor-parallel run holds.
//!
//! Query heads, feed-forward columns and vocabulary rows are dealt as evenly as they go, the first
//! ranks taking one more where they do not ([Megatron-LM](https://arxiv.org/abs/1909.08053),
//! section 3, made ragged). A rank holds the KV heads that its query heads attend with, so a KV
//! head whose query heads are on two ranks is on both. Norms are on every rank.

use std::ops::Range;

use crate::model::Config;
use crate::{Error, Result};

/// One rank's part of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The rank that holds it.
    pub rank: usize,
    /// The ranks of the run.
    pub ranks: usize,
    /// Query heads.
    pub query_heads: Range<usize>,
    /// KV heads that the query heads need. Ranges of neighbouring ranks may overlap by one head.
    pub kv_heads: Range<usize>,
    /// Feed-forward columns.
    pub feed_forward: Range<usize>,
    /// Rows of the embedding and head.
    pub vocabulary: Range<usize>,
}

/// Deals a model to `ranks` ranks, in rank order.
///
/// # Errors
/// [`Error::Field`] unless there are at least one and at most as many ranks as query heads, and
/// every rank gets a feed-forward column and a vocabulary row.
pub fn plan(config: &Config, ranks: usize) -> Result<Vec<Shard>> {
    config.check()?;
    let most = config.heads.min(config.feed_forward).min(config.vocabulary);
    if !(1..=most).contains(&ranks) {
        return Err(Error::field(
            "ranks",
            ranks,
            format!("1 to {most}, so that every rank has a query head"),
        ));
    }
    let shard = |rank| {
        let query_heads = deal(config.heads, ranks, rank);
        let kv_heads =
            config.kv_head_of(query_heads.start)..config.kv_head_of(query_heads.end - 1) + 1;
        Shard {
            rank,
            ranks,
            query_heads,
            kv_heads,
            feed_forward: deal(config.feed_forward, ranks, rank),
            vocabulary: deal(config.vocabulary, ranks, rank),
        }
    };
    Ok((0..ranks).map(shard).collect())
}

/// Rank `rank`'s part when `total` things are dealt to `ranks` ranks as evenly as they go.
///
/// # Panics
/// When `ranks` is zero.
pub fn deal(total: usize, ranks: usize, rank: usize) -> Range<usize> {
    let (each, more) = (total / ranks, total % ranks);
    let start = |rank: usize| rank * each + rank.min(more);
    start(rank)..start(rank + 1)
}

impl Shard {
    /// Rows of the query linear, and columns of the output linear: the query heads, value by value.
    pub fn query_rows(&self, config: &Config) -> Range<usize> {
        self.query_heads.start * config.head_dim..self.query_heads.end * config.head_dim
    }

    /// Rows of the key and of the value linear: the KV heads, value by value.
    pub fn kv_rows(&self, config: &Config) -> Range<usize> {
        self.kv_heads.start * config.head_dim..self.kv_heads.end * config.head_dim
    }

    /// For each of the rank's query heads, which of the *rank's* KV heads it attends with.
    pub fn local_kv_heads(&self, config: &Config) -> Vec<usize> {
        self.query_heads
            .clone()
            .map(|head| config.kv_head_of(head) - self.kv_heads.start)
            .collect()
    }

    /// Parameters that the rank holds, norms and doubled KV heads included.
    pub fn parameters(&self, config: &Config) -> u64 {
        let attention = 2 * self.query_rows(config).len() + 2 * self.kv_rows(config).len();
        let feed_forward = 3 * self.feed_forward.len();
        let layer = (attention + feed_forward + 2) * config.hidden;
        (config.layers * layer + (self.vocabulary.len() + 1) * config.hidden) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Synthetic;
    use crate::testing::smollm2_config;

    #[test]
    fn heads_are_dealt_with_the_kv_heads_they_need() {
        let show = |ranks| {
            let shards = plan(&smollm2_config(), ranks).unwrap();
            let text: Vec<_> = shards
                .iter()
                .map(|s| format!("{:?}/{:?}", s.query_heads, s.kv_heads))
                .collect();
            text.join(" ")
        };
        assert_eq!(show(1), "0..9/0..3");
        assert_eq!(show(2), "0..5/0..2 5..9/1..3");
        assert_eq!(show(3), "0..3/0..1 3..6/1..2 6..9/2..3");
        assert_eq!(show(4), "0..3/0..1 3..5/1..2 5..7/1..3 7..9/2..3");
        assert_eq!(
            show(9),
            "0..1/0..1 1..2/0..1 2..3/0..1 3..4/1..2 4..5/1..2 5..6/1..2 6..7/2..3 7..8/2..3 8..9/2..3"
        );
        assert_eq!(
            plan(&smollm2_config(), 4).unwrap()[2].local_kv_heads(&smollm2_config()),
            [0, 1]
        );
    }

    #[test]
    fn a_rank_holds_its_share_of_the_parameters() {
        let config = smollm2_config();
        let whole = config.parameters();
        assert_eq!(whole, 134_515_008);
        let shares = |ranks: usize| -> Vec<String> {
            let shards = plan(&config, ranks).unwrap();
            let share = |s: &Shard| s.parameters(&config) as f64 / whole as f64 * 100.0;
            for shard in &shards {
                let off = (share(shard) / 100.0 * ranks as f64 - 1.0).abs();
                assert!(
                    off < 0.1,
                    "rank {} of {ranks} is {off} off its share",
                    shard.rank
                );
            }
            shards
                .iter()
                .map(|shard| format!("{:.2}%", share(shard)))
                .collect()
        };
        assert_eq!(shares(1), ["100.00%"]);
        assert_eq!(shares(2), ["51.66%", "50.01%"]);
        assert_eq!(shares(3), ["33.35%", "33.35%", "33.35%"]);
        assert_eq!(shares(4), ["26.66%", "25.02%", "26.66%", "25.02%"]);
    }

    #[test]
    fn every_head_column_and_row_has_one_owner() {
        for config in [smollm2_config(), Synthetic::small_config()] {
            for ranks in 1..=config.heads {
                let shards = plan(&config, ranks).unwrap();
                for (part, total) in [
                    (
                        shards
                            .iter()
                            .map(|s| s.query_heads.clone())
                            .collect::<Vec<_>>(),
                        config.heads,
                    ),
                    (
                        shards.iter().map(|s| s.feed_forward.clone()).collect(),
                        config.feed_forward,
                    ),
                    (
                        shards.iter().map(|s| s.vocabulary.clone()).collect(),
                        config.vocabulary,
                    ),
                ] {
                    assert!(part.iter().cloned().flatten().eq(0..total));
                    assert!(
                        part.windows(2)
                            .all(|pair| pair[0].len() - pair[1].len() <= 1)
                    );
                }
                for shard in &shards {
                    let local = shard.local_kv_heads(&config);
                    for (head, kv) in shard.query_heads.clone().zip(&local) {
                        assert_eq!(config.kv_head_of(head), shard.kv_heads.start + kv);
                    }
                    assert_eq!(local.last(), Some(&(shard.kv_heads.len() - 1)));
                }
            }
        }
    }

    #[test]
    fn more_ranks_than_heads_are_refused() {
        for ranks in [0, 10] {
            let got = plan(&smollm2_config(), ranks).unwrap_err().to_string();
            assert_eq!(
                got,
                format!("ranks is {ranks}, wanted 1 to 9, so that every rank has a query head")
            );
        }
    }
}
