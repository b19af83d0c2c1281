//! By which transport rows travel quickest to experts and back: all of them in turn, over numbers of tokens and budgets.

mod verdict;

use super::{Choice, Moe, Payload, Rows, among::Among, case::Case, expected};
use crate::{
    Common,
    machines::Sockets,
    meta,
    ranks::{Rank, Ranks},
    rounded,
    sample::{Variant, measure},
    sizes,
};
use anyhow::{Result, ensure};
use brigade::{
    Arrangement, Call, CombineCall, CombineSum, DataType, DispatchCall, Error, PerRank,
    PlacementCall, ReceivedIds, Transport,
    plan::{
        crossover::Source,
        experts::{arriving_bytes, need},
        transports::{self, Entry},
        tuned::Versions,
    },
};
use clap::Args;
use serde_json::{Value, json};
use std::path::PathBuf;
use verdict::{Point, Verdict};

/// What is compared, in the order of [`Point::us`].
const CANDIDATES: [(Choice, &str); 6] = [
    (Choice::Pushed, "pushed"),
    (Choice::OneSided, "one-sided"),
    (Choice::InPlace, "in-place"),
    (Choice::Gather, "gather"),
    (Choice::Fifo, "fifo"),
    (Choice::PushedBack, "pushed-back"),
];

/// What is measured.
#[derive(Clone, Debug, Args)]
pub struct Tune {
    /// Ranks, a GPU each [default: all GPUs]
    #[arg(short = 'w', long, value_name = "RANKS")]
    ranks: Option<usize>,
    /// Make each rank a process instead of a thread, as torchrun does
    #[arg(long)]
    processes: bool,
    /// Rounds that are measured
    #[arg(short = 'n', long, default_value_t = 20, value_parser = sizes::at_least_one)]
    rounds: usize,
    /// Calls in a round, one after the other, in a graph
    #[arg(long, default_value_t = 5, value_parser = sizes::at_least_one)]
    calls: usize,
    /// Tokens of each rank
    #[arg(long, num_args = 1.., value_delimiter = ',', default_values_t = [1, 8, 32, 128, 256, 512, 1024, 2048, 4096, 8192])]
    tokens: Vec<usize>,
    /// Columns
    #[arg(long, default_value_t = 7168)]
    hidden: usize,
    /// Experts over all ranks
    #[arg(long, default_value_t = 256)]
    experts: usize,
    /// Experts of a token
    #[arg(short, long, default_value_t = 8)]
    k: usize,
    /// Cast rows to fp8 on the way there: the entry will hold for those
    #[arg(long)]
    fp8: bool,
    /// Budgets of multiprocessors within which what plans take by themselves is compared
    #[arg(long, value_name = "SMS", num_args = 0.., default_values_t = [8, 24, 64])]
    budgets: Vec<u16>,
    /// Rows of a sender at a time that are compared for the most tokens, one-sided; no more than the plan's
    #[arg(long, value_name = "ROWS", num_args = 0.., default_values_t = [256, 512, 1024])]
    rows_at_a_time: Vec<usize>,
    /// Write the entry to this file
    #[arg(long, value_name = "FILE")]
    entry: Option<PathBuf>,
    /// Write rows and raw samples to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// All that was measured.
struct Measured {
    /// With all multiprocessors, for each number of tokens.
    all: Vec<Point>,
    /// Within each budget.
    budgets: Vec<(u16, Vec<Point>)>,
    /// With so many rows at a time.
    rows: Vec<(usize, f64)>,
}

impl Tune {
    pub fn common(&self) -> Common {
        Common {
            ranks: self.ranks,
            processes: self.processes,
            rounds: self.rounds,
            calls: self.calls,
            graph: true,
            // What is wrong is no candidate.
            check: true,
            shared: false,
            serial: false,
            table: Vec::new(),
            vs: None,
            json: self.json.clone(),
        }
    }

    fn moe(&self, transport: Choice, sm_budget: Option<u16>) -> Moe {
        Moe {
            common: self.common(),
            tokens: Vec::new(),
            hidden: self.hidden,
            experts: self.experts,
            k: self.k,
            rows: Some(Rows::BySource),
            machines: None,
            sockets: Sockets::default(),
            fp8: self.fp8,
            transport,
            by_rank: false,
            back: Payload::AsIs,
            count: false,
            sm_budget,
            wire_gb_per_s: None,
            trace: None,
        }
    }

