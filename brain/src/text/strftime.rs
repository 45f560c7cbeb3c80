//! `strftime_now` of chat templates: the few directives that they use, in UTC.

use std::fmt::Write as _;

const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// Formats a time given as seconds since 1970-01-01; unknown directives stay as they are.
pub(super) fn format(pattern: &str, unix_seconds: u64) -> String {
    let days = unix_seconds / 86_400;
    let (year, month, day) = civil(days);
    let second = unix_seconds % 86_400;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let mut out = String::new();
    let mut chars = pattern.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let written = match chars.next() {
            Some('Y') => write!(out, "{year}"),
            Some('m') => write!(out, "{month:02}"),
            Some('d') => write!(out, "{day:02}"),
            Some('B') => write!(out, "{}", MONTHS[month as usize - 1]),
            Some('b') => write!(out, "{}", &MONTHS[month as usize - 1][..3]),
            Some('A') => write!(out, "{}", DAYS[(days % 7) as usize]),
            Some('a') => write!(out, "{}", &DAYS[(days % 7) as usize][..3]),
            Some('H') => write!(out, "{hour:02}"),
            Some('M') => write!(out, "{minute:02}"),
            Some('S') => write!(out, "{second:02}"),
            Some('%') | None => write!(out, "%"),
            Some(other) => write!(out, "%{other}"),
        };
        // proof: writing to a String cannot fail.
        let _ = written;
    }
    out
}

/// Year, month and day of a number of days since 1970-01-01 (Gregorian calendar).
fn civil(days: u64) -> (u64, u64, u64) {
    // Eras of 400 years from 0000-03-01, so that the leap day is the last day of a year.
    let days = days + 719_468;
    let era = days / 146_097;
    let of_era = days % 146_097;
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 {
        from_march + 3
    } else {
        from_march - 9
    };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::format;

    #[test]
    fn known_days() {
        assert_eq!(
            format("%A, %d %B %Y %H:%M:%S", 0),
            "Thursday, 01 January 1970 00:00:00"
        );
        assert_eq!(format("%Y-%m-%d %a %b", 951_782_400), "2000-02-29 Tue Feb");
        assert_eq!(format("%Y-%m-%d %A", 1_782_777_600), "2026-06-30 Tuesday");
        assert_eq!(format("100%% %q %", 0), "100% %q %");
    }
}
