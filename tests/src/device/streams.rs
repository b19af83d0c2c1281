//! Streams, events and hooks: order within a stream, and between streams that wait for each other.

use super::alone;
use crate::{backend::Rank, check::expect_unsupported, faults::AMPLE, suite::Suite};
use brigade_device::DataType;
use rand::rngs::StdRng;
use std::sync::mpsc::channel;

/// Work of one stream that waits for another's event sees what came before it.
fn events(rank: &Rank, _: &mut StdRng) {
    let device = &rank.device;
    let other = device.stream(1).unwrap();
    assert!(rank.stream.same(&rank.stream.clone()));
    assert!(!rank.stream.same(&other));
    let mut a = rank.poisoned(DataType::U8, &[1 << 16]);
    let mut b = rank.poisoned(DataType::U8, &[1 << 16]);
    for i in 0..50u8 {
        device.fill(&rank.stream, a.view_mut(), i).unwrap();
        let filled = rank.stream.record().unwrap();
        other.wait(&filled).unwrap();
        device.copy(&other, b.view_mut(), a.view()).unwrap();
        let copied = other.record().unwrap();
        rank.stream.wait(&copied).unwrap();
        copied.sync(AMPLE).unwrap();
        assert!(copied.done().unwrap() && filled.done().unwrap());
        assert!(rank.raw(b.view()).iter().all(|&x| x == i));
    }
    other.sync(AMPLE).unwrap();
}

/// A hook runs once, after the work before it. One that panics keeps no other from running.
fn hooks(rank: &Rank, _: &mut StdRng) {
    let (tell, heard) = channel();
    let mut a = rank.poisoned(DataType::U8, &[1 << 16]);
    for i in 0..20 {
        rank.device.fill(&rank.stream, a.view_mut(), i).unwrap();
        if i == 7 {
            let panics = Box::new(|_| panic!("meant to happen, within a hook"));
            rank.stream.on_complete(panics).unwrap();
        }
        let tell = tell.clone();
        let hook = Box::new(move |result: brigade_device::Result<()>| {
            tell.send((i, result.is_ok())).unwrap();
        });
        rank.stream.on_complete(hook).unwrap();
    }
    rank.stream.sync(AMPLE).unwrap();
    drop(tell);
    let heard: Vec<_> = heard.iter().collect();
    assert_eq!(heard, (0..20).map(|i| (i, true)).collect::<Vec<_>>());
}

/// What cannot be part of a graph is refused while capturing.
fn capturing(rank: &Rank, _: &mut StdRng) {
    let graph = rank.device.capture(&rank.stream, &mut || {
        assert!(rank.stream.capturing());
        expect_unsupported(rank.stream.on_complete(Box::new(drop)), "a hook");
        Ok(())
    });
    let end = graph.unwrap().launch(&rank.stream).unwrap();
    end.sync(AMPLE).unwrap();
    assert!(!rank.stream.capturing());
}

pub(super) fn add(suite: &mut Suite) {
    alone(suite, "streams/events", events);
    alone(suite, "streams/hooks", hooks);
    alone(suite, "streams/capturing", capturing);
}
