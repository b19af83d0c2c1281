//! Adapters of few rows, which the product's kernel takes along.

use super::MOST;
use crate::tiles::GRAIN;
use brigade_device::{Buffer, DataType, Lora};
use brigade_kernels::{FEW_LOW_BLOCKS, FEW_LOW_COLUMNS, FEW_ROWS_SLICE, FewRowsParams};
use smallvec::SmallVec;
use std::ops::Range;

/// Columns of a first factor that are multiplied together.
const UNIT: usize = 16;

/// Most stages of first factors that a block has beside up to so many rows, where one run has an adapter, and where more have. A stage costs 0.5 to 0.9 us on an H200, of
/// more than 8 rows up to twice that (`docs/results/few-rows-lora-16-1.h200x1.json` and those beside it), and elsewhere a run's two launches take about 10 us, two runs' 20,
/// and those that more share as much.
const STAGES: [(usize, [usize; 2]); 2] = [(8, [12, 24]), (MOST, [7, 16])];

/// The adapter of each row, as the kernel takes them.
#[derive(Debug, Default)]
pub(crate) struct RowAdapters {
    /// What it is told of them.
    pub(super) told: FewRowsParams,
    pub(super) factors: SmallVec<[Buffer; 4]>,
    /// Runs that have one.
    runs: usize,
}

