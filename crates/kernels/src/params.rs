//! The parameter struct of every kernel, written once: Rust sees a `#[repr(C)]` struct, and the build script turns the same
//! lines into `params.cuh`, so that both sides agree on every offset (nvcc asserts the offsets that rustc chose).
//!
//! The build script includes this file too: it depends on nothing.

#[path = "constants.rs"]
pub mod constants;

/// What a C++ compiler calls a field's type.
macro_rules! c_type {
    (u32) => {
        "uint32_t"
    };
    (u64) => {
        "uint64_t"
    };
    (f32) => {
        "float"
    };
    ([$type:tt; $n:literal]) => {
        c_type!($type)
    };
}

/// How many there are, as C++ writes it behind the name.
macro_rules! c_extent {
    ([$type:tt; $n:literal]) => {
        concat!("[", stringify!($n), "]")
    };
    ($type:tt) => {
        ""
    };
}

macro_rules! parameters {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident of $kernel:literal in $file:literal {
            $($(#[doc = $field_doc:literal])* $field:ident: $type:tt,)*
        }
    )*) => {
        $(
            $(#[doc = $doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default, PartialEq)]
            pub struct $name {
                $($(#[doc = $field_doc])* pub $field: $type,)*
            }

            impl Parameters for $name {
                const FILE: &'static str = $file;
                const KERNEL: &'static str = $kernel;
            }
        )*

        /// Name, size and fields of every struct.
        pub const LAYOUTS: &[Layout] = &[$(Layout {
            name: stringify!($name),
            bytes: size_of::<$name>(),
            fields: &[$(Field {
                c_type: c_type!($type),
                name: stringify!($field),
                extent: c_extent!($type),
                offset: std::mem::offset_of!($name, $field),
            },)*],
        },)*];
    };
}

/// A parameter struct knows its kernel, so that no kernel is launched with another's parameters.
pub trait Parameters: Copy {
    /// The fatbin it is in.
    const FILE: &'static str;
    /// Its name there.
    const KERNEL: &'static str;
}

/// The layout of one parameter struct.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Name of the struct, the same in Rust and C++.
    pub name: &'static str,
    /// Its size.
    pub bytes: usize,
    /// Its fields, in order.
    pub fields: &'static [Field],
}

/// One field of a parameter struct.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Type of an element, as C++ calls it.
    pub c_type: &'static str,
    /// Its name in both languages.
    pub name: &'static str,
    /// What stands behind the name of an array; else nothing.
    pub extent: &'static str,
    /// Bytes from the start of the struct.
    pub offset: usize,
}

parameters! {
    /// `bytes` bytes at `out` become repeats of the 8 bytes of `pattern`, whatever the alignment.
    FillParams of "brigade_fill" in "fill" {
        /// Device address of the first byte.
        out: u64,
        /// How many bytes.
        bytes: u64,
        /// The bytes to repeat, lowest first.
        pattern: u64,
    }

    /// Posts one flag after a pause.
    PostParams of "brigade_probe_post" in "probe" {
        /// Address of the 64-bit flag.
        flag: u64,
        /// What to store there.
        value: u64,
        /// How long to wait first, in nanoseconds.
        delay_ns: u64,
    }

    /// Makes one bounded wait and says how it ended.
    WaitParams of "brigade_probe_wait" in "probe" {
        /// Address of the 64-bit flag.
        flag: u64,
        /// Address of this rank's 32-bit abort word.
        abort: u64,
        /// Address of this rank's 64-byte fault record, in memory that the host sees.
        fault: u64,
        /// Address of the 32-bit outcome: 0 when the flag came, else the fault's kind.
        outcome: u64,
        /// The flag to wait for.
        expected: u64,
        /// How long to wait at most, in nanoseconds.
        timeout_ns: u64,
        /// Number of the call, for the fault record.
        call: u64,
        /// Number of the operation, for the fault record.
        operation: u32,
        /// This rank.
        rank: u32,
        /// The rank waited for.
        peer: u32,
        /// Chunk, channel or region waited for.
        slot: u32,
    }

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

    /// Carries out steps of a protocol: counters, flags to peers, waits for theirs. One warp does it, phase by phase.
    StepsParams of "brigade_steps" in "steps" {
        /// Where this rank reaches the memory of rank 0.
        base: u64,
        /// From one rank's memory to the next's.
        stride: u64,
        /// Device address of this rank's state.
        state: u64,
        /// Address of this rank's report, in memory that the host sees.
        report: u64,
        /// Where the steps ask the hook of fault injection, a slot for each, in memory that the host sees; 0 without one.
        desk: u64,
        /// How long a call may take, in nanoseconds.
        deadline_ns: u64,
        /// The same for the first call that all ranks make.
        first_deadline_ns: u64,
        /// Bytes to count as moved when the call has ended well.
        moved_bytes: u64,
        /// Device addresses of what is poisoned if the group was stopped.
        poison: [u64; 6],
        /// Bytes to poison at each.
        poison_bytes: [u64; 6],
        /// The bytes of poison for each, lowest first.
        poison_pattern: [u64; 6],
        /// This rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
        /// Number of the operation, for fault records.
        operation: u32,
        /// Of the call.
        signature: u32,
        /// Word where the flags of arrival begin.
        barrier: u32,
        /// Word by which a rank is told to stop.
        stop: u32,
        /// How many steps there are.
        count: u32,
        /// Whether all ranks make this call.
        collective: u32,
        /// The steps.
        steps: [u64; 32],
    }

    /// Copies bytes, unless the group was stopped.
    MoveParams of "brigade_move" in "move" {
        /// Device address of the word by which this rank is told to stop.
        stop: u64,
        /// Device address of this rank's state.
        state: u64,
        /// How many copies.
        count: u64,
        /// Where each reads.
        from: [u64; 16],
        /// Where each writes.
        to: [u64; 16],
        /// How much.
        bytes: [u64; 16],
    }

    /// Combines the same elements of all ranks in rank order, unless the group was stopped.
    ReduceParams of "brigade_reduce" in "reduce" {
        /// Device address of the word by which this rank is told to stop.
        stop: u64,
        /// Device address of this rank's state.
        state: u64,
        /// Device address of the result.
        out: u64,
        /// Device address of rank 0's elements.
        from: u64,
        /// From one rank's elements to the next's.
        stride: u64,
        /// How many elements.
        elements: u64,
        /// Type of the result.
        out_type: u32,
        /// Type of the elements.
        from_type: u32,
        /// How many ranks.
        parts: u32,
        /// 0 sum, 1 product, 2 maximum, 3 minimum, 4 average.
        op: u32,
    }

    /// Messages to and from peers, side by side: each by some blocks, through its sender's slot in the receiver's memory.
    MessagesParams of "brigade_messages" in "messages" {
        /// Where this rank reaches the memory of rank 0.
        base: u64,
        /// From one rank's memory to the next's.
        stride: u64,
        /// Device address of this rank's state.
        state: u64,
        /// Address of this rank's report.
        report: u64,
        /// Where blocks ask the hook of fault injection, a slot for each; 0 without one.
        desk: u64,
        /// How long a call may take, in nanoseconds.
        deadline_ns: u64,
        /// The same for the first call that all ranks make.
        first_deadline_ns: u64,
        /// Byte of a rank's memory where the slots' first half begins.
        slots: u64,
        /// From one half to the other.
        half_bytes: u64,
        /// Bytes of a slot.
        slot_bytes: u64,
        /// This rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
        /// Number of the operation, for fault records.
        operation: u32,
        /// Of the call that all ranks make.
        call_signature: u32,
        /// Word where the flags of arrival begin.
        barrier: u32,
        /// Word by which a rank is told to stop.
        stop: u32,
        /// Word where the flags of the slots begin.
        ring: u32,
        /// Flags of a slot.
        pieces: u32,
        /// Blocks for each message, at most `pieces`.
        blocks: u32,
        /// How many messages.
        count: u32,
        /// Whether all ranks make this call.
        collective: u32,
        /// The counter of what was sent to rank 0; that of what came from rank 0 stands `size` further.
        counters: u32,
        /// Whether a sender waits until its message was read.
        confirmed: u32,
        /// Zero.
        reserved: u32,
        /// The other rank of each, plus 256 where this rank receives.
        peer: [u32; 32],
        /// What each is signed by.
        signature: [u32; 32],
        /// Device address of each.
        local: [u64; 32],
        /// Its size.
        bytes: [u64; 32],
    }

    /// Lays adapters out for `brigade_gemm_flags`: side by side, and both factors by the dimension that is summed over.
    AdaptersParams of "brigade_adapters" in "adapters" {
        /// Device address of `[columns of all, inner]`: the first factors, transposed.
        down: u64,
        /// Device address of `[columns, stride]`: the second factors, transposed; zero beyond the columns of all.
        up: u64,
        /// Device address of words that become zero.
        flags: u64,
        /// How many.
        flag_count: u64,
        /// Rows of first factors.
        inner: u64,
        /// Columns of second factors.
        columns: u64,
        /// Elements from one row of `up` to the next.
        stride: u64,
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

    /// A product whose tiles wait for the flags of their rows: `out = rows weight^T + bias`, and of some runs of rows,
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
        /// Device address of one row, or 0.
        bias: u64,
        /// Device address of rows times `down`, all rows of the result.
        low: u64,
        /// Device address of a word for each band of rows of each part, which becomes 1 when its part of `low` is there.
        low_flags: u64,
        /// Zero: tiles ask no hook.
        desk: u64,
        /// This rank.
        rank: u32,
        /// Ranks in the group.
        size: u32,
        /// Number of the operation, for fault records.
        operation: u32,
        /// Of the call.
        signature: u32,
        /// Word where the flags of arrival begin.
        barrier: u32,
        /// Word by which a rank is told to stop.
        stop: u32,
        /// Whether all ranks make this call.
        collective: u32,
        /// The counter of the use that flags are for.
        counter: u32,
        /// Columns of the result.
        columns: u32,
        /// Inner dimension.
        inner: u32,
        /// Tiles of all parts.
        tiles: u32,
        /// Tiles side by side.
        column_tiles: u32,
        /// How many parts.
        parts: u32,
        /// Columns of `low`, a multiple of 8; 0 without adapters.
        low_columns: u32,
        /// How many runs have an adapter.
        runs: u32,
        /// Zero.
        padding: [u32; 13],
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
        /// Row in its map where each begins.
        part_row: [u32; 32],
        /// Row of the result where each begins.
        part_out_row: [u32; 32],
        /// Rows of each.
        part_rows: [u32; 32],
        /// Its first tile.
        part_first: [u32; 32],
        /// The word of its flag; 0 for own rows.
        part_word: [u32; 32],
        /// The rank whose flag that is.
        part_peer: [u32; 32],
    }
}

/// The C++ header that declares the same structs.
pub fn header() -> String {
    let mut text = String::from(
        "// Written by brigade-kernels' build from src/params.rs.\n#pragma once\n#include <cstddef>\n#include <cstdint>\nnamespace brigade {\n",
    );
    for (name, value) in constants::ALL {
        text += &format!("constexpr uint64_t {name} = {value};\n");
    }
    for layout in LAYOUTS {
        let name = layout.name;
        text += &format!("struct {name} {{\n");
        for field in layout.fields {
            let Field {
                c_type,
                name,
                extent,
                ..
            } = field;
            text += &format!("  {c_type} {name}{extent};\n");
        }
        text += &format!(
            "}};\nstatic_assert(sizeof({name}) == {}, \"{name}\");\n",
            layout.bytes
        );
        for field in layout.fields {
            let (field, offset) = (field.name, field.offset);
            text += &format!(
                "static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");\n"
            );
        }
    }
    text + "}  // namespace brigade\n"
}
