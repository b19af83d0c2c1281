//! Hooks and points of fault injection.

use brigade_device::{Action, Injector, Point, Step};
use std::{collections::BTreeSet, sync::Arc};

#[test]
fn a_hook_equals_itself_and_no_other() {
    let make = || Injector::new(Arc::new(|_: &Step| Action::Drop));
    let hook = make();
    assert_eq!(hook, hook.clone());
    assert_ne!(hook, make());
}

#[test]
fn points_have_names_of_their_own() {
    let names: BTreeSet<_> = Point::ALL.map(Point::name).into();
    assert_eq!(names.len(), Point::ALL.len());
}

#[test]
fn posts_are_what_can_be_dropped() {
    let posts: Vec<_> = Point::ALL.into_iter().filter(|p| p.is_post()).collect();
    assert_eq!(posts, [Point::Arrive, Point::Announce, Point::Done]);
}
