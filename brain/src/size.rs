//! Sizes of memory as people write and read them.

/// Reads `512MiB`, `24GiB`, `1.5G` or a number of bytes.
pub fn parse(text: &str) -> Option<u64> {
    let text = text.trim();
    let unit_at = text
        .find(|c: char| c.is_ascii_alphabetic())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let unit: f64 = match unit {
        "" | "B" => 1.0,
        "KiB" | "K" => 1024.0,
        "MiB" | "M" => 1024.0 * 1024.0,
        "GiB" | "G" => 1024.0 * 1024.0 * 1024.0,
        "TiB" | "T" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        "kB" | "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        _ => return None,
    };
    let bytes = number.trim().parse::<f64>().ok()? * unit;
    (bytes >= 1.0 && bytes < (1u64 << 60) as f64).then_some(bytes as u64)
}

/// The same for a flag of the command line.
pub fn parse_flag(text: &str) -> Result<u64, String> {
    parse(text).ok_or_else(|| "is no size: write 512MiB or 24GiB".to_owned())
}

/// Writes a size with a unit in which it is short.
pub fn show(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut amount, mut unit) = (bytes as f64 / 1024.0, 0);
    // What would be written as 1024.00 belongs to the next unit.
    while amount >= 1023.995 && unit + 1 < UNITS.len() {
        amount /= 1024.0;
        unit += 1;
    }
    format!("{amount:.2} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in [
            ("1", 1),
            ("512MiB", 512 << 20),
            ("24 GiB", 24 << 30),
            ("1.5G", 3 << 29),
            ("80GB", 80_000_000_000),
        ] {
            assert_eq!(parse(text), Some(bytes), "{text}");
        }
        for text in ["", "0", "-1", "GiB", "1XB", "1e99", "nan", "inf"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn sizes_are_written() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            ((1 << 20) - 1, "1.00 MiB"),
            (800 << 20, "800.00 MiB"),
            (5 << 40, "5.00 TiB"),
        ] {
            assert_eq!(show(bytes), text);
        }
    }
}
