//! What a product of few rows is told.

use super::{Field, Layout, Parameters, Zero};

parameters! {
    /// A product of few rows: `out = act(alpha x weight^T + beta c)`, of f16 or bf16. With `slots` it goes to all ranks in place of `out`, as the
    /// [kernel that sums](super::AllReduceNormParams) would send it, without C and activation, in its type.
    FewRowsParams of "brigade_few_rows" in "few_rows" {
        /// Device address of the result, `[rows, columns]`.
        out: u64,
        /// Device address of the rows, aligned to 16 bytes.
        x: u64,
        /// Device address of the weight, `[columns, inner]`, aligned to 16 bytes.
        weight: u64,
        /// Device address of C, or 0.
        bias: u64,
        /// Elements from one of the rows to the next, whole 16 bytes.
        x_stride: u64,
        /// The same of the weight.
        weight_stride: u64,
        /// The same of C: 0 where one row is for all.
        bias_stride: u64,
        /// Rows, up to the kernel's.
        rows: u32,
        /// Columns of the result.
        columns: u32,
        /// Inner dimension, whole 16 bytes.
        inner: u32,
        /// Whether the weight may be read before the kernel in front has ended.
        settled: u32,
        /// Factor of the product.
        alpha: f32,
        /// Factor of C.
        beta: f32,
        /// Type of the result.
        out_type: u32,
        /// Type of C.
        bias_type: u32,
        /// As in [`FinishParams`](super::FinishParams); or 5, for f16 and bf16 without C: silu of a column times that of the second half of the weight's rows, which has twice as
        /// many then.
        activation: u32,
        /// How many buffers rotate: 3.
        buffers: u32,
        /// Where this rank reaches the memory of rank 0.
        base: u64,
        /// From one rank's memory to the next's.
        stride: u64,
        /// Device address of this rank's state.
        state: u64,
        /// Byte of a rank's memory where the first buffer begins, or 0.
        slots: u64,
        /// From one buffer to the next.
        buffer_bytes: u64,
        /// This rank.
        rank: u32,
        /// Ranks of the group.
        size: u32,
        /// Device address of the first factor of each adapter, `[inner, width]`, aligned to 16 bytes.
        first: [u64; 4],
        /// Device address of the second factor of each row's adapter, `[width, columns]`.
        second: [u64; 16],
        /// How wide that is; 0 for a row without.
        width: [u32; 16],
        /// Where its columns begin among those of all.
        column: [u32; 16],
        /// What it is multiplied by.
        scale: [f32; 16],
        /// How wide each first factor is: 8, 16, 32 or 64.
        first_width: [u32; 4],
        /// Adapters.
        adapters: u32,
        /// Zero, which the compiler does not know.
        zero: u32,
    }
}
