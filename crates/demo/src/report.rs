//! What a run has to show: for people, and as one JSON object.

use brigade_demo::{
    divergence::Divergence,
    parallel::{Generated, Graphs},
};
use serde_json::{Value, json};
use std::fmt::Write;

pub struct Report<'a> {
    pub prompts: &'a [String],
    pub prompt_ids: &'a [Vec<u32>],
    pub texts: &'a [String],
    pub ranks: usize,
    pub generated: &'a Generated,
    /// Of each prompt, if it was compared with the reference.
    pub divergences: Option<&'a [Option<Divergence>]>,
}

impl Report<'_> {
    fn decode_tokens_per_s(&self) -> f64 {
        let seconds = self.generated.decode.as_secs_f64();
        if seconds > 0.0 {
            self.generated.decoded_tokens as f64 / seconds
        } else {
            0.0
        }
    }

    fn prefill_ms(&self) -> f64 {
        self.generated.prefill.as_secs_f64() * 1e3
    }

    pub fn json(&self) -> Value {
        let g = self.generated;
        let layers: Vec<Value> = g
            .layers
            .iter()
            .map(|l| {
                json!({
                    "kind": l.kind.name(),
                    "phase": l.phase.name(),
                    "plan": l.plan,
                    "calls": l.calls,
                    "moved_bytes_per_rank": l.moved_bytes,
                })
            })
            .collect();
        let mut object = json!({
            "prompt_ids": self.prompt_ids[0],
            "token_ids": g.tokens[0],
            "text": self.texts[0],
            "ranks": self.ranks,
            "device": g.device,
            "prefill_ms": self.prefill_ms(),
            "decode_tokens_per_s": self.decode_tokens_per_s(),
            "peak_rss_bytes": peak_rss_bytes(),
            "weight_bytes_per_rank": g.weight_bytes,
            "layers": layers,
        });
        if self.prompts.len() > 1 {
            let all = (0..self.prompts.len()).map(|i| {
                json!({
                    "prompt": self.prompts[i],
                    "prompt_ids": self.prompt_ids[i],
                    "token_ids": g.tokens[i],
                    "text": self.texts[i],
                })
            });
            object["sequences"] = all.collect();
        }
        if !g.regrouped.is_empty() {
            let all = g.regrouped.iter().map(|r| {
                json!({
                    "lost": r.lost,
                    "error": r.error,
                    "noticed_ms": r.noticed.as_secs_f64() * 1e3,
                })
            });
            object["regrouped"] = all.collect();
        }
        if let Some(Graphs {
            captured,
            launched,
            refused,
        }) = &g.graphs
        {
            object["graphs"] =
                json!({ "captured": captured, "launched": launched, "refused": refused });
        }
        if let Some(divergences) = self.divergences {
            let all = divergences.iter().map(|d| {
                d.as_ref().map(
                    |d| json!({ "at": d.at, "got": d.got, "reference": d.want, "lead": d.lead }),
                )
            });
            object["divergences"] = all.collect();
        }
        object
    }

    /// `shown` says that the one answer stands on the terminal already.
    pub fn text(&self, shown: bool) -> String {
        let g = self.generated;
        let mut out = String::new();
        if shown {
            out.push('\n');
        } else {
            for (prompt, text) in self.prompts.iter().zip(self.texts) {
                if self.prompts.len() > 1 {
                    let _ = writeln!(out, "> {prompt}");
                }
                let _ = writeln!(out, "{text}");
            }
        }
        let _ = writeln!(
            out,
            "\n{} ranks on {}: prompt of {} tokens in {:.0} ms, then {:.1} tokens/s; peak memory {:.0} MB",
            self.ranks,
            g.device,
            self.prompt_ids.iter().map(Vec::len).sum::<usize>(),
            self.prefill_ms(),
            self.decode_tokens_per_s(),
            peak_rss_bytes().unwrap_or(0) as f64 / 1e6,
        );
        for r in &g.regrouped {
            let _ = writeln!(
                out,
                "without ranks {:?}, {:.0} ms behind the step before: {}",
                r.lost,
                r.noticed.as_secs_f64() * 1e3,
                r.error
            );
        }
        if let Some(graphs) = &g.graphs {
            let _ = match &graphs.refused {
                Some(reason) => writeln!(out, "steps were not captured: {reason}"),
                None => writeln!(
                    out,
                    "{} steps ran from {} graphs",
                    graphs.launched, graphs.captured
                ),
            };
        }
        let compared = self.prompts.iter().zip(&g.tokens);
        for ((prompt, tokens), divergence) in compared.zip(self.divergences.unwrap_or(&[])) {
            let _ = match divergence {
                None if tokens.is_empty() => writeln!(out, "nothing to compare: {prompt}"),
                None => writeln!(out, "as the reference: {prompt}"),
                Some(d) => writeln!(out, "{d}: {prompt}"),
            };
        }
        let _ = writeln!(
            out,
            "\n{:<8} {:<17} {:>6} {:>16}  plan",
            "phase", "layers", "calls", "KB moved a rank"
        );
        for l in &g.layers {
            let most = l.moved_bytes.iter().max();
            let most = most.map_or("-".into(), |&bytes| format!("{:.1}", bytes as f64 / 1e3));
            let _ = writeln!(
                out,
                "{:<8} {:<17} {:>6} {:>16}  {}",
                l.phase.name(),
                l.kind.name(),
                l.calls,
                most,
                l.plan
            );
        }
        out
    }
}

/// The most memory that this process ever held, where the system tells.
pub fn peak_rss_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}
