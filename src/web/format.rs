//! Numbers for people. Templates do no arithmetic.

use kvgate_core::units::{Ppm, Span};

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
        assert_eq!(duration(Span::from_millis(1_449)), "1.4 s");
        assert_eq!(duration(Span::from_secs(252)), "4 m 12 s");
        assert_eq!(duration(Span::from_secs(21_850)), "6 h 04 m");
        assert_eq!(duration(Span::from_secs(532_900)), "6 d 04 h");
    }
}
