//! How products fall into tiles: how wide these are, and which blocks take them.

use brigade_kernels::{GEMM_BANDS, GEMM_LOW_COLUMNS};

/// How wide a tile is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Width {
    pub(crate) columns: usize,
    /// What one costs, measured in columns: a block writes its result while it multiplies nothing, and narrow ones load more for
    /// each product.
    pub(crate) cost: usize,
}

/// Widths from costs.
const fn wide(columns: usize, cost: usize) -> Width {
    Width { columns, cost }
}

/// Tiles of halves, of int8, and of fp8, whose sums take the registers of two.
pub(crate) const WIDTHS: [&[Width]; 3] = [
    &[
        wide(256, 262),
        wide(224, 230),
        wide(192, 202),
        wide(128, 150),
        // For a band or two, whose weight more multiprocessors load then.
        wide(64, 96),
    ],
    &[wide(256, 267), wide(128, 139)],
    &[wide(192, 203), wide(128, 139)],
];

/// What a narrow tile costs where adapters have so many columns in all, in columns of others: a band of rows is read for it, by one multiprocessor, as fast as
/// it can. Zero without adapters, which have none.
pub(crate) fn narrow_cost(low_columns: usize) -> usize {
    match low_columns {
        0 => 0,
        few if few <= GEMM_LOW_COLUMNS as usize / 2 => 100,
        _ => 130,
    }
}

/// What the busiest of so many multiprocessors does in as many rounds as it takes, in columns of a band, where each band has a narrow tile of that cost.
pub(crate) fn cost_of(
    width: Width,
    (bands, columns): (usize, usize),
    narrow: usize,
    sms: usize,
) -> usize {
    let all = bands * (columns.div_ceil(width.columns) * width.cost + narrow);
    all.div_ceil(sms.max(1) * width.cost) * width.cost
}

/// Which width is best for so many bands of rows: that of the least cost.
pub(crate) fn best_width(
    widths: &[Width],
    shape: (usize, usize),
    narrow: usize,
    sms: usize,
) -> usize {
    (0..widths.len())
        .min_by_key(|&i| cost_of(widths[i], shape, narrow, sms))
        .unwrap_or(0)
}

/// How a product with adapters falls into tiles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Falls {
    /// How many multiprocessors there are for it.
    pub(crate) sms: usize,
    pub(crate) tiles: usize,
    /// What the busiest of them does, in columns of a band.
    pub(crate) cost: usize,
}

/// Blocks for so many tiles. All take as many as some would if there were more of them, and multiprocessors without one draw no power; tiles that are
/// not alike, as with adapters, find more of them.
pub(crate) fn even_blocks(tiles: u32, most: u32, adapters: bool) -> u32 {
    if adapters {
        return tiles.min(most);
    }
    tiles.div_ceil(tiles.div_ceil(most.max(1)).max(1))
}

/// Of so many blocks, how many begin with narrow tiles, one for each of `bands`: as many as the first others will ask for, if the rest can make all others in as many
/// rounds as it takes without adapters, or else so many as have made half as much again as that by when the first others end, or just as much. None where not even that leaves
/// enough: narrow tiles are taken among the others then.
pub(crate) fn low_blocks(
    (bands, in_band): (usize, usize),
    (cost, narrow): (usize, usize),
    blocks: usize,
) -> usize {
    let (tiles, group) = (bands * in_band, GEMM_BANDS as usize * in_band);
    let begun = (blocks.div_ceil(group.max(1)) * GEMM_BANDS as usize).min(bands);
    let rounds = tiles.div_ceil(blocks.max(1));
    let fits = |first: &usize| {
        let narrow = bands.div_ceil(*first) * narrow;
        let left = (rounds * cost).saturating_sub(narrow) / cost;
        (blocks - first) * rounds + first * left >= tiles
    };
    let made_by_then = |halves: usize| (halves * begun * narrow).div_ceil(2 * cost);
    let first = [begun, made_by_then(3), made_by_then(2)]
        .into_iter()
        .map(|first| first.clamp(1, blocks.max(1)))
        .find(fits);
    first.map_or(0, |first| {
        first.max(blocks.saturating_sub(tiles)).min(bands)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_as_wide_as_leaves_the_least_idle() {
        let widths = WIDTHS[0];
        let best = |shape, narrow| widths[best_width(widths, shape, narrow, 132)].columns;
        let width = |rows: usize, columns| best((rows / 128, columns), 0);
        // One round of 192 columns, not one of 256.
        assert_eq!(width(512, 6144), 192);
        // 3.9 rounds of 4 of 224 columns, where 256 would take 3.4.
        assert_eq!(width(2048, 7168), 224);
        // 37 rounds of 192 columns would leave less idle than 28 of 256, and take longer: narrow ones load more, of what others have.
        assert_eq!(width(8192, 14336), 256);
        assert_eq!(width(8192, 2560), 256);
        // 110 rounds of 128 columns would be a little less than 55 of 256, but for what every tile costs.
        assert_eq!(width(16384, 14336), 256);
        // A band alone has as many tiles as there are multiprocessors, or nearly.
        assert_eq!(width(128, 8192), 64);
        assert_eq!(width(256, 8192), 128);
        assert_eq!(best((16, 7168), 100), 224);
        assert_eq!(best((64, 2560), 100), 256);
        assert_eq!(best_width(widths, (0, 0), 0, 0), 0);
    }

    #[test]
    fn no_block_has_less_to_do_than_it_must() {
        let even = |tiles| even_blocks(tiles, 132, false);
        assert_eq!(
            [0, 1, 132, 133, 256, 896].map(even),
            [0, 1, 132, 67, 128, 128]
        );
        assert_eq!([7, 133].map(|t| even_blocks(t, 132, true)), [7, 132]);
        assert_eq!(even_blocks(5, 0, false), 1);
    }

    #[test]
    fn narrow_tiles_come_first_where_others_have_blocks_enough() {
        let of = |rows: usize, columns: usize, width: usize, low| {
            let cost = WIDTHS[0].iter().find(|w| w.columns == width).unwrap().cost;
            let shape = (rows / 128, columns.div_ceil(width));
            low_blocks(shape, (cost, narrow_cost(low)), 132)
        };
        // 128 others leave four blocks, one for each band.
        assert_eq!(of(512, 6144, 192, 32), 4);
        // Two rounds leave room for one to begin each band, though fewer would do.
        assert_eq!([32, 33].map(|low| of(512, 10240, 192, low)), [4, 4]);
        // Eight bands are begun together. Where there is not room for so many at once, five blocks make their narrow tiles while the first others are made.
        assert_eq!([32, 64].map(|low| of(2048, 7168, 256, low)), [8, 8]);
        assert_eq!(of(4096, 7168, 256, 32), 8);
        assert_eq!(of(2048, 7168, 224, 32), 8);
        assert_eq!(of(8192, 5120, 256, 32), 8);
        // 128 others leave four blocks, which just make eight narrow tiles meanwhile.
        assert_eq!([32, 64].map(|low| of(1024, 4096, 256, low)), [4, 4]);
        // 640 others take five rounds of 132 but for twenty, which is less than narrow tiles take.
        assert_eq!(of(8192, 2560, 256, 32), 0);
        let one = |in_band, cost, blocks| low_blocks((1, in_band), (cost, 100), blocks);
        assert_eq!([one(1, 262, 1), one(4, 96, 132)], [0, 1]);
        // As many begin as there are, at most.
        for blocks in 1..140 {
            for bands in 1..40 {
                let first = low_blocks((bands, 5), (202, 100), blocks);
                assert!(first <= bands && first <= blocks);
            }
        }
    }
}
