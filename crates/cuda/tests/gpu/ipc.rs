//! Memory of another process: this program starts itself again, and the child reads what the parent wrote.

use crate::common::{bytes, device, field};
use brigade_cuda::IpcMemory;
use brigade_device::{DataType, DeviceExt, Error};
use cudarc::driver::{CudaContext, result};
use std::process::Command;

/// Tells the child its handle, as numbers.
const HANDLE: &str = "BRIGADE_TEST_IPC_HANDLE";
const SIZE: usize = 3 << 20;

#[test]
fn another_process_reads_memory_by_its_handle() {
    let Some((device, on, _alone)) = device() else {
        return;
    };
    if let Ok(text) = std::env::var(HANDLE) {
        let numbers: Vec<u8> = text.split(',').map(|n| n.parse().unwrap()).collect();
        let memory = IpcMemory::open(&device, numbers.try_into().unwrap(), SIZE).unwrap();
        // SAFETY: the parent waits for this process before it frees or writes.
        let beyond = unsafe { memory.buffer(1, DataType::U8, &[SIZE]) };
        assert_eq!(field(beyond.unwrap_err()), "shape");
        // SAFETY: as above.
        let theirs = unsafe { memory.buffer(5, DataType::U8, &[SIZE - 5]) }.unwrap();
        drop(memory);
        let got: Vec<u8> = device.download(&on, theirs.view()).unwrap();
        assert!((5..SIZE).zip(got).all(|(i, x)| x == i as u8));
        return;
    }
    let pooled = bytes(&device, &on, 100, 1);
    let refused = device.ipc_handle(pooled.address());
    assert!(matches!(
        refused,
        Err(Error::Backend {
            call: "cuIpcGetMemHandle",
            ..
        })
    ));

    let context = CudaContext::new(0).unwrap();
    context.bind_to_thread().unwrap();
    let pattern: Vec<u8> = (0..SIZE).map(|i| i as u8).collect();
    // SAFETY: allocated here, written before the child starts, freed after it has ended.
    unsafe {
        let address = result::malloc_sync(SIZE).unwrap();
        result::memcpy_htod_sync(address, &pattern).unwrap();
        let handle = device.ipc_handle(address).unwrap();
        let own = IpcMemory::open(&device, handle, SIZE);
        assert!(own.is_err(), "a handle of this process");
        let numbers = handle.map(|n| n.to_string()).join(",");
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "ipc::another_process_reads_memory_by_its_handle"])
            .env(HANDLE, numbers)
            .output()
            .unwrap();
        result::free_sync(address).unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(
            child.status.success() && said.contains("1 passed"),
            "{said}"
        );
    }
}