    /// The dispatch that is measured, as plans see it.
    fn call(&self, max_tokens: usize, choice: Option<Transport>) -> Call {
        Call::Dispatch(DispatchCall {
            max_tokens,
            hidden: self.hidden,
            dtype: DataType::BF16,
            beside_bytes: PerRank::new(),
            k: self.k,
            weights: true,
            placement: PlacementCall::Even {
                experts: self.experts,
            },
            arrangement: Arrangement::BySource,
            max_recv: None,
            received_ids: ReceivedIds::Local,
            again: false,
            gathered: false,
            cast: self.moe(Choice::Auto, None).cast(),
            choice,
        })
    }

    /// The combine that is measured.
    fn back(&self, max_tokens: usize) -> Call {
        Call::Combine(CombineCall {
            max_tokens,
            hidden: self.hidden,
            dtype: DataType::BF16,
            output: DataType::BF16,
            k: self.k,
            arrangement: Arrangement::BySource,
            sum: CombineSum::Rank,
            weights: false,
            choice: None,
        })
    }

    /// Times there and back of some candidates, each seen to be right first; nothing of those that cannot be.
    fn point(
        &self,
        rank: &Rank,
        tokens: usize,
        candidates: &[(Choice, &'static str)],
        (sm_budget, rows): (Option<u16>, Option<usize>),
    ) -> Result<Point> {
        let size = rank.size();
        let options: Vec<_> = candidates
            .iter()
            .map(|(choice, _)| self.moe(*choice, sm_budget))
            .collect();
        let mut config = self.moe(Choice::Auto, sm_budget).config(tokens, size);
        if let Some(rows) = rows {
            // A half that holds just so many.
            let call = self.call(rows, Some(Transport::OneSided));
            config.dispatch_bytes = need(&call, size)?.bytes;
        }
        let among = Among::Ranks(rank.join(&config)?);
        let cases = options
            .iter()
            .map(|options| Case::new(rank, &among, options, tokens))
            .collect::<Result<Vec<_>>>()?;
        let mut variants = Vec::new();
        for (case, (_, name)) in cases.iter().zip(candidates) {
            // A plan is the same on all ranks, and so is its refusal.
            match expected::check(case) {
                Err(e) if matches!(e.downcast_ref(), Some(Error::Unsupported(_))) => continue,
                checked => rank.agree(checked)?,
            }
            let made = case.made()?;
            let how = (self.calls, true);
            variants.push(Variant::new(rank, name, how, move || case.timed(&made))?);
        }
        let times = measure(rank, &mut variants, self.rounds)?;
        drop(variants);
        among.check()?;
        // Nobody leaves the communicator while another still works in it.
        rank.meet()?;
        let bytes = arriving_bytes(&self.call(tokens, None), size)?;
        let mut point = Point::new(tokens, (bytes, arriving_bytes(&self.back(tokens), size)?));
        for times in times {
            let found = CANDIDATES.iter().position(|(_, name)| *name == times.name);
            if let Some(at) = found {
                point.us[at] = Some(times.median);
                point.samples[at] = times.samples;
            }
        }
        Ok(point)
    }

    fn measure(&self, rank: &Rank) -> Result<Measured> {
        let points = |tokens: &[usize], candidates: &[(Choice, &'static str)], budget| {
            let one = |&n: &usize| self.point(rank, n, candidates, (budget, None));
            tokens.iter().map(one).collect::<Result<Vec<_>>>()
        };
        let all = points(&self.tokens, &CANDIDATES, None)?;
        let pushed = all.iter().filter(|p| p.us[0].is_some());
        let few: Vec<usize> = pushed.map(|p| p.tokens).collect();
        let planned = [CANDIDATES[0], CANDIDATES[1], CANDIDATES[5]];
        let within = |&sms: &u16| Ok((sms, points(&few, &planned, Some(sms))?));
        let budgets = self.budgets.iter().map(within).collect::<Result<_>>()?;
        let most = self.tokens.iter().copied().max().unwrap_or(0);
        let mut rows = Vec::new();
        for &at_a_time in self.rows_at_a_time.iter().filter(|&&n| n < most) {
            let how = (None, Some(at_a_time));
            let point = self.point(rank, most, &CANDIDATES[1..2], how)?;
            rows.extend(point.us[1].map(|us| (at_a_time, us)));
        }
        Ok(Measured { all, budgets, rows })
    }

    /// What was measured, as `tables/experts.json` of brigade-plan has it.
    fn written(&self, meta: &Value, ranks: usize, verdict: &Verdict) -> Result<Entry> {
        let text = |name: &str| meta[name].as_str().unwrap_or("unknown").to_owned();
        let budgets: Vec<_> = self.budgets.iter().map(u16::to_string).collect();
        let rows: Vec<_> = self.rows_at_a_time.iter().map(usize::to_string).collect();
        let note = format!(
            "there and back, rows by source, {} of {} experts; medians of {} rounds of graphs, every result compared first; \
             budgets {}; rows at a time {}",
            self.k,
            self.experts,
            self.rounds,
            budgets.join(" "),
            rows.join(" "),
        );
        Ok(Entry {
            gpu: text("gpu"),
            links: serde_json::from_value(meta["link"].clone())?,
            ranks,
            rows: Some(match self.fp8 {
                true => transports::Rows::Fp8,
                false => transports::Rows::Plain,
            }),
            push_max_bytes: verdict.push_max_bytes,
            // What goes back is never cast, and goes by the figures of rows as they are.
            push_back_max_bytes: (!self.fp8).then_some(verdict.push_back_max_bytes),
            push_max_bytes_per_sm: verdict.push_max_bytes_per_sm,
            rows_at_a_time: verdict.rows_at_a_time,
            others: verdict.others.clone(),
            measured: transports::Measured {
                from_tokens: self.tokens.iter().copied().min().unwrap_or(0),
                to_tokens: self.tokens.iter().copied().max().unwrap_or(0),
                hidden: self.hidden,
            },
            versions: Versions {
                driver: text("driver"),
                cuda: text("cuda"),
                nccl: meta["nccl"].as_str().map(str::to_owned),
            },
            source: Source {
                command: text("command"),
                date: text("date"),
                commit: text("commit"),
                note: Some(note),
            },
        })
    }

    /// A row for each candidate and number of tokens.
    fn rows(&self, points: &[Point], sm_budget: Option<u16>) -> Vec<Value> {
        let row = |point: &Point, at: usize| {
            let us = point.us[at]?;
            Some(json!({
                "tokens": point.tokens, "hidden": self.hidden, "k": self.k, "experts": self.experts,
                "dtype": if self.fp8 { "fp8 there, bf16 back" } else { "bf16" },
                "bytes": point.bytes, "choice": CANDIDATES[at].1, "sm_budget": sm_budget, "graph": true,
                "us": rounded(us), "samples": point.samples[at].iter().map(|&s| rounded(s)).collect::<Vec<_>>(),
            }))
        };
        let of = |point| (0..CANDIDATES.len()).filter_map(move |at| row(point, at));
        points.iter().flat_map(of).collect()
    }
}

/// Measures; gives a table, and what it comes to.
pub fn run(tune: &Tune, ranks: &Ranks) -> Result<String> {
    ensure!(ranks.size() > 1, "there must be two ranks");
    ensure!(
        !tune.tokens.is_empty() && !tune.tokens.contains(&0),
        "there must be a token on each rank"
    );
    ensure!(
        tune.k > 0 && tune.k <= tune.experts,
        "a token names {} of {} experts",
        tune.k,
        tune.experts
    );
    ensure!(
        !tune.budgets.contains(&0) && !tune.rows_at_a_time.contains(&0),
        "budgets and rows at a time must be at least 1"
    );
    let meta = meta::meta(ranks)?;
    let measured = ranks.run(&tune.common(), |rank| tune.measure(rank))?;
    if !ranks.speak() {
        return Ok(String::new());
    }
    let usual = transports::File::embedded()?.untuned_push_max_bytes();
    let verdict = Verdict::new(&measured.all, &measured.budgets, &measured.rows, usual);
    let mut rows = tune.rows(&measured.all, None);
    let mut text = verdict::table(&measured.all, None);
    for (sms, points) in &measured.budgets {
        rows.extend(tune.rows(points, Some(*sms)));
        text += &verdict::table(points, Some(*sms));
    }
    for (at_a_time, us) in &measured.rows {
        text += &format!("{at_a_time:>10} rows at a time {us:>13.1} us\n");
    }
    let mut with_rows = meta.clone();
    let one = |(rows, us): &(usize, f64)| json!({ "rows": rows, "us": rounded(*us) });
    with_rows["rows_at_a_time"] = measured.rows.iter().map(one).collect();
    tune.common().write(&with_rows, &rows)?;
    if let Some(path) = &tune.entry {
        let entry = tune.written(&meta, ranks.size(), &verdict)?;
        crate::write_entry(path, &entry)?;
    }
    Ok(text + &verdict.told())
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade::plan::{
        Entries,
        crossover::{Gpus, Links},
        transports::{Asked, File, Other},
    };
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        tune: Tune,
    }

    fn tune(words: &str) -> Tune {
        let words = std::iter::once("tune-experts").chain(words.split_whitespace());
        Line::try_parse_from(words).unwrap().tune
    }

    #[test]
    fn without_options_all_is_checked_and_replayed() {
        let line = tune("");
        assert!(line.common().graph && line.common().check);
        assert_eq!(line.budgets, [8, 24, 64]);
        assert!(tune("--budgets").budgets.is_empty());
        for (choice, _) in CANDIDATES {
            assert!(line.moe(choice, Some(8)).choice().is_some());
        }
    }

    /// What is written can be put into the file of brigade-plan as it is, and given to a device.
    #[test]
    fn an_entry_is_one_of_the_table() {
        let verdict = Verdict {
            push_max_bytes: 1000,
            push_back_max_bytes: 2000,
            push_max_bytes_per_sm: Some(10),
            rows_at_a_time: None,
            others: vec![Other {
                transport: Asked::Gather,
                from_bytes: None,
            }],
        };
        let meta = json!({
            "gpu": "NVIDIA H200", "link": "nvlink", "date": "2026-01-02", "commit": "0123456789ab",
            "command": "brigade-perf tune-experts", "driver": "13.0", "cuda": "13.0", "nccl": null,
        });
        let gpus = Gpus {
            model: Some("NVIDIA H200".into()),
            links: Links::Nvlink,
            ranks: 4,
        };
        for (words, fp8) in [("", false), ("--fp8", true)] {
            let entry = tune(words).written(&meta, 4, &verdict).unwrap();
            let untuned = r#"{"push_max_bytes": 1, "push_back_max_bytes": 1, "push_max_bytes_per_sm": 1, "rows_at_a_time": 7, "why": "so"}"#;
            let entries = serde_json::to_string(&entry).unwrap();
            let text = format!(r#"{{"untuned": {untuned}, "entries": [{entries}]}}"#);
            let file = File::read(&text).unwrap();
            Entries::read(&entries).unwrap();
            assert_eq!(file.entries(), [entry]);
            let found = file.of(&gpus);
            let back = if fp8 { 1 } else { 2000 };
            assert_eq!(found.plain.push_back_max_bytes, Some(back));
            let of = |f: &transports::Figures| (f.push_max_bytes, f.rows_at_a_time);
            assert_eq!(of(&found.fp8), (Some(if fp8 { 1000 } else { 1 }), Some(7)));
            assert_eq!(
                of(&found.plain),
                (Some(if fp8 { 1 } else { 1000 }), Some(7))
            );
        }
    }

    #[test]
    fn rows_have_a_choice_each_and_none_of_what_cannot_be() {
        let mut point = Point::new(8, (1000, 900));
        (point.us[0], point.us[3]) = (Some(2.0), Some(3.0));
        let rows = tune("").rows(&[point], Some(24));
        let choices: Vec<_> = rows.iter().map(|r| r["choice"].as_str().unwrap()).collect();
        assert_eq!(choices, ["pushed", "gather"]);
        assert_eq!(
            (&rows[1]["us"], &rows[1]["sm_budget"]),
            (&json!(3.0), &json!(24))
        );
    }
}
