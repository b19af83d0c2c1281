//! The crews of a program: trials take one of their size, and leave it to the next if they pass.

use super::{
    KILLED,
    crew::{Answer, Crew},
};
use libtest_mimic::Failed;
use parking_lot::Mutex;
use std::{process::Command, time::Duration};

/// What starts a rank's process.
type Start = dyn Fn() -> Command + Send + Sync;

/// Crews that wait for a trial. As many of a size as there ever were trials of that size at a time.
pub(super) struct Crews {
    start: Box<Start>,
    /// Longest that a trial may take.
    limit: Duration,
    idle: Mutex<Vec<Crew>>,
}

impl Crews {
    /// None yet.
    pub(super) fn new(
        limit: Duration,
        start: impl Fn() -> Command + Send + Sync + 'static,
    ) -> Self {
        Self {
            start: Box::new(start),
            limit,
            idle: Mutex::default(),
        }
    }

    /// Runs a trial. A crew on which it did not pass, or of which ranks are killed, is no more.
    ///
    /// # Errors
    /// What is wrong, and what every rank printed.
    pub(super) fn run(&self, name: &str) -> Result<(), Failed> {
        let size = world(name)?;
        let deadly = is_deadly(name);
        let idle = if deadly { None } else { self.take(size) };
        let mut crew = match idle {
            Some(crew) => crew,
            None => Crew::start(size, &self.start)?,
        };
        let answers = crew.run(name, self.limit);
        let passed = answers.iter().all(|&a| a == Answer::Passed);
        if passed && !deadly {
            self.idle.lock().push(crew);
            return Ok(());
        }
        let is_fine = |&a: &Answer| a == Answer::Passed || deadly && a == Answer::Ended;
        let forced = !answers.iter().all(is_fine);
        if forced {
            crew.kill(&answers);
        } else {
            crew.dismiss();
        }
        let remains = crew.end();
        let wrong = remains.wrong(&answers, deadly, forced);
        if wrong.is_empty() {
            return Ok(());
        }
        Err(format!("{}\n{}", wrong.join("\n"), remains.printed(false)).into())
    }

    fn take(&self, size: usize) -> Option<Crew> {
        let mut idle = self.idle.lock();
        let found = idle.iter().position(|crew| crew.size() == size)?;
        Some(idle.swap_remove(found))
    }

    /// Ends the crews that wait.
    ///
    /// # Errors
    /// What is wrong with how they ended, and all that their ranks ever printed.
    pub(super) fn end(&self) -> Result<(), String> {
        let mut idle = std::mem::take(&mut *self.idle.lock());
        idle.iter_mut().for_each(Crew::dismiss);
        let mut text = String::new();
        for crew in idle {
            let passed = vec![Answer::Passed; crew.size()];
            let remains = crew.end();
            let wrong = remains.wrong(&passed, false, false);
            if !wrong.is_empty() {
                text += &format!("{}\n{}", wrong.join("\n"), remains.printed(true));
            }
        }
        if text.is_empty() { Ok(()) } else { Err(text) }
    }
}

/// Whether a trial is one of those whose ranks are killed. They have processes of their own, which have run nothing else: such a
/// rank looks for all that groups take of its process, and expects that there is no more of it. All others make their own devices,
/// communicators and groups, and drop them.
fn is_deadly(name: &str) -> bool {
    name.contains(&format!("/{KILLED}/"))
}

/// The group's size, as the trial's name says it.
fn world(name: &str) -> Result<usize, Failed> {
    let size = name.split('/').nth(1).and_then(|w| w.strip_prefix('w'));
    let size = size.and_then(|n| n.parse().ok());
    size.ok_or_else(|| Failed::from(format!("{name} does not say how many ranks it has")))
}

pub(crate) mod tests {
    use super::*;
    use crate::own::{Case, cases};
    use std::process::Stdio;

    pub(crate) const ALL: &[Case] = cases![
        a_crew_runs_one_trial_after_the_other_whatever_their_names,
        a_crew_whose_trial_did_not_pass_is_not_used_again,
        a_crew_of_which_a_rank_died_between_trials_fails_the_next,
        who_is_to_be_killed_is_and_has_new_processes,
        how_processes_end_after_their_trials_is_noticed,
        a_trial_without_a_size_or_a_program_is_an_error,
    ];

