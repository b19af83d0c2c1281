//! The borrow rules of the vocabulary: what must not compile does not, with an error that says why; what must, does.

#[path = "borrows/pass/mod.rs"]
mod pass;

#[test]
fn borrows() {
    // Nothing of it is to run, so nothing that it needs is built, but only checked.
    trybuild::TestCases::new().compile_fail("tests/borrows/fail/*.rs");
}
