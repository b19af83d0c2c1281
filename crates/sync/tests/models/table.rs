//! A row of what is checked: that a machine holds, or that it does not when one of its guards is taken away.

use crate::{
    bell, explore,
    loomed::{self, Orders},
    shared::*,
};

/// The checker that goes through all interleavings.
pub const STATES: &str = "stateright";
/// The checker that goes through all weakly ordered executions.
pub const ORDER: &str = "loom";

type Check = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

/// A row of the table.
pub struct Row {
    pub machine: &'static str,
    /// What is claimed, or the guard.
    pub what: &'static str,
    /// What is done to the guard; nothing if all are there.
    pub mutation: Option<&'static str>,
    pub checker: &'static str,
    pub check: Check,
}

impl Row {
    /// A claim: nothing is taken away.
    pub fn holds(machine: &'static str, what: &'static str, (checker, check): By) -> Self {
        Self {
            machine,
            what,
            mutation: None,
            checker,
            check,
        }
    }

    /// A guard that is taken away.
    pub fn without(
        machine: &'static str,
        what: &'static str,
        mutation: &'static str,
        by: By,
    ) -> Self {
        Self {
            mutation: Some(mutation),
            ..Self::holds(machine, what, by)
        }
    }
}

/// A checker and what it does.
pub type By = (&'static str, Check);

/// Whether bounds are deepened.
pub fn deep<T>(short: T, long: T) -> T {
    if std::env::var("BRIGADE_MODELS").is_ok_and(|v| v == "long") {
        long
    } else {
        short
    }
}

/// All states.
pub fn states(scenario: impl Fn() -> Scenario + Send + Sync + 'static) -> By {
    (
        STATES,
        Box::new(move || explore::explore(scenario()).map(drop)),
    )
}

/// All states of each of these.
pub fn states_of(scenarios: impl Fn() -> Vec<Scenario> + Send + Sync + 'static) -> By {
    let check = move || {
        let mut all = scenarios().into_iter();
        all.try_for_each(|scenario| explore::explore(scenario).map(drop))
    };
    (STATES, Box::new(check))
}

/// All executions with so few preemptions.
pub fn executions(
    orders: Orders,
    preemptions: usize,
    scenario: impl Fn() -> Scenario + Send + Sync + 'static,
) -> By {
    let check = move || loomed::explore(scenario(), orders, preemptions);
    (ORDER, Box::new(check))
}

pub fn with(mut scenario: Scenario, change: impl FnOnce(&mut Scenario)) -> Scenario {
    change(&mut scenario);
    scenario
}

pub fn must_mismatch(scenario: Scenario) -> Scenario {
    with(scenario.with_abort(), |s| s.expect = Expect::Mismatch)
}

/// Packets in several uses, some of them short, one of them empty.
pub const USES: [(u32, usize); 4] = [(1, 2), (2, 1), (3, 0), (4, 2)];

/// Packets in uses that are all alike.
pub const ALIKE: [(u32, usize); 5] = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)];

/// Uses of packets whose tags come again.
pub const FAR: [(u32, usize); 5] = [
    (5, 1),
    (1 << 23, 0),
    ((1 << 23) + 1, 0),
    ((1 << 24) + 4, 0),
    ((1 << 24) + 5, 1),
];

/// Values pushed in several uses.
pub const LENGTHS: [usize; 6] = [4, 1, 0, 1, 4, 1];

/// The same for exchanges in two shots: shares of both ranks, of the first alone, of none.
pub const SHARES: [usize; 5] = [8, 1, 0, 8, 1];

/// Copies that are passed on: by each root, the first of them with the sentinel among its lanes; and a buffer used again by whoever was not
/// its root.
pub const RELAYS: [(usize, usize); 5] = [(0, 3), (1, 1), (2, 1), (1, 1), (0, 1)];

/// The bell, over all weakly ordered executions.
pub fn resting(waiters: usize, without: bell::Without) -> By {
    (ORDER, Box::new(move || bell::explore(waiters, without)))
}
