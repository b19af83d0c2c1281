//! Times as people write them. Shared with `cargo xtask test --stress`.

use std::time::Duration;

/// A time such as `90s`, `30m` or `2h`.
///
/// # Errors
/// What was wrong with it.
pub fn parse(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let wanted = || format!("{text:?} is no time such as 90s, 30m or 2h");
    let seconds = match text.chars().last() {
        Some('s') => 1,
        Some('m') => 60,
        Some('h') => 3600,
        _ => return Err(wanted()),
    };
    let count: u64 = text[..text.len() - 1].parse().map_err(|_| wanted())?;
    let seconds = count.checked_mul(seconds).ok_or_else(wanted)?;
    Ok(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_whole_numbers_with_a_unit() {
        for (text, seconds) in [("90s", 90), ("30m", 1800), (" 2h\n", 7200), ("0s", 0)] {
            assert_eq!(parse(text), Ok(Duration::from_secs(seconds)), "{text:?}");
        }
        for text in [
            "",
            "s",
            "2",
            "2 h",
            "-1s",
            "1.5h",
            "2d",
            "ä",
            "99999999999999999h",
        ] {
            assert!(parse(text).is_err(), "{text:?}");
        }
    }
}
