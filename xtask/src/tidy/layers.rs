//! The dependency rule: who may depend on whom inside the workspace.

use super::{Problem, packages::Package};

/// The whole rule, lowest first. What is not listed is forbidden, in dev-dependencies too: tests of a lower crate that need a
/// higher one belong to the higher one. Host and CUDA never see each other.
const ALLOWED: &[(&str, &[&str])] = &[
    ("brigade-device", &[]),
    ("brigade-kernels", &[]),
    ("brigade-plan", &["brigade-device"]),
    ("brigade-sync", &["brigade-device"]),
    ("brigade-group", &["brigade-device", "brigade-sync"]),
    (
        "brigade-host",
        &[
            "brigade-device",
            "brigade-plan",
            "brigade-sync",
            "brigade-group",
        ],
    ),
    (
        "brigade-cuda",
        &[
            "brigade-device",
            "brigade-plan",
            "brigade-sync",
            "brigade-group",
            "brigade-kernels",
        ],
    ),
    (
        "brigade",
        &[
            "brigade-device",
            "brigade-plan",
            "brigade-group",
            "brigade-host",
            "brigade-cuda",
        ],
    ),
    ("brigade-candle", &["brigade"]),
    ("brigade-perf", &["brigade", "brigade-candle"]),
    ("brigade-demo", &["brigade", "brigade-candle"]),
    // Tests and benchmarks stand above everything and may look inside.
    ("brigade-conformance", LIBRARIES),
    (
        "brigade-benches",
        &[
            "brigade-device",
            "brigade-group",
            "brigade-host",
            "brigade-plan",
            "brigade",
            "brigade-demo",
        ],
    ),
    ("xtask", &[]),
];

const LIBRARIES: &[&str] = &[
    "brigade-device",
    "brigade-kernels",
    "brigade-plan",
    "brigade-sync",
    "brigade-group",
    "brigade-host",
    "brigade-cuda",
    "brigade",
];

pub fn check(packages: &[Package]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for package in packages {
        let row = ALLOWED.iter().find(|(name, _)| *name == package.name);
        let Some((_, allowed)) = row else {
            let what = "is not in the table of allowed dependencies (xtask/src/tidy/layers.rs)";
            problems.push(Problem::new(&package.name, what));
            continue;
        };
        let inside = |name: &&String| packages.iter().any(|p| p.name == **name);
        for dependency in package.dependencies.iter().filter(inside) {
            if !allowed.contains(&dependency.as_str()) {
                let what = format!("must not depend on {dependency}");
                problems.push(Problem::new(&package.name, what));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::lines;

    fn package(name: &str, dependencies: &[&str]) -> Package {
        Package {
            name: name.into(),
            dependencies: dependencies.iter().map(|d| (*d).to_owned()).collect(),
            ..Package::sound()
        }
    }

    fn told(packages: &[(&str, &[&str])]) -> String {
        let packages: Vec<_> = packages.iter().map(|(n, d)| package(n, d)).collect();
        lines(&check(&packages))
    }

    #[test]
    fn the_table_itself_points_downwards() {
        for (i, (name, allowed)) in ALLOWED.iter().enumerate() {
            for lower in *allowed {
                let at = ALLOWED.iter().position(|(n, _)| n == lower);
                assert!(at.is_some_and(|at| at < i), "{name} -> {lower}");
            }
        }
    }

    #[test]
    fn the_whole_table_passes() {
        let packages: Vec<_> = ALLOWED.iter().map(|(n, d)| package(n, d)).collect();
        assert_eq!(check(&packages), []);
    }

    #[test]
    fn host_and_cuda_never_see_each_other() {
        let both: [(&str, &[&str]); 2] = [
            ("brigade-host", &["brigade-cuda"]),
            ("brigade-cuda", &["brigade-host"]),
        ];
        assert_eq!(
            told(&both),
            "brigade-host: must not depend on brigade-cuda\nbrigade-cuda: must not depend on brigade-host"
        );
    }

    #[test]
    fn nothing_points_up_and_nobody_is_left_out() {
        let up: [(&str, &[&str]); 2] =
            [("brigade-device", &["brigade-plan"]), ("brigade-plan", &[])];
        assert_eq!(told(&up), "brigade-device: must not depend on brigade-plan");
        assert!(told(&[("brigade-new", &[])]).starts_with("brigade-new: is not in the table"));
        assert_eq!(told(&[("brigade-plan", &["serde"])]), "");
    }
}
