//! Where a run's tokens leave the reference's.

use crate::{
    AdapterSpec, Error, Result, Source,
    parallel::for_sequence,
    reference::{Reference, argmax},
};

/// The first token of a sequence that the reference, having read the same tokens before it, would not choose.
#[derive(Clone, Debug, PartialEq)]
pub struct Divergence {
    /// Its place among the tokens that were generated.
    pub at: usize,
    /// What it is.
    pub got: u32,
    /// What the reference chooses.
    pub want: u32,
    /// By how much the reference's logit of its own choice is the greater. Roundings explain a small one.
    pub lead: f32,
}

impl std::fmt::Display for Divergence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            at,
            got,
            want,
            lead,
        } = self;
        write!(
            f,
            "token {at} is {got}, the reference's {want} leads by {lead:.4}"
        )
    }
}

/// The first divergence of each sequence, `None` where there is none. `lora` is that of the run.
///
/// # Errors
/// As those of the [`Reference`]; [`Error::Field`] for other numbers of sequences.
pub fn of(
    source: &dyn Source,
    prompts: &[Vec<u32>],
    generated: &[Vec<u32>],
    lora: Option<&AdapterSpec>,
) -> Result<Vec<Option<Divergence>>> {
    if generated.len() != prompts.len() {
        let want = format!("{}, one for each prompt", prompts.len());
        return Err(Error::field("sequences", generated.len(), want));
    }
    let mut model = Reference::new(source)?;
    let mut all = Vec::new();
    for (sequence, (prompt, tokens)) in prompts.iter().zip(generated).enumerate() {
        model.reset();
        if let Some(spec) = lora {
            model.set_adapters(&for_sequence(spec, sequence))?;
        }
        let Some((_, before)) = tokens.split_last() else {
            all.push(None);
            continue;
        };
        let logits = model.forward_all(&[&prompt[..], before].concat())?;
        all.push(tokens.iter().enumerate().find_map(|(at, &got)| {
            let row = logits.row(prompt.len() - 1 + at);
            let want = argmax(row);
            let lead = row[want as usize] - row.get(got as usize).copied().unwrap_or(f32::NAN);
            (want != got).then_some(Divergence {
                at,
                got,
                want,
                lead,
            })
        }));
    }
    Ok(all)
}
