//! What kernels around products are told.

use super::{Field, Layout, Parameters, Zero};

parameters! {
    /// `elements` numbers of one type become numbers of another. Types are numbered as in `types.cuh`.
    ConvertParams of "brigade_convert" in "convert" {
        /// Device address of the result.
        out: u64,
        /// Device address of the numbers.
        from: u64,
        /// How many.
        elements: u64,
        /// Type of the result.
        out_type: u32,
        /// Type of the numbers.
        from_type: u32,
    }

    /// `out[j, i] = from[i, j]` for elements of 1, 2, 4 or 8 bytes.
    TransposeParams of "brigade_transpose" in "transpose" {
        /// Device address of `[columns, rows]`.
        out: u64,
        /// Device address of `[rows, columns]`.
        from: u64,
        /// Rows of `from`.
        rows: u64,
        /// Columns of `from`.
        columns: u64,
        /// Bytes of an element.
        element_bytes: u32,
        /// Zero.
        reserved: u32,
    }

    /// The end of a linear: `out = act(v + beta * bias)`, where `v` is a float, or an integer sum times `alpha` and its two
    /// scales.
    FinishParams of "brigade_finish" in "finish" {
        /// Device address of the result, `[rows, columns]`.
        out: u64,
        /// Device address of the sums.
        from: u64,
        /// Device address of C, or 0.
        bias: u64,
        /// Device address of the scales of integer sums, one per row (or one).
        row_scales: u64,
        /// The same, one per column (or one).
        column_scales: u64,
        /// Rows of the result.
        rows: u64,
        /// Columns of the result.
        columns: u64,
        /// Elements from one row of sums to the next.
        from_stride: u64,
        /// Elements from one row of C to the next: 0 where one row is for all.
        bias_stride: u64,
        /// Factor of an integer sum.
        alpha: f32,
        /// Factor of C.
        beta: f32,
        /// Type of the result.
        out_type: u32,
        /// Type of the sums: a float, or i32.
        from_type: u32,
        /// Type of C.
        bias_type: u32,
        /// 0 none, 1 relu, 2 gelu by tanh, 3 gelu by erf, 4 silu.
        activation: u32,
        /// From one row's scale to the next: 0 or 1.
        row_scale_stride: u32,
        /// From one column's scale to the next: 0 or 1.
        column_scale_stride: u32,
    }

    /// Quantizes groups of columns of each row, scales included: a group is a row, or 128 of its columns.
    QuantizeRowsParams of "brigade_quantize_rows" in "quantize" {
        /// Device address of the values, `[rows, columns]`, a byte each.
        kernel: u64,
        /// Device address of the scales, `[rows, groups of a row]`.
        scales: u64,
        /// Device address of the floats.
        from: u64,
        /// Rows.
        rows: u64,
        /// Columns.
        columns: u64,
        /// Columns that share a scale.
        group_columns: u64,
        /// Type of the floats.
        from_type: u32,
        /// Type of the values: i8 or fp8 e4m3.
        kernel_type: u32,
    }

    /// The greatest magnitude of a column, or of all, as the bits of an f32.
    GreatestParams of "brigade_greatest" in "quantize" {
        /// Device address of one u32 per column, or of one for all; zero before.
        greatest: u64,
        /// Device address of the floats, `[rows, columns]`.
        from: u64,
        /// Rows.
        rows: u64,
        /// Columns.
        columns: u64,
        /// Type of the floats.
        from_type: u32,
        /// From one column's greatest to the next: 0 or 1.
        column_stride: u32,
    }

    /// Quantizes by the greatest magnitudes that `brigade_greatest` left, and writes the scales.
    QuantizeParams of "brigade_quantize" in "quantize" {
        /// Device address of the values, `[rows, columns]`, a byte each.
        kernel: u64,
        /// Device address of the scales: one per column, or one for all.
        scales: u64,
        /// Device address of the greatest magnitudes.
        greatest: u64,
        /// Device address of the floats.
        from: u64,
        /// Rows.
        rows: u64,
        /// Columns.
        columns: u64,
        /// Type of the floats.
        from_type: u32,
        /// Type of the values: i8 or fp8 e4m3.
        kernel_type: u32,
        /// From one column's greatest and scale to the next: 0 or 1.
        column_stride: u32,
        /// Zero.
        reserved: u32,
    }

    /// Quantized values become f32. The scale of `[i, j]` is at `i * row_stride + j / column_block * column_stride`.
    DequantizeParams of "brigade_dequantize" in "quantize" {
        /// Device address of the f32 values, `[rows, columns]`.
        out: u64,
        /// Device address of the quantized values.
        kernel: u64,
        /// Device address of the scales.
        scales: u64,
        /// Rows.
        rows: u64,
        /// Columns.
        columns: u64,
        /// From one row's scales to the next.
        row_stride: u64,
        /// Columns that share a scale.
        column_block: u64,
        /// From one block's scale to the next: 0 or 1.
        column_stride: u32,
        /// Type of the values: i8 or fp8 e4m3.
        kernel_type: u32,
    }

    /// Lays a matrix of bytes out as a library wants it: rows and columns filled up with zeros.
    PackParams of "brigade_pack" in "int8" {
        /// Device address of `[out_rows, out_columns]`.
        out: u64,
        /// Device address of the bytes.
        from: u64,
        /// Rows that there are.
        rows: u64,
        /// Columns that there are.
        columns: u64,
        /// Rows of the result.
        out_rows: u64,
        /// Columns of the result.
        out_columns: u64,
        /// From one row to the next, in `from`.
        row_stride: u64,
        /// From one column to the next, in `from`.
        column_stride: u64,
    }

    /// `out = alpha * (sum of x[i, l] * w[l, j]) * row scale * column scale` with exact 64-bit sums.
    LongParams of "brigade_int8_long" in "int8" {
        /// Device address of the f32 result, `[rows, columns]`.
        out: u64,
        /// Device address of x.
        x: u64,
        /// Device address of w.
        w: u64,
        /// Device address of the scales of x, one per row (or one).
        row_scales: u64,
        /// Device address of the scales of w, one per column (or one).
        column_scales: u64,
        /// Rows of the result.
        rows: u64,
        /// Columns of the result.
        columns: u64,
        /// Inner dimension.
        inner: u64,
        /// From one row of x to the next; its columns lie side by side.
        x_stride: u64,
        /// From one row of w (an inner index) to the next.
        w_inner_stride: u64,
        /// From one column of w to the next.
        w_column_stride: u64,
        /// Factor of the product.
        alpha: f32,
        /// From one row's scale to the next: 0 or 1.
        row_scale_stride: u32,
        /// From one column's scale to the next: 0 or 1.
        column_scale_stride: u32,
        /// Zero.
        reserved: u32,
    }

    /// Products in groups of rows: `out[i] = x[i] weight^T` with the weight of row i's group. There is a kernel for each type of x and
    /// weights, and of 16 bits one with large tiles and one with small ones.
    GroupedParams of "brigade_grouped" in "grouped" {
        /// Device address of the result, `[rows, columns]`.
        out: u64,
        /// Device address of the rows, `[rows, inner]`.
        x: u64,
        /// Device address of the weights, `[weight_count, columns, inner]`.
        weights: u64,
        /// Device address of each group's first row, and at the end where the last one ends; or 0, where groups have `places` rows each.
        offsets: u64,
        /// Device address of the rows of each group; or 0, where each ends where the next begins.
        counts: u64,
        /// Device address of the number of each group's weight; or 0, where it is that of the group.
        which: u64,
        /// Rows that there are.
        rows: u32,
        /// Groups.
        groups: u32,
        /// Rows from one group to the next, where there are no offsets.
        places: u32,
        /// Weights.
        weight_count: u32,
        /// Columns of the result.
        columns: u32,
        /// Inner dimension.
        inner: u32,
        /// Type of the result.
        out_type: u32,
        /// Whether every row of x and weights begins at a multiple of 16 bytes.
        aligned: u32,
    }

    /// Adapters of many runs of rows: down, `low = x first`, and up, `scale low second` into the rows of the result. There is a kernel of
    /// both for each type of 16 bits, and one that takes factors of any type and adds to sums in f32.
    LoraParams of "brigade_lora" in "lora" {
        /// Device address of what is between the factors, f32 `[parts, rows of all runs, low_stride]`.
        low: u64,
        /// Device address of the rows.
        x: u64,
        /// Device address of the result, `[rows, columns]`.
        out: u64,
        /// Elements from one row of x to the next.
        x_row: u64,
        /// Elements from one inner index of x to the next.
        x_inner: u64,
        /// Elements from one part of `low` to the next.
        part_stride: u64,
        /// Elements from one row of `low` to the next: a multiple of 4.
        low_stride: u32,
        /// Rows of first factors.
        inner: u32,
        /// Columns of second factors.
        columns: u32,
        /// Parts of `low`: one, or one for each chunk of the inner dimension.
        parts: u32,
        /// Tiles side by side that a block takes going up.
        span: u32,
        /// Blocks' shares of all runs.
        tiles: u32,
        /// How many runs.
        runs: u32,
        /// Type of x.
        x_type: u32,
        /// Whether every row of x begins at a multiple of 16 bytes, with its elements side by side.
        x_aligned: u32,
        /// Zero.
        reserved: u32,
        /// Device address of each run's first factor, `[inner, width]`, or of its second, `[width, columns]`.
        weight: [u64; 96],
        /// Type of that.
        weight_type: [u32; 96],
        /// Its width: 0 for rows that become zero.
        width: [u32; 96],
        /// Row of x and of the result where the run begins.
        row: [u32; 96],
        /// Row of `low` where it does.
        low_row: [u32; 96],
        /// Its rows.
        rows: [u32; 96],
        /// Its first share.
        first: [u32; 96],
        /// Its factor.
        scale: [f32; 96],
    }

    /// The gate between two products: `out[i, j] = silu(from[i, j]) * from[i, columns + j]`.
    SiluMulParams of "brigade_silu_mul" in "silu_mul" {
        /// Device address of the result, `[rows, columns]`.
        out: u64,
        /// Device address of `[rows, 2 columns]`.
        from: u64,
        /// Device address of how many rows count, an i32; or 0 for all.
        count: u64,
        /// Rows that there are.
        rows: u64,
        /// Columns of the result.
        columns: u64,
        /// Type of the result.
        out_type: u32,
        /// Type of what is gated.
        from_type: u32,
    }

    /// Adds a residual and norms rows by their root mean square. Variants are named after the type.
    ResidualNormParams of "brigade_residual_norm" in "residual_norm" {
        /// Device address of the rows.
        from: u64,
        /// Device address of the residual's rows.
        residual: u64,
        /// Device address of the weight, a row.
        weight: u64,
        /// Device address of the new residual's rows, which may be the old one's.
        sum: u64,
        /// Device address of the rows that are normed.
        normed: u64,
        /// Device address of their scales, if they have one each.
        scales: u64,
        /// Rows.
        rows: u32,
        /// Elements of a row.
        hidden: u32,
        /// Granules of a row.
        granules: u32,
        /// Whether all rows can be taken in whole granules.
        wide: u32,
        /// Bits of what is added to the mean square.
        eps: u32,
        /// Bits of the scale that was given.
        scale: u32,
        /// One of the forms.
        form: u32,
        /// Zero.
        reserved: u32,
    }

    /// The experts of every token that have the greatest scores, and their weights.
    TopKParams of "brigade_top_k" in "top_k" {
        /// Device address of the experts, i32 `[tokens, k]`.
        ids: u64,
        /// Device address of their weights, f32 `[tokens, k]`.
        weights: u64,
        /// Device address of the scores, `[tokens, experts]`.
        scores: u64,
        /// Tokens.
        tokens: u64,
        /// Experts, up to 1024.
        experts: u32,
        /// Experts of a token, up to 32.
        k: u32,
        /// Type of the scores.
        scores_type: u32,
        /// 0 softmax of the chosen, 1 softmax of all, 2 sigmoid.
        weighting: u32,
        /// Factor of all weights.
        factor: f32,
        /// Zero.
        reserved: u32,
    }

    /// Lays adapters out for `brigade_gemm_flags`: side by side, and both factors by the dimension that is summed over.
    AdaptersParams of "brigade_adapters" in "adapters" {
        /// Device address of `[columns of all, inner]`: the first factors, transposed. A column whose row of the second factor is not finite begins with a NaN.
        down: u64,
        /// Device address of `[columns, stride]`: the second factors, transposed; zero beyond the columns of all, and for what is not finite.
        up: u64,
        /// Device address of words that become zero.
        flags: u64,
        /// How many.
        flag_count: u64,
        /// Device address of words that become the state of a group in which nothing has happened, and of one behind them that says that it was
        /// not stopped; 0 if there is a group.
        state: u64,
        /// Rows of first factors.
        inner: u64,
        /// Columns of second factors.
        columns: u64,
        /// Elements from one row of `up` to the next.
        stride: u64,
        /// The exponent's bits of an element.
        exponent: u64,
        /// How many adapters.
        count: u64,
        /// Device address of each first factor, `[inner, width]`.
        first: [u64; 16],
        /// Device address of each second factor, `[width, columns]`.
        second: [u64; 16],
        /// Where the columns of each begin.
        column: [u32; 16],
        /// How many it has.
        width: [u32; 16],
    }

    /// A product whose tiles wait for the flags of their rows: `out = act(rows weight^T + bias)`, and of some runs of rows,
    /// rounded, `scale rows down^T`, times `up^T`.
    GemmFlagsParams of "brigade_gemm_flags" in "gemm_flags" {
        /// The tensor map of all rows, as they arrive.
        rows_map: [u64; 16],
        /// That of the rows which are there from the beginning.
        own_map: [u64; 16],
        /// That of the weight, `[columns, inner]`.
        weight_map: [u64; 16],
        /// That of `[low columns, inner]`.
        down_map: [u64; 16],
        /// That of rows times `down`.
        low_map: [u64; 16],
        /// That of `[columns, low columns]`.
        up_map: [u64; 16],
        /// That of what all ranks made of the rows that are added up, one rank's behind the other's.
        parts_map: [u64; 16],
        /// Where this rank reaches the memory of rank 0.
        base: u64,
        /// From one rank's memory to the next's.
        stride: u64,
        /// Device address of this rank's state.
        state: u64,
        /// Address of this rank's report.
        report: u64,
        /// How long a call may take, in nanoseconds.
        deadline_ns: u64,
        /// The same for the first call that all ranks make.
        first_deadline_ns: u64,
        /// Device address of what is added, or 0.
        bias: u64,
        /// Device address of rows times `down`, all rows of the result.
        low: u64,
        /// Device address of a word for each band of rows of each part, which becomes 1 when its part of `low` is there.
        low_flags: u64,
        /// Zero: tiles ask no hook.
        desk: u64,
        /// Device address of f32 scales, one per column (or one), where factors have 8 bits.
        column_scales: u64,
        /// Device addresses of own rows and of their scales, if this product sends them.
        send_from: [u64; 2],
        /// Where they go in every rank's memory, in bytes.
        send_to: [u64; 2],
        /// How many bytes.
        send_bytes: [u64; 2],
        ..call,
        /// Whether all ranks make this call.
        collective: u32,
        /// The counter of the use that flags are for.
        counter: u32,
        /// Columns of the result.
        columns: u32,
        /// Inner dimension.
        inner: u32,
        /// Rows of a tile that count: a multiple of 8.
        band_rows: u32,
        /// Tiles of all parts, narrow ones too.
        tiles: u32,
        /// How many parts.
        parts: u32,
        /// Columns of `low`, a multiple of 8; 0 without adapters.
        low_columns: u32,
        /// How many runs have an adapter.
        runs: u32,
        /// 1 if each row has a scale, 0 if each part has.
        row_scale_stride: u32,
        /// 1 if each column has a scale, 0 if all have one.
        column_scale_stride: u32,
        /// 0 if it begins behind the kernel in front, or one of the `BEGINS_..` constants.
        begins: u32,
        /// Type of what is added.
        bias_type: u32,
        /// From row to row of it, in elements; 0 if all rows have one.
        bias_stride: u32,
        /// What is applied, as in `FinishParams`.
        activation: u32,
        /// The first part that is added up.
        sum_part: u32,
        /// Rows that are added up.
        sum_rows: u32,
        /// Whether own rows are sent to all others.
        sends: u32,
        /// Whether they go to their place in this rank's memory, too.
        keeps_own: u32,
        /// The word by which others hear of own rows.
        send_word: u32,
        /// Tiles in front of all others: narrow ones, one for each band; 0 if those are among the others.
        low_tiles: u32,
        /// Blocks that begin with the first, of which there are as many or more.
        low_blocks: u32,
        /// Zeros.
        reserved: [u32; 2],
        /// Row of the result where each run begins.
        run_row: [u32; 16],
        /// Its rows.
        run_rows: [u32; 16],
        /// Its adapter's first column of `low`.
        run_column: [u32; 16],
        /// How many that has.
        run_width: [u32; 16],
        /// Its factor.
        run_scale: [f32; 16],
        /// Where the rows of each part go.
        part_out: [u64; 32],
        /// Device address of the scale of each part's first row, where factors have 8 bits.
        part_scales: [u64; 32],
        /// Where its owner has it, of a part in front of `sum_part`: its tiles are sent there. 0 if copy engines carry it.
        part_to: [u64; 32],
        /// Row in its map where each begins.
        part_row: [u32; 32],
        /// Row of the result where each begins.
        part_out_row: [u32; 32],
        /// Rows of each.
        part_rows: [u32; 32],
        /// Its first tile, behind those in front of all.
        part_first: [u32; 32],
        /// The word of its flag; 0 for own rows.
        part_word: [u32; 32],
        /// The rank whose flag that is, or that is told of the part.
        part_peer: [u32; 32],
        /// The word by which that rank hears that all of it is there.
        part_tells: [u32; 32],
        /// The words by which this rank hears of what each rank made of the first part that is added up, then of the next.
        sum_word: [u32; 32],
    }
}

/// A product to which is added what others made of the same rows. It takes what one whose tiles wait does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(transparent)]
pub struct GemmSumsParams(pub GemmFlagsParams);

impl Parameters for GemmSumsParams {
    const FILE: &'static str = "gemm_sums";
    const KERNEL: &'static str = "brigade_gemm_sums";
}
