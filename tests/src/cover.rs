//! What stands for all contracts in groups that are too large to be tried with everything: of each operation a trial or two, and of
//! each way to fail one with a few of them.

/// Whether a contract is one of those. Its name comes in parts, from the operation on.
pub fn covers(name: &[&str]) -> bool {
    match name {
        [
            "barrier" | "all_gather" | "broadcast" | "reduce_scatter",
            ..,
        ] => true,
        ["all_to_all", what] => *what == "uneven",
        ["all_to_all_rows", what] => matches!(*what, "ragged" | "captured"),
        ["all_reduce" | "all_reduce_norm", "same_bits"] => true,
        // Every algorithm by its name.
        ["all_reduce", _, what] => *what == "exact_integers",
        ["all_reduce_norm", _, what] => *what == "none",
        ["exchanges", what] => *what == "in_turn",
        ["send_recv", what] => matches!(*what, "ring" | "all_pairs" | "at_once"),
        ["experts", "dense" | "by_expert"] => true,
        ["experts", "in_place", what] => *what == "round_trips",
        ["experts", "pushed" | "fifo" | "gather", what] => matches!(*what, "dense" | "captured"),
        ["low_latency", what] => matches!(*what, "sizes" | "casts_back"),
        ["user_buffers", what] => matches!(*what, "places" | "pairs" | "peer_lost"),
        [
            "gather_linear" | "linear_reduce_scatter" | "linear_all_reduce",
            _,
            theme,
        ] => *theme == "even",
        ["faults", "never_calls" | "peer_lost" | "wrong_call", op] => {
            matches!(*op, "all_reduce_auto" | "all_to_all" | "experts")
        }
        ["faults", "mishaps", op] => *op == "gather_linear_auto",
        ["life", what] => matches!(*what, "leases" | "close_without_a_rank"),
        ["reset", what] => matches!(*what, "generations" | "without_a_rank"),
        ["capture", "all_reduce" | "gather_linear", what] => *what == "auto",
        _ => false,
    }
}
