//! Sizes that are measured, as the command line names them.

use anyhow::{Result, ensure};

/// A number of bytes; K, M and G behind it count in powers of 1024, as nccl-tests has them.
pub fn bytes(text: &str) -> Result<usize, String> {
    let wrong = || format!("{text}: wanted bytes, such as 4096, 64K or 16M");
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number: usize = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

/// How often something is done that must be done once at least.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err(format!("{text}: wanted a number, 1 or more")),
        Ok(number) => Ok(number),
    }
}

/// All sizes from the first to the last, each so many times the one before.
pub fn steps(begin: usize, end: usize, factor: usize) -> Result<Vec<usize>> {
    ensure!(
        factor > 1 && begin > 1 && begin <= end,
        "sizes must grow from at least 2 bytes on"
    );
    let next = |b: &usize| b.checked_mul(factor).filter(|b| *b <= end);
    Ok(std::iter::successors(Some(begin), next).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_may_be_counted_in_powers_of_1024() {
        for (text, want) in [
            ("4096", 4096),
            ("64K", 64 << 10),
            ("16m", 16 << 20),
            ("1G", 1 << 30),
        ] {
            assert_eq!(bytes(text), Ok(want));
        }
        for wrong in ["", "K", "-1", "1.5M", "64KB", "99999999999999G"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn nothing_is_not_often_enough() {
        assert_eq!(at_least_one("1"), Ok(1));
        assert_eq!(at_least_one("20"), Ok(20));
        for wrong in ["0", "", "-1", "many"] {
            assert!(at_least_one(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_grow_up_to_the_last() {
        assert_eq!(steps(2048, 16_384, 2).unwrap(), [2048, 4096, 8192, 16_384]);
        assert_eq!(steps(1000, 16_384, 4).unwrap(), [1000, 4000, 16_000]);
        assert_eq!(steps(usize::MAX, usize::MAX, 2).unwrap(), [usize::MAX]);
        for (begin, end, factor) in [(0, 8, 2), (8, 4, 2), (4, 8, 1)] {
            assert!(steps(begin, end, factor).is_err());
        }
    }
}
