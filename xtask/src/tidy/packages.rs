//! What every package has: the workspace's lints and licence, and an example where others are to depend on it.

use super::Problem;
use anyhow::{Context, Result};
use cargo_metadata::{MetadataCommand, TargetKind};
use std::{fs, path::Path};

/// What the rules need to know about a package.
#[derive(Clone, Debug)]
pub struct Package {
    pub name: String,
    /// Names, of every kind: normal, build and dev.
    pub dependencies: Vec<String>,
    pub library: bool,
    pub published: bool,
    pub examples: usize,
    pub manifest: String,
}

pub fn load(root: &Path) -> Result<Vec<Package>> {
    let metadata = MetadataCommand::new()
        .manifest_path(root.join("Cargo.toml"))
        .no_deps()
        .exec()?;
    let convert = |package: &cargo_metadata::Package| {
        let has = |kind: &TargetKind| {
            let of_kind = package.targets.iter().filter(|t| t.kind.contains(kind));
            of_kind.count()
        };
        Ok(Package {
            name: package.name.to_string(),
            dependencies: package
                .dependencies
                .iter()
                .map(|d| d.name.clone())
                .collect(),
            library: has(&TargetKind::Lib) > 0,
            published: package.publish.as_ref().is_none_or(|to| !to.is_empty()),
            examples: has(&TargetKind::Example),
            manifest: fs::read_to_string(&package.manifest_path)
                .with_context(|| package.manifest_path.to_string())?,
        })
    };
    metadata
        .workspace_packages()
        .into_iter()
        .map(convert)
        .collect()
}

pub fn check(packages: &[Package]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for package in packages {
        let mut tell = |what: &str| problems.push(Problem::new(&package.name, what));
        if package.library && package.published && package.examples == 0 {
            tell("has no example");
        }
        if !says(&package.manifest, "lints", "workspace") {
            tell("does not take the workspace's lints");
        }
        if !says(&package.manifest, "package", "license.workspace") {
            tell("does not take the workspace's license");
        }
        if !says(&package.manifest, "package", "rust-version.workspace") {
            tell("does not take the workspace's rust-version");
        }
    }
    problems
}

/// Whether `key = true` stands in `[table]` of a manifest.
fn says(manifest: &str, table: &str, key: &str) -> bool {
    let mut current = "";
    for line in manifest.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            current = name;
        } else if let Some((left, right)) = line.split_once('=')
            && (current, left.trim(), right.trim()) == (table, key, "true")
        {
            return true;
        }
    }
    false
}

#[cfg(test)]
impl Package {
    pub(super) fn sound() -> Self {
        Self {
            name: "brigade-plan".into(),
            dependencies: Vec::new(),
            library: true,
            published: true,
            examples: 1,
            manifest: "[package]\nlicense.workspace = true\nrust-version.workspace = true\n[lints]\nworkspace = true\n".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::lines;

    fn told(change: impl FnOnce(&mut Package)) -> String {
        let mut package = Package::sound();
        change(&mut package);
        lines(&check(&[package]))
    }

    #[test]
    fn a_sound_package_passes() {
        assert_eq!(told(|_| ()), "");
    }

    #[test]
    fn an_example_is_asked_of_published_libraries_only() {
        assert_eq!(told(|p| p.examples = 0), "brigade-plan: has no example");
        assert_eq!(told(|p| (p.examples, p.published) = (0, false)), "");
        assert_eq!(told(|p| (p.examples, p.library) = (0, false)), "");
    }

    #[test]
    fn lints_and_license_come_from_the_workspace() {
        let own = "[package]\nlicense = \"MIT\"\nrust-version.workspace = true\n[lints.rust]\nworkspace = true\n";
        assert_eq!(
            told(|p| p.manifest = own.into()),
            "brigade-plan: does not take the workspace's lints\nbrigade-plan: does not take the workspace's license"
        );
    }
}
