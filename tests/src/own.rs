//! Tests of the suite itself. They are trials of a program that is linked with it: as unit tests they would have all of it compiled
//! once more.

use libtest_mimic::Trial;

/// A test and its name.
pub(crate) type Case = (&'static str, fn());

/// These functions as cases. One that is left out is dead code, which is denied.
macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        &[$((stringify!($name), $name)),*]
    };
}
pub(crate) use cases;

/// All of them.
pub fn own() -> Vec<Trial> {
    let all: &[(&str, &[Case])] = &[
        ("cuda", crate::cuda::tests::ALL),
        #[cfg(target_os = "linux")]
        ("crews", crate::processes::crews::tests::ALL),
        #[cfg(target_os = "linux")]
        ("processes_on_gpus", crate::processes::cuda::tests::ALL),
        #[cfg(target_os = "linux")]
        ("turns", crate::processes::turn::tests::ALL),
    ];
    let trial = |of: &str, (name, test): Case| {
        Trial::test(format!("{of}/{name}"), move || {
            test();
            Ok(())
        })
    };
    all.iter()
        .flat_map(|(of, cases)| cases.iter().map(move |&case| trial(of, case)))
        .collect()
}
