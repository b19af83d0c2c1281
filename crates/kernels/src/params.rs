//! The parameter struct of every kernel, written once: Rust sees a `#[repr(C)]` struct, and the build script turns the same
//! lines into `params.cuh`, so that both sides agree on every offset (nvcc asserts the offsets that rustc chose).
//!
//! The build script includes this file too: it depends on nothing.

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

        /// Name, size and fields (C type, name, offset) of every struct.
        pub const LAYOUTS: &[Layout] = &[$(Layout {
            name: stringify!($name),
            bytes: size_of::<$name>(),
            fields: &[$((c_type!($type), stringify!($field), std::mem::offset_of!($name, $field)),)*],
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
    /// C type, name and offset in bytes of each field, in order.
    pub fields: &'static [(&'static str, &'static str, usize)],
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
}

/// The C++ header that declares the same structs.
pub fn header() -> String {
    let mut text = String::from(
        "// Written by brigade-kernels' build from src/params.rs.\n#pragma once\n#include <cstddef>\n#include <cstdint>\nnamespace brigade {\n",
    );
    for layout in LAYOUTS {
        let name = layout.name;
        text += &format!("struct {name} {{\n");
        for (c_type, field, _) in layout.fields {
            text += &format!("  {c_type} {field};\n");
        }
        text += &format!(
            "}};\nstatic_assert(sizeof({name}) == {}, \"{name}\");\n",
            layout.bytes
        );
        for (_, field, offset) in layout.fields {
            text += &format!(
                "static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");\n"
            );
        }
    }
    text + "}  // namespace brigade\n"
}
