//! The page that sets our times beside others' is what it is made from.

use super::{Problem, Tree};
use crate::glance::{PAGE, page};

pub fn check(tree: &Tree) -> Vec<Problem> {
    let of = |path: &str| {
        let mut files = tree.under(path);
        let file = files.find(|(at, _)| *at == path);
        file.map(|(_, text)| text.to_owned())
    };
    if tree.under("docs/results/").next().is_none() {
        return Vec::new();
    }
    match page(of) {
        Ok(made) if of(PAGE).is_some_and(|there| there == made) => Vec::new(),
        Ok(_) => vec![Problem::new(
            PAGE,
            "is not what `cargo xtask glance` writes",
        )],
        Err(why) => vec![Problem::new(PAGE, format!("cannot be made: {why:#}"))],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        tidy::tests::{lines, tree},
        workspace::Workspace,
    };

    #[test]
    fn a_page_whose_files_are_gone_is_told() {
        assert_eq!(check(&tree(&[])), []);
        assert_eq!(
            lines(&check(&tree(&[("docs/results/a.json", "{}")]))),
            "docs/src/at_a_glance.md: cannot be made: cannot read docs/results/all-reduce.h200x4.json"
        );
    }

    #[test]
    fn a_page_that_is_not_of_these_files_is_told() {
        let mut tree = Tree::read(&Workspace::find().unwrap().root).unwrap();
        assert_eq!(check(&tree), []);
        let (_, text) = tree.files.iter_mut().find(|(at, _)| at == PAGE).unwrap();
        text.push('.');
        let stale = "docs/src/at_a_glance.md: is not what `cargo xtask glance` writes";
        assert_eq!(lines(&check(&tree)), stale);
        tree.files.retain(|(at, _)| at != PAGE);
        assert_eq!(lines(&check(&tree)), stale);
    }
}
