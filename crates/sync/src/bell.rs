//! Resting until something happens.
//!
//! One word counts what happened to a rank's memory in its upper half, and who rests in its lower half. A waiter takes the
//! count *before* it looks at what it waits for, however many words that are; its rest ends at once if anything happened
//! since. Whoever stores rings afterwards, and need only call the system if somebody rests. (An eventcount, as known from
//! folly and moodycamel, with both counts in one word, so that one atomic operation tells each side of the other.)

use std::time::Instant;

/// The word by which a rank is woken, and how the system lets a thread sleep on it.
pub trait Bell {
    /// Adds to the word, in one piece, and gives what it was (acquire and release).
    fn add(&self, n: u64) -> u64;

    /// Reads the word (acquire).
    fn get(&self) -> u64;

    /// Sleeps until [`wake`](Self::wake), unless the word's upper half is not `count` any more; to be decided in one piece
    /// with going to sleep. Ends at `until` at the latest, and may end at any time.
    fn sleep(&self, count: u32, until: Option<Instant>);

    /// Wakes all who sleep.
    fn wake(&self);

    /// Says that something happened. To be called after it did.
    fn ring(&self) {
        if self.add(ONE_EVENT) as u32 > 0 {
            self.wake();
        }
    }

    /// How often it rang, modulo 2^32.
    fn events(&self) -> u32 {
        (self.get() >> 32) as u32
    }

    /// Rests until it rings, or has rung since the `events` that were counted before.
    fn rest(&self, events: u32, until: Option<Instant>) {
        if (self.add(1) >> 32) as u32 == events {
            self.sleep(events, until);
        }
        self.add(1u64.wrapping_neg());
    }
}

/// The counts do not meet: the lower one never gets below 0, and the upper one runs out at the top.
const ONE_EVENT: u64 = 1 << 32;

/// A bell in memory that threads, and on Linux processes too, share.
#[cfg(target_os = "linux")]
pub(crate) mod shared {
    use super::Bell;
    use rustix::thread::futex;
    use std::{
        sync::atomic::{AtomicU32, AtomicU64, Ordering},
        time::Instant,
    };

    pub(crate) struct Shared<'a>(pub(crate) &'a AtomicU64);

    impl Shared<'_> {
        /// The half that the system compares. Only the system reads it alone.
        fn count(&self) -> &AtomicU32 {
            let halves: *const AtomicU32 = self.0.as_ptr().cast::<AtomicU32>().cast_const();
            // SAFETY: the word is 8 bytes of atomics, aligned, and lives as long as it is borrowed.
            unsafe { &*halves.add(usize::from(cfg!(target_endian = "little"))) }
        }
    }

    impl Bell for Shared<'_> {
        fn add(&self, n: u64) -> u64 {
            self.0.fetch_add(n, Ordering::AcqRel)
        }
        fn get(&self) -> u64 {
            self.0.load(Ordering::Acquire)
        }
        fn sleep(&self, count: u32, until: Option<Instant>) {
            let left = until.map(|u| u.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| left.try_into().ok());
            // Every way in which it may end is an end of the rest.
            let _ = futex::wait(self.count(), futex::Flags::empty(), count, left.as_ref());
        }
        fn wake(&self) {
            // It fails for addresses that are none.
            let _ = futex::wake(self.count(), futex::Flags::empty(), i32::MAX as u32);
        }
    }
}

/// A bell in memory that threads share.
#[cfg(not(target_os = "linux"))]
pub(crate) mod shared {
    use super::Bell;
    use parking_lot_core::{DEFAULT_PARK_TOKEN, DEFAULT_UNPARK_TOKEN, park, unpark_all};
    use std::{
        sync::atomic::{AtomicU64, Ordering},
        time::Instant,
    };

    pub(crate) struct Shared<'a>(pub(crate) &'a AtomicU64);

    impl Shared<'_> {
        fn key(&self) -> usize {
            self.0.as_ptr() as usize
        }
    }

    impl Bell for Shared<'_> {
        fn add(&self, n: u64) -> u64 {
            self.0.fetch_add(n, Ordering::AcqRel)
        }
        fn get(&self) -> u64 {
            self.0.load(Ordering::Acquire)
        }
        fn sleep(&self, count: u32, until: Option<Instant>) {
            let still = || self.events() == count;
            // SAFETY: the key is the address of a word that is borrowed, so no other user of the parking lot has it; the
            // closures neither panic nor call back into the parking lot. `still` runs under the lock that waking takes.
            unsafe {
                park(
                    self.key(),
                    still,
                    || {},
                    |_, _| {},
                    DEFAULT_PARK_TOKEN,
                    until,
                );
            }
        }
        fn wake(&self) {
            // SAFETY: as above.
            unsafe {
                unpark_all(self.key(), DEFAULT_UNPARK_TOKEN);
            }
        }
    }
}
