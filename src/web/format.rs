//! Numbers for people. Templates do no arithmetic.

use kvgate_core::units::{Ppm, Span, Timestamp};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::http::Shown;

/// Digits in groups of three: `2,735,308`.
pub(super) fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// What does not stand as it is in the value of a query.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// An id as the value of a query.
pub(super) fn escaped(id: &str) -> String {
    utf8_percent_encode(id, ESCAPED).to_string()
}

/// An id that is long loses its middle: ids of one run begin alike, and end each in its own way.
pub(super) fn cut(id: &str) -> String {
    const HEAD: usize = 6;
    const TAIL: usize = 9;
    let letters: Vec<char> = id.chars().collect();
    if letters.len() <= HEAD + TAIL + 1 {
        return id.to_owned();
    }
    let head = letters.iter().take(HEAD);
    let tail = letters.iter().skip(letters.len() - TAIL);
    head.chain(['…'].iter()).chain(tail).collect()
}

/// An engine's address without what nearly all of them have.
pub(super) fn bare(url: &str) -> &str {
    url.strip_prefix("http://").unwrap_or(url)
}

/// Three digits where they do: `434k`, `2.73M`.
pub(super) fn short(count: u64) -> String {
    let (unit, name) = match count {
        0..1_000 => return count.to_string(),
        1_000..1_000_000 => (1_000, "k"),
        1_000_000..1_000_000_000 => (1_000_000, "M"),
        _ => (1_000_000_000, "G"),
    };
    let whole = count / unit;
    let hundredths = count % unit * 100 / unit;
    match whole {
        0..10 if hundredths > 0 => {
            let digits = format!("{hundredths:02}");
            format!("{whole}.{}{name}", digits.trim_end_matches('0'))
        }
        10..100 if hundredths >= 10 => format!("{whole}.{}{name}", hundredths / 10),
        _ => format!("{}{name}", grouped(whole)),
    }
}

/// One thing, or many: `1 engine`, `2 engines`.
pub(super) fn counted(count: u64, one: &str) -> String {
    let ending = if count == 1 { "" } else { "s" };
    format!("{} {one}{ending}", grouped(count))
}

/// A length of time that may be very short: `41 ms`, `4.1 s`.
pub(super) fn precise(span: Span) -> String {
    match span.millis() {
        millis @ 0..1_000 => format!("{millis} ms"),
        _ => duration(span),
    }
}

/// A length of time without parts: `12 s`, `15 min`, `2 h`.
pub(super) fn about(span: Span) -> String {
    let secs = (span.millis() + 500) / 1_000;
    match secs {
        0..120 => format!("{secs} s"),
        120..5_400 => format!("{} min", (secs + 30) / 60),
        5_400..172_800 => format!("{} h", (secs + 1_800) / 3_600),
        _ => format!("{} d", (secs + 43_200) / 86_400),
    }
}

/// A length of time that was set: `30 s`, `1.5 s`, `150 s`, `10 min`.
pub(super) fn set(span: Span) -> String {
    match span.millis() {
        millis if millis >= 120_000 && millis % 60_000 == 0 => {
            format!("{} min", grouped(millis / 60_000))
        }
        millis if millis % 1_000 == 0 => format!("{} s", grouped(millis / 1_000)),
        millis => format!("{} s", millis as f64 / 1_000.0),
    }
}

/// A length of time in seconds as the API tells it.
pub(super) fn secs(seconds: f64) -> String {
    duration(span(seconds))
}

/// The same as it is counted inside. A cast of a float saturates, and what is no length is none.
pub(super) fn span(seconds: f64) -> Span {
    Span::from_millis((seconds * 1_000.0).round() as u64)
}

/// A point in time as the clock on the wall shows it, in UTC: `17:04:12`.
pub(super) fn time_of_day(at: Timestamp, shown: &Shown) -> String {
    wall(at, shown, "%H:%M:%S")
}

/// A point in time in UTC, in the form that is asked for.
pub(super) fn wall(at: Timestamp, shown: &Shown, form: &str) -> String {
    let millis = i64::try_from(shown.line.wall_millis(at)).unwrap_or(i64::MAX);
    let instant = jiff::Timestamp::from_millisecond(millis).unwrap_or(jiff::Timestamp::MAX);
    instant.strftime(form).to_string()
}

/// Date and time of day of a point in time as the API tells it: `2026-11-30 17:04:12`.
pub(super) fn moment(rfc3339: &str) -> String {
    match (rfc3339.get(..10), rfc3339.get(11..19)) {
        (Some(date), Some(time)) => format!("{date} {time}"),
        _ => rfc3339.to_owned(),
    }
}

