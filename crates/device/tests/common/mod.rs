//! Buffers with an address and no bytes behind it: enough for everything that only looks at shapes.
#![allow(dead_code, reason = "every test file takes its part")]
#![allow(clippy::unwrap_used)]

use brigade_device::*;
use std::{any::Any, sync::Arc};

pub const ADDRESS: u64 = 0x1000;

#[derive(Debug)]
pub struct Nowhere {
    bytes: usize,
    memory: MemoryType,
}

impl Storage for Nowhere {
    fn address(&self) -> u64 {
        ADDRESS
    }
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn memory(&self) -> MemoryType {
        self.memory
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub fn storage(bytes: usize) -> Arc<dyn Storage> {
    let memory = MemoryType::Device;
    Arc::new(Nowhere { bytes, memory })
}

/// In device memory.
pub fn buffer(dtype: DataType, dims: &[usize]) -> Buffer {
    buffer_in(MemoryType::Device, dtype, dims)
}

pub fn buffer_in(memory: MemoryType, dtype: DataType, dims: &[usize]) -> Buffer {
    let shape = Shape::new(dims).unwrap();
    let bytes = shape.len() * dtype.bytes();
    Buffer::new(Arc::new(Nowhere { bytes, memory }), dtype, shape).unwrap()
}

/// bf16 in device memory.
pub fn plain(dims: &[usize]) -> Buffer {
    buffer(DataType::BF16, dims)
}

pub fn group(rank: usize, size: usize) -> Group {
    let mode = ParallelMode::Tp;
    Group { mode, rank, size }
}

/// One line a case. A case that passes the check has no place here.
#[derive(Default)]
pub struct Told(pub String);

impl Told {
    pub fn wrong<T>(&mut self, case: &str, result: Result<T>) {
        match result {
            Ok(_) => panic!("{case} passed"),
            Err(e) => self.0 += &format!("{case}: {e}\n"),
        }
    }
}
