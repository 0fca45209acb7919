//! Tables for people: fitted to the terminal's width, and to no width in a pipe, so that programs find
//! one row a line. Numbers as people write them.

use std::io;

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, presets};
use terminal_size::{Width, terminal_size_of};

use super::out::{self, HEAD};

/// What stands where there is nothing.
pub(super) const NOTHING: &str = "-";

/// Between two columns.
const GAP: u16 = 2;
/// Room that a column of texts has at least; on a narrower terminal nothing is fitted.
const TEXT_MIN: usize = 8;

/// What the cells of a column hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Names of others, of any length: broken where the terminal is too narrow.
    Text,
    /// Words and times of ours: never broken.
    Word,
    /// Numbers: never broken, and one below the other.
    Number,
}

/// One row a line under the names of the columns. Cells of others must be [`out::plain`].
pub(super) fn table(columns: &[(&str, Kind)], rows: Vec<Vec<String>>) -> String {
    fitted(columns, rows, width())
}

fn width() -> Option<u16> {
    terminal_size_of(io::stdout()).map(|(Width(width), _)| width)
}

fn fitted(columns: &[(&str, Kind)], rows: Vec<Vec<String>>, width: Option<u16>) -> String {
    let width = width.filter(|width| usize::from(*width) >= least(columns, &rows));
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    match width {
        Some(width) => table
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(width),
        None => table.set_content_arrangement(ContentArrangement::Disabled),
    };
    table.set_header(columns.iter().map(|(name, _)| *name));
    for row in rows {
        table.add_row(row);
    }
    for (column, (_, kind)) in table.column_iter_mut().zip(columns) {
        column.set_padding((0, GAP));
        if *kind != Kind::Text {
            column.set_constraint(ColumnConstraint::ContentWidth);
        }
        if *kind == Kind::Number {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let text = table.trim_fmt();
    let (head, rest) = text.split_once('\n').unwrap_or((&text, ""));
    let mut text = format!("{}\n{rest}", out::styled(HEAD, head));
    if !rest.is_empty() {
        text.push('\n');
    }
    text
}

/// The least width on which a table can be read.
fn least(columns: &[(&str, Kind)], rows: &[Vec<String>]) -> usize {
    let widest = |place: usize| {
        let cells = rows.iter().filter_map(|row| row.get(place));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let column = |(place, (name, kind)): (usize, &(&str, Kind))| {
        let content = widest(place).max(name.len());
        let room = match kind {
            Kind::Text => content.min(TEXT_MIN),
            Kind::Word | Kind::Number => content,
        };
        room + usize::from(GAP)
    };
    columns.iter().enumerate().map(column).sum()
}

/// `97.7 %`.
pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

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

/// `0.4 s`, `4 m 12 s`, `6 h 04 m`, `6 d 04 h`.
pub(super) fn duration(seconds: f64) -> String {
    // What no duration can be is shown as it came.
    let Ok(time) = std::time::Duration::try_from_secs_f64(seconds) else {
        return format!("{seconds} s");
    };
    let whole = time.as_secs();
    match whole {
        0..60 => format!("{whole}.{} s", time.subsec_millis() / 100),
        60..3_600 => format!("{} m {:02} s", whole / 60, whole % 60),
        3_600..86_400 => format!("{} h {:02} m", whole / 3_600, whole / 60 % 60),
        _ => format!("{} d {:02} h", whole / 86_400, whole / 3_600 % 24),
    }
}

/// `1 waiter`, `2 waiters`.
pub(super) fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{} {}", grouped(count), if count == 1 { one } else { many })
}

/// A text of others, or what stands for nothing.
pub(super) fn text(text: Option<&str>) -> String {
    text.map_or_else(|| NOTHING.to_owned(), |text| out::plain(text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: &[(&str, Kind)] = &[("ticket", Kind::Text), ("tokens", Kind::Number)];

    fn bare(text: &str) -> String {
        anstream::adapter::strip_str(text).to_string()
    }

    #[test]
    fn one_row_a_line_without_a_terminal() {
        let long = "t".repeat(300);
        let rows = vec![
            vec![long.clone(), "1".to_owned()],
            vec!["b".to_owned(), "22,000".to_owned()],
        ];
        let text = bare(&fitted(COLUMNS, rows, None));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert_eq!(lines[1], format!("{long}       1"));
        assert!(lines[2].ends_with("22,000"), "{text}");
        assert!(text.ends_with('\n'));
        assert_eq!(bare(&fitted(COLUMNS, Vec::new(), None)), "ticket  tokens\n");
    }

    #[test]
    fn a_terminal_is_never_passed_and_nothing_is_lost() {
        let long = "0123456789".repeat(12);
        let rows = vec![vec![long.clone(), "5".to_owned()]];
        let text = bare(&fitted(COLUMNS, rows, Some(60)));
        assert!(
            text.lines().all(|line| line.chars().count() <= 60),
            "{text}"
        );
        let cells = text.lines().skip(1).map(|line| line.split_whitespace());
        let first: String = cells.filter_map(|mut cells| cells.next()).collect();
        assert_eq!(first, long);
        // Numbers stay whole; where no room is left for the texts, the terminal breaks the lines itself.
        let rows = vec![vec![long.clone(), "2,735,308".to_owned()]];
        let text = bare(&fitted(COLUMNS, rows.clone(), Some(20)));
        assert!(
            text.lines().nth(1).unwrap().ends_with("  2,735,308"),
            "{text}"
        );
        assert_eq!(
            fitted(COLUMNS, rows.clone(), Some(19)),
            fitted(COLUMNS, rows, None)
        );
    }

    #[test]
    fn numbers_read_as_people_write_them() {
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(2_735_308), "2,735,308");
        assert_eq!(percent(0.977), "97.7 %");
        assert_eq!(duration(1.449), "1.4 s");
        assert_eq!(duration(252.0), "4 m 12 s");
        assert_eq!(duration(21_850.0), "6 h 04 m");
        assert_eq!(duration(532_900.0), "6 d 04 h");
        assert_eq!(duration(-1.0), "-1 s");
        assert_eq!(counted(1, "waiter", "waiters"), "1 waiter");
        assert_eq!(counted(1_000, "waiter", "waiters"), "1,000 waiters");
    }
}