impl RowAdapters {
    /// Those of runs that have rows, of this type; none where there are more rows than the kernel has, or factors that it does not take.
    pub(crate) fn of<'a>(
        runs: impl Iterator<Item = (Range<usize>, Option<&'a Lora<'a>>)>,
        dtype: DataType,
    ) -> Option<Self> {
        let mut all = Self::default();
        // Where columns of each first factor begin among those of all.
        let (mut begins, mut end) = (SmallVec::<[u32; 4]>::new(), 0);
        for (rows, lora) in runs {
            if rows.end > MOST {
                return None;
            }
            let Some(lora) = lora else { continue };
            let (first, columns) = (lora.a.address(), lora.a.shape().columns());
            let takes = [lora.a.dtype(), lora.b.dtype()] == [dtype; 2]
                && matches!(columns, 8 | 16 | 32 | 64)
                && first.is_multiple_of(GRAIN as u64);
            if !takes {
                return None;
            }
            let (told, width) = (&mut all.told, columns as u32);
            let same = |&i: &usize| told.first[i] == first && told.first_width[i] == width;
            let which = (0..begins.len()).find(same).unwrap_or(begins.len());
            if which == begins.len() {
                begins.push(end as u32);
                end += columns.next_multiple_of(UNIT);
                if end > FEW_LOW_COLUMNS as usize {
                    return None;
                }
                (told.first[which], told.first_width[which]) = (first, width);
                told.adapters = begins.len() as u32;
            }
            for row in rows {
                (told.second[row], told.width[row]) = (lora.b.address(), width);
                (told.column[row], told.scale[row]) = (begins[which], lora.scale);
            }
            all.factors.extend([lora.a, lora.b].map(|v| v.retain()));
            all.runs += 1;
        }
        Some(all)
    }

    /// Whether the kernel is quicker for so many rows of so many elements than what adapters take elsewhere.
    pub(super) fn pays(&self, rows: usize, inner: usize) -> bool {
        let units = |&width: &u32| (width as usize).div_ceil(UNIT);
        let units: usize = self.told.first_width.iter().map(units).sum();
        let slices = inner.div_ceil((FEW_ROWS_SLICE * FEW_LOW_BLOCKS) as usize);
        let most = STAGES.iter().find(|form| rows <= form.0);
        most.is_some_and(|(_, most)| slices * units <= most[usize::from(self.runs > 1)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiles::tests::at;

    const BF16: DataType = DataType::BF16;

    /// Of runs with so many rows, and the address and width of an adapter, whose second factor lies a page behind the first, and whose scale is the run's number.
    fn of(runs: &[(usize, Option<(u64, usize)>)], dtype: DataType) -> Option<RowAdapters> {
        let factors = |&(address, width): &(u64, usize)| {
            [
                at(address, BF16, &[24, width]),
                at(address + 4096, dtype, &[width, 40]),
            ]
        };
        let factors = runs.iter().map(|run| run.1.as_ref().map(factors));
        let factors: Vec<_> = factors.collect();
        let loras = factors.iter().enumerate().map(|(i, both)| {
            both.as_ref().map(|[a, b]| Lora {
                a: a.view(),
                b: b.view(),
                scale: i as f32,
            })
        });
        let loras: Vec<_> = loras.collect();
        let mut end = 0;
        let runs = runs.iter().zip(&loras).map(|(run, lora)| {
            end += run.0;
            (end - run.0..end, lora.as_ref())
        });
        RowAdapters::of(runs, BF16)
    }

    #[test]
    fn rows_are_told_of_their_adapters_and_first_factors_are_told_once() {
        let runs = [
            (2, Some((0x1_0000, 8))),
            (1, None),
            (3, Some((0x2_0000, 32))),
            (1, Some((0x1_0000, 8))),
        ];
        let all = of(&runs, BF16).unwrap();
        let told = &all.told;
        assert_eq!(told.adapters, 2);
        assert_eq!(told.first, [0x1_0000, 0x2_0000, 0, 0]);
        assert_eq!(told.first_width, [8, 32, 0, 0]);
        assert_eq!(told.width[..8], [8, 8, 0, 32, 32, 32, 8, 0]);
        assert_eq!(told.column[..8], [0, 0, 0, 16, 16, 16, 0, 0]);
        assert_eq!(told.scale[..8], [0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 3.0, 0.0]);
        assert_eq!(
            told.second[..8],
            [
                0x1_1000, 0x1_1000, 0, 0x2_1000, 0x2_1000, 0x2_1000, 0x1_1000, 0
            ]
        );
        assert_eq!(all.factors.len(), 6);
    }

    /// So many adapters of a row each, all of one width.
    fn each(width: usize, count: u64) -> Vec<(usize, Option<(u64, usize)>)> {
        let address = |i| 0x1_0000 * (i + 1);
        (0..count).map(|i| (1, Some((address(i), width)))).collect()
    }

    #[test]
    fn adapters_go_along_where_they_have_few_stages() {
        let pays = |width, count, rows, inner| {
            let all = of(&each(width, count), BF16).unwrap();
            all.pays(rows, inner)
        };
        assert!(pays(16, 1, 8, 14_336) && pays(16, 2, 8, 14_336) && !pays(16, 4, 8, 14_336));
        assert!(pays(64, 1, 8, 4096) && !pays(64, 1, 1, 8192) && pays(16, 4, 1, 8192));
        assert!(pays(8, 1, 8, 8) && pays(8, 4, 8, 8192) && !pays(8, 1, 8, 25_000));
        assert!(pays(16, 1, 9, 14_336) && pays(16, 4, 16, 8192) && pays(32, 2, 16, 8192));
        assert!(!pays(64, 1, 9, 4096) && !pays(16, 4, 9, 14_336) && !pays(16, 1, 17, 8));
    }

    #[test]
    fn what_the_kernel_does_not_take_is_refused() {
        assert!(of(&each(16, 4), BF16).is_some() && of(&each(16, 5), BF16).is_none());
        assert!(of(&each(8, 4), BF16).is_some() && of(&each(8, 5), BF16).is_none());
        assert!(of(&each(32, 2), BF16).is_some() && of(&each(32, 3), BF16).is_none());
        assert!(of(&each(64, 1), BF16).is_some() && of(&each(24, 1), BF16).is_none());
        assert!(of(&[(16, Some((0x1_0000, 16)))], BF16).is_some());
        assert!(of(&[(17, Some((0x1_0000, 16)))], BF16).is_none());
        assert!(of(&[(16, Some((0x1_0000, 16))), (1, None)], BF16).is_none());
        assert!(of(&[(1, Some((0x1_0008, 16)))], BF16).is_none());
        assert!(of(&[(1, Some((0x1_0000, 16)))], DataType::F16).is_none());
    }
}
