//! Today's date. Programs that write results include this file: xtask, brigade-perf and the benchmarks of the host.

use std::time::{SystemTime, UNIX_EPOCH};

/// Today as YYYY-MM-DD, by UTC.
pub fn today() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    date(since.unwrap_or_default().as_secs() / 86_400)
}

/// A day since 1970 as YYYY-MM-DD, by Howard Hinnant's `civil_from_days`.
fn date(days: u64) -> String {
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months from March on.
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year_of_era + next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_dates() {
        let days = [0, 58, 59, 789, 11_016, 11_017, 20_818];
        assert_eq!(
            days.map(date),
            [
                "1970-01-01",
                "1970-02-28",
                "1970-03-01",
                "1972-02-29",
                "2000-02-29",
                "2000-03-01",
                "2026-12-31",
            ]
        );
    }
}