    /// A rank that does what the trial's name says, if it is rank 1 where that is nothing good.
    const RANK: &str = r#"
        old=
        while read -r line; do
            echo "words of rank $RANK"
            case "$RANK $line" in
                "1 "*fails*) printf 'failed %s\n' "$line" ;;
                "1 "*ends*) exit 0 ;;
                "1 "*dies*) kill -9 $$ ;;
                "1 "*silent*) ;;
                "1 "*forgets*) printf 'passed %s\n' "$old" ;;
                *) printf 'passed %s\n' "$line" ;;
            esac
            old=$line
        done
        case "$old" in *badly*) exit $((3 + RANK)) ;; esac
    "#;

    const LONG: Duration = Duration::from_secs(30);

    fn crews(limit: Duration) -> Crews {
        Crews::new(limit, || {
            let mut command = Command::new("sh");
            command.args(["-c", RANK]).stderr(Stdio::inherit());
            command
        })
    }

    /// The processes of the crews that wait.
    fn idle(crews: &Crews) -> Vec<Vec<u32>> {
        crews.idle.lock().iter_mut().map(Crew::ids).collect()
    }

    fn failure(crews: &Crews, name: &str) -> String {
        let failed = crews.run(name).unwrap_err();
        failed.message().unwrap().to_owned()
    }

    fn a_crew_runs_one_trial_after_the_other_whatever_their_names() {
        let crews = crews(LONG);
        crews.run("a/w2/first").unwrap();
        let first = idle(&crews);
        for name in [
            "a/w2/second",
            "a/w2/odd \"name\" \\n 'of'\n$HOME `ls` é",
            "a/w2/first",
        ] {
            crews.run(name).unwrap();
            assert_eq!(idle(&crews), first, "{name}");
        }
        crews.run("a/w3/third").unwrap();
        let sizes: Vec<_> = idle(&crews).iter().map(Vec::len).collect();
        assert_eq!(sizes, [2, 3]);
        crews.end().unwrap();
        assert!(idle(&crews).is_empty());
    }

    fn a_crew_whose_trial_did_not_pass_is_not_used_again() {
        let short = Duration::from_secs(1);
        for (name, limit, what) in [
            ("fails", LONG, "rank 1 of 2: failed"),
            (
                "ends",
                LONG,
                "rank 1 of 2: ended in the trial, with exit status: 0",
            ),
            (
                "dies",
                LONG,
                "rank 1 of 2: ended in the trial, with signal: 9 (SIGKILL)",
            ),
            (
                "silent",
                short,
                "rank 1 of 2: was not through with the trial in time",
            ),
            (
                "forgets",
                short,
                "rank 1 of 2: was not through with the trial in time",
            ),
        ] {
            let mut crews = crews(LONG);
            crews.run("a/w2/good").unwrap();
            let before = idle(&crews);
            crews.limit = limit;
            let text = failure(&crews, &format!("a/w2/{name}"));
            let lines: Vec<_> = text.lines().collect();
            assert_eq!(lines[0], what, "{name}: {text}");
            let words = lines
                .iter()
                .filter(|line| line.starts_with("words of rank"));
            // Of this trial, and of no other.
            assert_eq!(words.count(), 2, "{name}: {text}");
            assert!(idle(&crews).is_empty(), "{name}");
            crews.limit = LONG;
            crews.run("a/w2/good").unwrap();
            assert_ne!(idle(&crews), before, "{name}");
            crews.end().unwrap();
        }
    }

    fn a_crew_of_which_a_rank_died_between_trials_fails_the_next() {
        let crews = crews(LONG);
        crews.run("a/w2/good").unwrap();
        crews.idle.lock()[0].kill(&[Answer::Ended, Answer::Late]);
        let text = failure(&crews, "a/w2/good");
        let what = "rank 1 of 2: ended in the trial, with signal: 9 (SIGKILL)\n";
        assert!(text.starts_with(what), "{text}");
        assert!(idle(&crews).is_empty());
    }

    fn who_is_to_be_killed_is_and_has_new_processes() {
        let crews = crews(LONG);
        crews.run("a/w2/good").unwrap();
        let before = idle(&crews);
        crews.run("a/w2/killed/dies").unwrap();
        assert_eq!(idle(&crews), before);
        for (name, what) in [
            ("killed/good", "no rank was killed"),
            (
                "killed/ends",
                "rank 1 of 2: ended in the trial, with exit status: 0",
            ),
            ("killed/fails", "rank 1 of 2: failed"),
        ] {
            let text = failure(&crews, &format!("a/w2/{name}"));
            assert!(text.starts_with(what), "{name}: {text}");
        }
        assert_eq!(idle(&crews), before);
    }

    fn how_processes_end_after_their_trials_is_noticed() {
        let crews = crews(LONG);
        crews.run("a/w2/badly").unwrap();
        let text = crews.end().unwrap_err();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines[..2],
            [
                "rank 0 of 2: its process ended with exit status: 3",
                "rank 1 of 2: its process ended with exit status: 4"
            ]
        );
        assert!(text.contains("words of rank 1"), "{text}");
    }

    fn a_trial_without_a_size_or_a_program_is_an_error() {
        assert!(failure(&crews(LONG), "a/b/c").contains("how many ranks"));
        let none = Crews::new(LONG, || Command::new("/no/such/program"));
        assert!(failure(&none, "a/w2/c").contains("start a rank's process"));
    }
}
