//! How the ranks of a crew are given one trial after the other: each reads a line that names it, runs it, and prints that line
//! with the result in front. Whatever else it prints belongs to the trial.

use super::beside;
use brigade_group::TcpConfig;
use libtest_mimic::Failed;
use std::{
    io::{self, BufRead, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::channel,
    },
    thread,
};

/// One trial of a crew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// Which one of the crew's: 1 is the first. So no answer of an earlier one counts.
    pub(super) number: u64,
    /// The trial's name.
    pub(super) name: String,
}

const PASSED: &str = "passed";
const FAILED: &str = "failed";

impl Turn {
    /// What a rank reads.
    pub(super) fn line(&self) -> String {
        serde_json::json!([self.number, self.name]).to_string()
    }

    fn read(line: &str) -> io::Result<Self> {
        let (number, name) = serde_json::from_str(line)?;
        Ok(Self { number, name })
    }

    /// Whether the trial passed, if a line that a rank printed says so or not.
    pub(super) fn answer(&self, printed: &[u8]) -> Option<bool> {
        let (word, line) = str::from_utf8(printed).ok()?.trim_end().split_once(' ')?;
        let passed = match word {
            PASSED => true,
            FAILED => false,
            _ => return None,
        };
        (line == self.line()).then_some(passed)
    }
}

/// Runs trials as a rank of a crew, until there are no more lines. Each has a place of its own to meet, so that it finds nothing of
/// one before it. If the lines end during a trial, nobody waits for its result: then `abandoned` is called, from another thread.
///
/// # Errors
/// A line that is no trial; an output that cannot be written to.
pub(super) fn serve(
    config: &TcpConfig,
    input: impl BufRead + Send + 'static,
    mut output: impl Write,
    abandoned: impl FnOnce() + Send + 'static,
    run: impl Fn(TcpConfig, &str) -> Result<(), Failed>,
) -> io::Result<()> {
    let (tell, told) = channel();
    let busy = Arc::new(AtomicBool::new(false));
    let running = Arc::clone(&busy);
    let listen = move || {
        for line in input.lines().map_while(Result::ok) {
            running.store(true, Ordering::SeqCst);
            if tell.send(line).is_err() {
                return;
            }
        }
        if running.load(Ordering::SeqCst) {
            abandoned();
        }
    };
    thread::Builder::new().name("turns".into()).spawn(listen)?;
    for line in told {
        let turn = Turn::read(&line)?;
        let place = TcpConfig {
            address: beside(config, &format!("turn-{}", turn.number)),
            ..config.clone()
        };
        let result = run(place, &turn.name);
        // Whoever has the answer may end the lines.
        busy.store(false, Ordering::SeqCst);
        let word = match result {
            Ok(()) => PASSED,
            Err(failed) => {
                writeln!(output, "{}", failed.message().unwrap_or("failed"))?;
                FAILED
            }
        };
        // In one piece, and at the beginning of a line, whatever other threads have printed.
        output.write_all(format!("\n{word} {}\n", turn.line()).as_bytes())?;
        output.flush()?;
    }
    Ok(())
}

pub(crate) mod tests {
    use super::*;
    use crate::own::{Case, cases};
    use brigade_group::Address;
    use parking_lot::Mutex;
    use std::{
        io::{BufReader, PipeWriter},
        time::Duration,
    };

    pub(crate) const ALL: &[Case] = cases![
        any_name_is_one_line,
        only_this_turns_line_is_an_answer,
        every_trial_is_answered_and_has_a_place_of_its_own,
        what_is_no_trial_is_an_error,
        a_rank_is_abandoned_in_a_trial_and_not_after_it,
    ];

    const LONG: Duration = Duration::from_secs(30);

    fn config() -> TcpConfig {
        TcpConfig::new(1, 2, Address::Unix("/somewhere/rank0".into()))
    }

    fn turn(number: u64, name: &str) -> Turn {
        let name = name.to_owned();
        Turn { number, name }
    }

