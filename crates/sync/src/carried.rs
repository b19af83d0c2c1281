//! Waiting for words that carry their own flag.

use crate::{Budget, Memory, Stop, Verdict, Wait, Word, wait};

/// Takes words in their order, each once `there` finds it to be there, and then waits for the `signature` that was posted
/// behind all of them. A signature of another call ends it at once.
///
/// The words themselves are read relaxed, since each says by itself whether it is new, and nothing else is concluded from
/// it. The signature is what orders: when it was seen, everything that its sender did before is over.
pub(crate) fn take<M: Memory + ?Sized, T>(
    memory: &M,
    words: impl Iterator<Item = Word>,
    there: impl Fn(u64) -> Option<T>,
    signature: Wait,
    budget: &mut (impl Budget + ?Sized),
    mut watch: impl FnMut() -> bool,
    mut sink: impl FnMut(T),
) -> Result<(), Stop> {
    for at in words {
        let mut spins = budget.spins();
        let value = loop {
            let events = memory.events(at.owner);
            if let Some(value) = there(memory.load_relaxed(at)) {
                break value;
            }
            if spins > 0 {
                spins -= 1;
                std::hint::spin_loop();
                continue;
            }
            let signed = memory.load(signature.word);
            if signature.want.verdict(signed) == Verdict::Mismatch {
                return Err(Stop::Mismatch { seen: signed });
            }
            if watch() {
                return Err(Stop::Interrupted);
            }
            if budget.spent() {
                return Err(Stop::Timeout { seen: signed });
            }
            // The signature, which is stored behind every word, wakes whoever rests on one of them.
            memory.rest(at.owner, events, budget.until());
        };
        sink(value);
    }
    wait(memory, signature, budget, watch)
}