/// The time of day of a point in time as the API tells it: `17:04:12.881`.
pub(super) fn clock_part(rfc3339: &str) -> &str {
    rfc3339.get(11..23).unwrap_or(rfc3339)
}

/// `97.7 %`.
pub(super) fn percent(share: Ppm) -> String {
    let tenths = (u64::from(share.get()) + 500) / 1_000;
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// Part of a whole in tenths of a percent; `None` of nothing. May exceed the whole.
pub(super) fn tenths_of(part: u64, whole: u64) -> Option<u64> {
    let tenths = u128::from(part) * 1_000 / u128::from(whole.max(1));
    (whole > 0).then(|| u64::try_from(tenths).unwrap_or(u64::MAX))
}

/// `97.7 %` of a part and a whole.
pub(super) fn percent_of(part: u64, whole: u64) -> String {
    tenths_of(part, whole).map_or_else(
        || "–".to_owned(),
        |tenths| format!("{}.{} %", tenths / 10, tenths % 10),
    )
}

/// `38.2 MiB`.
pub(super) fn bytes(count: u64) -> String {
    let tenths_of_kib = count / 102;
    match tenths_of_kib {
        0..10_240 => format!("{}.{} KiB", tenths_of_kib / 10, tenths_of_kib % 10),
        _ => {
            let tenths = count / 104_858;
            format!("{}.{} MiB", grouped(tenths / 10), tenths % 10)
        }
    }
}

/// `0.4 s`, `4 m 12 s`, `6 h 04 m`, `6 d 04 h`.
pub(super) fn duration(span: Span) -> String {
    let millis = span.millis();
    let secs = millis / 1_000;
    match secs {
        0..60 => format!("{}.{} s", secs, millis % 1_000 / 100),
        60..3_600 => format!("{} m {:02} s", secs / 60, secs % 60),
        3_600..86_400 => format!("{} h {:02} m", secs / 3_600, secs / 60 % 60),
        _ => format!("{} d {:02} h", secs / 86_400, secs / 3_600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_as_people_write_them() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_000), "1,000");
        assert_eq!(grouped(2_735_308), "2,735,308");
        assert_eq!(percent(Ppm::clamped(976_500)), "97.7 %");
        assert_eq!(percent(Ppm::ONE), "100.0 %");
        assert_eq!(percent_of(800_000, 450_000), "177.7 %");
        assert_eq!(percent_of(1, 0), "–");
        let shorts = [0, 999, 1_000, 1_250, 43_100, 434_176, 2_735_308, 27_353_080];
        assert_eq!(
            shorts.map(short),
            ["0", "999", "1k", "1.25k", "43.1k", "434k", "2.73M", "27.3M"]
        );
        assert_eq!(short(999_999_999_999_999), "999,999G");
        let engines = [0, 1, 2].map(|count| counted(count, "engine"));
        assert_eq!(engines, ["0 engines", "1 engine", "2 engines"]);
        let abouts = [12, 119, 120, 900, 5_400, 172_800];
        assert_eq!(
            abouts.map(|secs| about(Span::from_secs(secs))),
            ["12 s", "119 s", "2 min", "15 min", "2 h", "2 d"]
        );
        let sets = [30_000, 1_500, 90_000, 120_000, 150_000, 600_000];
        assert_eq!(
            sets.map(|millis| set(Span::from_millis(millis))),
            ["30 s", "1.5 s", "90 s", "2 min", "150 s", "10 min"]
        );
        assert_eq!(secs(1.449), "1.4 s");
        assert_eq!(secs(-1.0), "0.0 s");
        assert_eq!(
            escaped("a/b c?&\"'ü-._~"),
            "a%2Fb%20c%3F%26%22%27%C3%BC-._~"
        );
        assert_eq!(cut("0123456789abcdef"), "0123456789abcdef");
        assert_eq!(cut("0123456789abcdefg"), "012345…89abcdefg");
        assert_eq!(precise(Span::from_millis(999)), "999 ms");
        assert_eq!(precise(Span::from_millis(1_000)), "1.0 s");
        assert_eq!(clock_part("2026-11-30T00:53:20.123Z"), "00:53:20.123");
        assert_eq!(duration(Span::from_millis(1_449)), "1.4 s");
        assert_eq!(duration(Span::from_secs(252)), "4 m 12 s");
        assert_eq!(duration(Span::from_secs(21_850)), "6 h 04 m");
        assert_eq!(duration(Span::from_secs(532_900)), "6 d 04 h");
    }
}
