use super::*;
use crate::{Synthetic, TensorId};

const PROMPT: [u32; 7] = [3, 77, 500, 12, 12, 0, 511];

fn synthetic() -> Synthetic {
    Synthetic::new(Synthetic::small_config(), 42).unwrap()
}

fn loudest_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

#[test]
fn a_prompt_in_one_go_is_the_prompt_token_by_token() {
    let mut at_once = Reference::new(&synthetic()).unwrap();
    let all = at_once.forward_all(&PROMPT).unwrap();
    let mut one_by_one = Reference::new(&synthetic()).unwrap();
    for (row, token) in PROMPT.iter().enumerate() {
        assert_eq!(one_by_one.forward(&[*token]).unwrap(), all.row(row));
    }
    at_once.reset();
    at_once.forward(&PROMPT[..3]).unwrap();
    assert_eq!(
        at_once.forward(&PROMPT[3..]).unwrap(),
        all.row(PROMPT.len() - 1)
    );
    assert_eq!([at_once.position(), one_by_one.position()], [7, 7]);
}

#[test]
fn logits_depend_on_the_past_and_not_on_the_future() {
    let mut model = Reference::new(&synthetic()).unwrap();
    let all = model.forward_all(&PROMPT).unwrap();
    let mut changed = PROMPT;
    changed[4] = 13;
    model.reset();
    let other = model.forward_all(&changed).unwrap();
    for row in 0..PROMPT.len() {
        let same = all.row(row) == other.row(row);
        assert_eq!(same, row < 4, "row {row}");
    }
}

#[test]
fn generation_is_greedy_and_stops_at_the_end_token() {
    let mut model = Reference::new(&synthetic()).unwrap();
    let generated = model.generate(&PROMPT, 12, u32::MAX).unwrap();
    assert_eq!(generated.len(), 12);
    assert_eq!(
        generated,
        generate(&synthetic(), &PROMPT, 12, u32::MAX).unwrap()
    );

    let mut sequence = PROMPT.to_vec();
    for &token in &generated {
        model.reset();
        assert_eq!(argmax(&model.forward(&sequence).unwrap()), token);
        sequence.push(token);
    }
    let end = generated[5];
    let first = generated.iter().position(|&token| token == end).unwrap();
    assert_eq!(
        model.generate(&PROMPT, 12, end).unwrap(),
        generated[..first]
    );
    assert_eq!(model.generate(&PROMPT, 0, end).unwrap(), [0_u32; 0]);
}

#[test]
fn generation_ends_with_the_context() {
    let config = Config {
        context: 9,
        ..Synthetic::small_config()
    };
    let mut model = Reference::new(&Synthetic::new(config, 42).unwrap()).unwrap();
    assert_eq!(model.generate(&PROMPT, 100, u32::MAX).unwrap().len(), 3);
    assert_eq!(model.position(), 9);
}

#[test]
fn bad_tokens_are_refused_and_leave_the_sequence_as_it_was() {
    let mut model = Reference::new(&synthetic()).unwrap();
    let mut check = |tokens: &[u32], want: &str| {
        assert_eq!(model.forward(tokens).unwrap_err().to_string(), want);
        assert_eq!(model.position(), 0);
    };
    check(
        &[],
        "number of tokens is 0, wanted 1 to 2048, the room in the context",
    );
    check(
        &[0; 2049],
        "number of tokens is 2049, wanted 1 to 2048, the room in the context",
    );
    check(&[1, 512], "token is 512, wanted below 512");
}

/// A model whose linears have the adapters added into the weights.
struct Merged(Synthetic, AdapterSpec);

impl Source for Merged {
    fn config(&self) -> &Config {
        self.0.config()
    }

    fn rows(&self, id: TensorId, rows: Range<usize>) -> Result<Matrix> {
        let weight = self.0.rows(id, rows.clone())?;
        let TensorId::Linear(layer, projection) = id else {
            return Ok(weight);
        };
        let Some(adapter) = Adapter::generate(&self.1, self.config(), layer, projection)? else {
            return Ok(weight);
        };
        let mut data = weight.data().to_vec();
        for (row, output) in data.chunks_exact_mut(weight.columns()).zip(rows.clone()) {
            for (input, value) in row.iter_mut().enumerate() {
                let delta: f32 = (0..self.1.rank)
                    .map(|r| adapter.a.row(input)[r] * adapter.b.row(r)[output])
                    .sum();
                *value += adapter.scale * delta;
            }
        }
        Matrix::new(rows.len(), weight.columns(), data)
    }
}

#[test]
fn adapters_are_what_merging_them_into_the_weights_gives() {
    let plain = Reference::new(&synthetic())
        .unwrap()
        .forward(&PROMPT)
        .unwrap();
    let with = |spec: &AdapterSpec| {
        let mut model = Reference::new(&synthetic()).unwrap();
        model.set_adapters(spec).unwrap();
        model.forward(&PROMPT).unwrap()
    };
    for targets in Projection::ALL
        .map(|projection| vec![projection])
        .into_iter()
        .chain([Projection::ALL.to_vec()])
    {
        let spec = AdapterSpec {
            targets,
            ..AdapterSpec::new(9, 4, 0.3)
        };
        let merged = Reference::new(&Merged(synthetic(), spec.clone()))
            .unwrap()
            .forward(&PROMPT)
            .unwrap();
        let adapted = with(&spec);
        assert!(loudest_difference(&adapted, &merged) < 1e-5, "{spec:?}");
        assert!(loudest_difference(&adapted, &plain) > 1e-2, "{spec:?}");
    }
    assert_eq!(with(&AdapterSpec::new(9, 4, 0.0)), plain);
    assert_eq!(
        with(&AdapterSpec {
            targets: Vec::new(),
            ..AdapterSpec::new(9, 4, 1.0)
        }),
        plain
    );
}
