//! What ranks tell each other between rounds, while nobody waits for it.

use crate::Deadline;
use parking_lot::{Condvar, Mutex};
use std::time::Duration;

/// Most words that lie unheard: whoever tells more breaks the protocol.
const MOST: usize = 1 << 14;

#[derive(Default)]
struct State {
    heard: Vec<(usize, Vec<u8>)>,
    woken: bool,
}

/// Words of other ranks, in the order in which each told them.
#[derive(Default)]
pub(crate) struct Words {
    state: Mutex<State>,
    changed: Condvar,
}

impl Words {
    /// The text is what is wrong.
    pub(crate) fn hear(&self, rank: usize, what: &[u8]) -> Result<(), String> {
        let mut state = self.state.lock();
        if state.heard.len() >= MOST {
            return Err(format!("it told more than {MOST} words that nobody heard"));
        }
        state.heard.push((rank, what.to_vec()));
        self.changed.notify_all();
        Ok(())
    }

    pub(crate) fn wake(&self) {
        self.state.lock().woken = true;
        self.changed.notify_all();
    }

    /// All that were heard; waits for some, or to be woken, but not longer than this.
    pub(crate) fn take(&self, within: Duration) -> Vec<(usize, Vec<u8>)> {
        let end = Deadline::after(within).end();
        let mut state = self.state.lock();
        while state.heard.is_empty() && !state.woken {
            if self.changed.wait_until(&mut state, end).timed_out() {
                break;
            }
        }
        state.woken = false;
        std::mem::take(&mut state.heard)
    }
}
