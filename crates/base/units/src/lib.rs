//! Formats quantities with units for people.

/// Formats a size exactly, in the largest unit that divides it: `8 KiB`, `1500 B`.
pub fn size(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}

/// Formats a number of bytes, rounded, with a binary unit: `0 B`, `512 B`, `4.0 KiB`, `1.5 GiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    // A value that would round up to 1024.0 is shown as 1.0 of the next unit.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Formats a duration in at most two units: `0s`, `59s`, `2m05s`, `3h07m`, `12d04h`.
pub fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// The text of a table cell without a number.
pub const NONE: &str = "-";

/// Formats a number with three significant digits and at most three decimals.
fn significant(value: f64) -> String {
    let decimals = match value.abs() {
        magnitude if magnitude >= 99.95 => 0,
        magnitude if magnitude >= 9.995 => 1,
        magnitude if magnitude >= 0.9995 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

fn optional(value: Option<f64>, write: impl Fn(f64) -> String) -> String {
    value.filter(|value| value.is_finite()).map_or_else(|| NONE.to_owned(), write)
}

/// Formats nanoseconds as microseconds, without the unit.
pub fn micros(ns: Option<f64>) -> String {
    optional(ns, |ns| significant(ns / 1e3))
}

/// Formats a ratio: `2.41x`.
pub fn times(ratio: Option<f64>) -> String {
    optional(ratio, |ratio| format!("{}x", significant(ratio)))
}

/// Formats a share, 0 to 1, in percent: `63%`.
pub fn percent(share: Option<f64>) -> String {
    optional(share, |share| format!("{}%", significant(share * 100.0)))
}

/// Formats a rate per second: `94.5 k`, `23.1 M`.
pub fn rate(per_second: Option<f64>) -> String {
    optional(per_second, |rate| match rate {
        rate if rate >= 999_500.0 => format!("{} M", significant(rate / 1e6)),
        rate if rate >= 999.5 => format!("{} k", significant(rate / 1e3)),
        rate => significant(rate),
    })
}

/// Formats bytes per second as GB/s, without the unit.
pub fn gigabytes(bytes_per_second: Option<f64>) -> String {
    optional(bytes_per_second, |rate| if rate < 1e6 { format!("{:.5}", rate / 1e9) } else { significant(rate / 1e9) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_binary_units() {
        for (count, expected) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (1_048_575, "1.0 MiB"),
            (1 << 20, "1.0 MiB"),
            (5 << 30, "5.0 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(bytes(count), expected, "{count}");
        }
    }

    #[test]
    fn ages_show_two_units() {
        for (seconds, expected) in
            [(0, "0s"), (59, "59s"), (60, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (90_061, "1d01h")]
        {
            assert_eq!(age(seconds), expected);
        }
    }

    #[test]
    fn numbers_have_three_significant_digits() {
        assert_eq!(micros(Some(83.4)), "0.083");
        assert_eq!(micros(Some(1_234.0)), "1.23");
        assert_eq!(micros(Some(57_149.0)), "57.1");
        assert_eq!(micros(Some(99_960.0)), "100");
        assert_eq!(times(Some(103.4)), "103x");
        assert_eq!(percent(Some(0.634)), "63.4%");
        assert_eq!(rate(Some(94_500.0)), "94.5 k");
        assert_eq!(rate(Some(999_900.0)), "1.00 M");
        assert_eq!(gigabytes(Some(60_000.0)), "0.00006");
        assert_eq!(gigabytes(Some(44.2e9)), "44.2");
    }

    #[test]
    fn a_missing_number_is_a_dash() {
        assert_eq!(micros(None), NONE);
        assert_eq!(times(Some(f64::NAN)), NONE);
    }

    #[test]
    fn sizes_use_the_largest_whole_unit() {
        assert_eq!(size(1), "1 B");
        assert_eq!(size(1024), "1 KiB");
        assert_eq!(size(1500), "1500 B");
        assert_eq!(size(4 << 20), "4 MiB");
    }
}
