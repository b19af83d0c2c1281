//! The page that sets our times beside others' is what it is made from.

use super::{Problem, Tree};
use crate::glance::{PAGE, page};

pub fn check(tree: &Tree) -> Vec<Problem> {
    let of = |path: &str| {
        let mut files = tree.under(path);
        let file = files.find(|(at, _)| *at == path);
        file.map(|(_, text)| text.to_owned())
    };
    let Some(there) = of(PAGE) else {
        return Vec::new();
    };
    match page(of) {
        Ok(made) if made == there => Vec::new(),
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
    use crate::tidy::tests::{lines, tree};

    #[test]
    fn a_page_whose_files_are_gone_is_told() {
        assert_eq!(check(&tree(&[])), []);
        assert_eq!(
            lines(&check(&tree(&[(PAGE, "")]))),
            "docs/src/at_a_glance.md: cannot be made: there is no docs/results/all-reduce.h200x4.json"
        );
    }
}