    fn any_name_is_one_line() {
        for name in [
            "",
            "a/w2/b",
            "a b\n\"c\" \\n $HOME `d` passed [1,\"e\"]",
            "ä\u{0}\r",
        ] {
            let asked = turn(7, name);
            assert!(!asked.line().contains(['\n', '\r']), "{name:?}");
            assert_eq!(Turn::read(&asked.line()).unwrap(), asked);
            for (word, passed) in [(PASSED, true), (FAILED, false)] {
                let printed = format!("{word} {}\n", asked.line());
                assert_eq!(asked.answer(printed.as_bytes()), Some(passed), "{name:?}");
            }
        }
    }

    fn only_this_turns_line_is_an_answer() {
        let asked = turn(2, "a/w2/b");
        for other in [turn(1, "a/w2/b"), turn(2, "a/w2/c")] {
            let printed = format!("{PASSED} {}\n", other.line());
            assert_eq!(asked.answer(printed.as_bytes()), None);
        }
        for printed in [
            "",
            "passed",
            "fine [2,\"a/w2/b\"]",
            "[2,\"a/w2/b\"]",
            "passed \u{fffd}",
        ] {
            assert_eq!(asked.answer(printed.as_bytes()), None, "{printed}");
        }
        assert_eq!(asked.answer(b"passed \xff"), None);
    }

    fn every_trial_is_answered_and_has_a_place_of_its_own() {
        let (good, bad) = (turn(1, "good"), turn(2, "bad"));
        let input = format!("{}\n{}\n", good.line(), bad.line());
        let mut output = Vec::new();
        let places = Mutex::new(Vec::new());
        // The input is at its end before the first trial runs.
        let abandoned = || ();
        serve(
            &config(),
            io::Cursor::new(input),
            &mut output,
            abandoned,
            |place, name| {
                assert_eq!((place.rank, place.size), (1, 2));
                places.lock().push(place.address.to_string());
                match name {
                    "good" => Ok(()),
                    _ => Err("some words".into()),
                }
            },
        )
        .unwrap();
        let [first, second] = &places.into_inner()[..] else {
            panic!("not two trials");
        };
        assert_ne!(first, second);
        let printed = String::from_utf8(output).unwrap();
        let answers = |turn: &Turn| -> Vec<_> {
            let lines = printed.lines();
            lines
                .filter_map(|line| turn.answer(line.as_bytes()))
                .collect()
        };
        assert_eq!((answers(&good), answers(&bad)), (vec![true], vec![false]));
        assert!(printed.contains("some words\n"), "{printed}");
    }

    fn what_is_no_trial_is_an_error() {
        let input = io::Cursor::new("surprise\n");
        let run = |_, _: &str| panic!("there is nothing to run");
        assert!(serve(&config(), input, io::sink(), || (), run).is_err());
    }

    /// The end of a rank's lines, when it has given its answer.
    struct LastAnswer<'a>(&'a Mutex<Option<PipeWriter>>);

    impl Write for LastAnswer<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            *self.0.lock() = None;
            Ok(())
        }
    }

    /// Whether a rank is abandoned whose lines end while it is in a trial, or with the answer.
    fn is_abandoned(during: bool) -> bool {
        let (reader, mut writer) = io::pipe().unwrap();
        writeln!(writer, "{}", turn(1, "a").line()).unwrap();
        let lines = Mutex::new(Some(writer));
        let (tell, told) = channel();
        let abandoned = move || tell.send(()).unwrap();
        let heard = AtomicBool::new(false);
        let run = |_, _: &str| {
            if during {
                *lines.lock() = None;
                heard.store(told.recv_timeout(LONG).is_ok(), Ordering::Relaxed);
            }
            Ok(())
        };
        let input = BufReader::new(reader);
        serve(&config(), input, LastAnswer(&lines), abandoned, run).unwrap();
        heard.into_inner() || told.recv_timeout(LONG).is_ok()
    }

    fn a_rank_is_abandoned_in_a_trial_and_not_after_it() {
        assert!(is_abandoned(true));
        assert!(!is_abandoned(false));
    }
}
