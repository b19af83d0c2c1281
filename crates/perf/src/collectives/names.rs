//! Operations and algorithms, as the command line and the tables name them.

use brigade::{AllReduceAlgorithm, ReduceOp};
use clap::{ValueEnum, builder::PossibleValue};

/// How an all-reduce is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub name: &'static str,
    /// What is forced; nothing leaves it to the plan.
    pub algorithm: Option<AllReduceAlgorithm>,
    help: &'static str,
}

/// Every name there is: a further algorithm is a further entry.
const CHOICES: [Choice; 6] = [
    Choice {
        name: "auto",
        algorithm: None,
        help: "what the plan chooses",
    },
    Choice {
        name: "one-shot-push",
        algorithm: Some(AllReduceAlgorithm::OneShotPush),
        help: "every rank pushes its input to every rank",
    },
    Choice {
        name: "one-shot-pull",
        algorithm: Some(AllReduceAlgorithm::OneShotPull),
        help: "every rank reads every rank's input",
    },
    Choice {
        name: "two-shot",
        algorithm: Some(AllReduceAlgorithm::TwoShot),
        help: "reduce-scatter, then all-gather",
    },
    Choice {
        name: "two-shot-push",
        algorithm: Some(AllReduceAlgorithm::TwoShotPush),
        help: "every rank pushes the parts of its input to their owners, which push the sums",
    },
    Choice {
        name: "nccl",
        algorithm: Some(AllReduceAlgorithm::Nccl),
        help: "NCCL, through a plan; --vs nccl compares with NCCL itself",
    },
];

impl Choice {
    pub const AUTO: Self = CHOICES[0];

    /// All of Brigade's own: in one shot and in two, by pushing and then by pulling.
    pub const OWN: [Self; 4] = [CHOICES[1], CHOICES[4], CHOICES[2], CHOICES[3]];
}

impl ValueEnum for Choice {
    fn value_variants<'a>() -> &'a [Self] {
        &CHOICES
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name).help(self.help))
    }
}

/// An algorithm's name, also of one that the command line has no name for.
pub fn algorithm(algorithm: AllReduceAlgorithm) -> String {
    CHOICES
        .iter()
        .find(|c| c.algorithm == Some(algorithm))
        .map_or_else(|| format!("{algorithm:?}"), |c| c.name.to_owned())
}

/// How values are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Op {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
}

impl Op {
    pub const fn reduction(self) -> ReduceOp {
        match self {
            Self::Sum => ReduceOp::Sum,
            Self::Prod => ReduceOp::Prod,
            Self::Max => ReduceOp::Max,
            Self::Min => ReduceOp::Min,
            Self::Avg => ReduceOp::Avg,
        }
    }
}

/// A value's name on the command line.
pub fn name(value: impl ValueEnum) -> String {
    let named = value.to_possible_value();
    named.map_or_else(String::new, |v| v.get_name().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_shown() {
        for choice in CHOICES {
            assert_eq!(Choice::from_str(choice.name, false), Ok(choice));
            if let Some(forced) = choice.algorithm {
                assert_eq!(algorithm(forced), choice.name);
            }
        }
        assert!(Choice::from_str("three-shot", false).is_err());
        assert_eq!(name(Op::Prod), "prod");
    }

    #[test]
    fn no_algorithm_has_two_names() {
        for (i, a) in CHOICES.iter().enumerate() {
            for b in &CHOICES[..i] {
                assert!(a.name != b.name && a.algorithm != b.algorithm);
            }
        }
    }
}
