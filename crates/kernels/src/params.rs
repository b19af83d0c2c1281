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

/// Structs of parameters: `Name of "kernel" in "file" { fields }`. What kernels of a communicator have in common stands at `..group` and `..call`.
macro_rules! parameters {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident of $kernel:literal in $file:literal { $($fields:tt)* }
    )*) => {
        $(parameter_struct! { [$(#[doc = $doc])* $name $kernel $file] $($fields)* })*

        /// Name, size and fields of every struct here.
        pub(super) const LAYOUTS: &[Layout] = &[$($name::LAYOUT,)*];
    };
}

macro_rules! parameter_struct {
    ([$($head:tt)*] ..group, $($rest:tt)*) => {
        parameter_struct! { [$($head)*]
            /// Where this rank reaches the memory of rank 0.
            base: u64,
            /// From one rank's memory to the next's.
            stride: u64,
            /// Device address of this rank's state.
            state: u64,
            /// Address of this rank's report, in memory that the host sees.
            report: u64,
            /// Where to ask the hook of fault injection, a slot for each that asks, in memory that the host sees; 0 where none is asked.
            desk: u64,
            /// How long a call may take, in nanoseconds.
            deadline_ns: u64,
            /// The same for the first call that all ranks make.
            first_deadline_ns: u64,
            $($rest)*
        }
    };
    ([$($head:tt)*] $($(#[doc = $doc:literal])* $field:ident: $type:tt,)* ..call, $($rest:tt)*) => {
        parameter_struct! { [$($head)*]
            $($(#[doc = $doc])* $field: $type,)*
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
            $($rest)*
        }
    };
    (
        [$(#[doc = $doc:literal])* $name:ident $kernel:literal $file:literal]
        $($(#[doc = $field_doc:literal])* $field:ident: $type:tt,)*
    ) => {
        $(#[doc = $doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $name {
            $($(#[doc = $field_doc])* pub $field: $type,)*
        }

        impl $name {
            const LAYOUT: Layout = Layout {
                name: stringify!($name),
                bytes: size_of::<$name>(),
                fields: &[$(Field {
                    c_type: c_type!($type),
                    name: stringify!($field),
                    extent: c_extent!($type),
                    offset: std::mem::offset_of!($name, $field),
                },)*],
            };
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: Zero::ZERO,)* }
            }
        }

        impl Parameters for $name {
            const FILE: &'static str = $file;
            const KERNEL: &'static str = $kernel;
        }
    };
}

/// What a field is where nothing else is said. (`Default` knows no arrays of more than 32.)
trait Zero: Copy {
    const ZERO: Self;
}

impl Zero for u32 {
    const ZERO: Self = 0;
}

impl Zero for u64 {
    const ZERO: Self = 0;
}

impl Zero for f32 {
    const ZERO: Self = 0.0;
}

impl<T: Zero, const N: usize> Zero for [T; N] {
    const ZERO: Self = [T::ZERO; N];
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

#[path = "params_experts.rs"]
mod experts;
#[path = "params_few_rows.rs"]
mod few_rows;
#[path = "params_fifo.rs"]
mod fifo;
#[path = "params_group.rs"]
mod group;
#[path = "params_linear.rs"]
mod linear;
#[path = "params_low_latency.rs"]
mod low_latency;
#[path = "params_pushed.rs"]
mod pushed;

#[allow(unused_imports, reason = "builds include this file for its layouts")]
pub use {experts::*, few_rows::*, fifo::*, group::*, linear::*, low_latency::*, pushed::*};

/// Name, size and fields of every struct.
pub fn layouts() -> impl Iterator<Item = &'static Layout> {
    group::LAYOUTS
        .iter()
        .chain(linear::LAYOUTS)
        .chain(few_rows::LAYOUTS)
        .chain(experts::LAYOUTS)
        .chain(pushed::LAYOUTS)
        .chain(fifo::LAYOUTS)
        .chain(low_latency::LAYOUTS)
}

/// The C++ header that declares the same structs.
pub fn header() -> String {
    let mut text = String::from(
        "// Written by brigade-kernels' build from src/params.rs.\n#pragma once\n#include <cstddef>\n#include <cstdint>\nnamespace brigade {\n",
    );
    for (name, value) in constants::ALL {
        text += &format!("constexpr uint64_t {name} = {value};\n");
    }
    for layout in layouts() {
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
