//! Lists the GPUs, their links, the driver, the kernels of this build and NCCL; says what is missing and what would help.
//! `cargo run -p brigade-cuda --example devices`, with `-- --json` for programs.
#![allow(clippy::print_stdout)]

use brigade_cuda::{Finding, survey};
use serde_json::{Value, json};

fn main() {
    let findings = survey();
    if std::env::args().any(|argument| argument == "--json") {
        let findings: Vec<_> = findings.iter().map(as_json).collect();
        println!("{:#}", json!({ "findings": findings }));
        return;
    }
    for Finding { name, found } in findings {
        match found {
            Ok(text) => println!("{name:<14} {text}"),
            Err(why) => println!("{name:<14} missing: {}; {}", why.what, why.remedy),
        }
    }
}

fn as_json(finding: &Finding) -> Value {
    let name = &finding.name;
    match &finding.found {
        Ok(text) => json!({ "name": name, "found": text }),
        Err(why) => {
            let why = json!({ "code": why.code, "what": why.what, "remedy": why.remedy });
            json!({ "name": name, "missing": why })
        }
    }
}
