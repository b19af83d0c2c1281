//! Memory that is lent: what may be done with it, and when no more.

use brigade_device::{Access, Adopted, Buffer, DataType, Gate, Loan, MemoryType, Storage};
use std::sync::{Arc, mpsc::channel};

fn lend(values: &[f32], shape: &[usize], access: Access) -> brigade_device::Result<Loan> {
    let address = values.as_ptr() as u64;
    // SAFETY: the callers keep the values for longer than the loan, and nothing reads or writes them here.
    unsafe {
        Buffer::lend(
            address,
            MemoryType::Host,
            DataType::F32,
            shape,
            access,
            Arc::new(()),
        )
    }
}

fn access(storage: &Arc<dyn Storage>) -> Option<Access> {
    let adopted: &Adopted = storage.as_any().downcast_ref()?;
    Some(*adopted.gate().lock().read())
}

#[test]
fn a_loan_ends_for_every_view_that_was_kept() {
    let values = [1f32; 6];
    for lent in [Access::Read, Access::Write] {
        let mut loan = lend(&values, &[3, 2], lent).unwrap();
        assert_eq!(loan.view().address(), values.as_ptr() as u64);
        assert_eq!(loan.view_mut().shape().dims(), [3, 2]);
        let kept = loan.view().slice(1, 2).unwrap().retain();
        assert_eq!(access(kept.storage()), Some(lent));
        drop(loan);
        assert_eq!(access(kept.storage()), Some(Access::None));
    }
}

#[test]
fn what_is_adopted_stays() {
    let values = Arc::new([1f32; 6]);
    let address = values.as_ptr() as u64;
    // SAFETY: six floats, kept by the owner; nothing reads or writes them here.
    let adopted = unsafe {
        Buffer::adopt(
            address,
            MemoryType::Host,
            DataType::F32,
            &[6],
            values.clone(),
        )
    };
    let adopted = adopted.unwrap();
    let slice = adopted.slice(2, 1).unwrap();
    drop(adopted);
    assert_eq!(access(slice.storage()), Some(Access::Write));
}

#[test]
fn who_takes_memory_back_waits_for_who_is_at_it() {
    let values = [1f32; 6];
    let loan = lend(&values, &[6], Access::Read).unwrap();
    let kept = loan.view().retain();
    let adopted: &Adopted = kept.storage().as_any().downcast_ref().unwrap();
    let reading = adopted.gate().lock().read();
    let (tell, told) = channel();
    std::thread::scope(|s| {
        s.spawn(move || {
            drop(loan);
            tell.send(()).unwrap();
        });
        // Until now nothing could have ended the loan.
        assert!(told.try_recv().is_err());
        assert_eq!(*reading, Access::Read);
        drop(reading);
        told.recv().unwrap();
    });
    assert_eq!(access(kept.storage()), Some(Access::None));
}

#[test]
fn the_gate_says_what_is_wrong() {
    let told = |has, want| {
        let error = Gate::check(has, want).err()?;
        Some(error.to_string())
    };
    let back =
        "buffer: got memory that was lent and is given back, wanted memory that is still lent";
    let reading = "buffer: got memory that was lent for reading, wanted memory that may be written";
    for (has, want, says) in [
        (Access::Write, Access::Write, None),
        (Access::Write, Access::Read, None),
        (Access::Read, Access::Read, None),
        (Access::Read, Access::Write, Some(reading)),
        (Access::None, Access::Read, Some(back)),
        (Access::None, Access::Write, Some(back)),
    ] {
        assert_eq!(told(has, want).as_deref(), says, "{has:?}, {want:?}");
    }
}

#[test]
fn memory_that_cannot_be_lent_is_refused() {
    let values = [1f32; 6];
    let too_deep = [1; 7];
    assert!(lend(&values, &too_deep, Access::Read).is_err());
    for address in [0, values.as_ptr() as u64 + 1] {
        let memory = MemoryType::Host;
        // SAFETY: refused, so nobody looks there.
        let lent = unsafe {
            Buffer::lend(
                address,
                memory,
                DataType::F32,
                &[1],
                Access::Read,
                Arc::new(()),
            )
        };
        assert!(lent.unwrap_err().to_string().starts_with("address: got"));
    }
}
