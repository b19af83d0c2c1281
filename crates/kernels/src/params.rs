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
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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
