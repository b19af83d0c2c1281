//! The borrow rules of the vocabulary: what must not compile does not, with an error that says why; what must, does.

#[test]
fn borrows() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/borrows/fail/*.rs");
    cases.pass("tests/borrows/pass/*.rs");
}
