//! Reads Prometheus text and OpenMetrics text in one pass.
//!
//! Promises: every line is read by itself, so that one bad line spoils nothing else; bad lines are
//! skipped and counted; nothing is allocated except for label values that contain escapes. Hand
//! written, since the readers that exist drop names with a colon in silence or give up a whole
//! body for one odd line. What the values mean is left to `dialect`.

use std::borrow::Cow;

/// One sample line of a wanted name.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sample<'a> {
    /// Name as it is written, with its colons.
    pub name: &'a str,
    /// May be NaN or infinite: both are legal.
    pub value: f64,
    /// The checked text between the braces.
    labels: &'a str,
}

impl<'a> Sample<'a> {
    /// The labels in the order of the line, unescaped.
    pub fn labels(&self) -> impl Iterator<Item = (&'a str, Cow<'a, str>)> + use<'a> {
        let mut rest = self.labels;
        std::iter::from_fn(move || {
            let label = rest.trim_start_matches(|letter| is_blank(letter) || letter == ',');
            let (name, value, after) = one_label(label)?;
            rest = after;
            Some((name, unescape(value)))
        })
    }

    /// The value of one label; `None` when the line does not carry it.
    #[must_use]
    pub fn label(&self, wanted: &str) -> Option<Cow<'a, str>> {
        self.labels()
            .find_map(|(name, value)| (name == wanted).then_some(value))
    }
}

/// How many lines were of which sort; comments and blank lines are in neither.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Tally {
    /// Samples of any name, wanted or not.
    pub good: u64,
    /// Lines that are no sample.
    pub bad: u64,
}

impl Tally {
    /// CAP2: a body with lines of which none is a sample, such as an HTML error page, is no exposition.
    #[must_use]
    pub const fn unreadable(self) -> bool {
        self.good == 0 && self.bad > 0
    }
}

/// The samples of one body whose name is wanted.
#[derive(Debug)]
pub struct Samples<'a, W> {
    rest: &'a str,
    wanted: W,
    tally: Tally,
}

impl<'a, W: FnMut(&str) -> bool> Samples<'a, W> {
    /// Reads `text`; samples whose name is not `wanted` are only counted.
    pub const fn new(text: &'a str, wanted: W) -> Self {
        Self {
            rest: text,
            wanted,
            tally: Tally { good: 0, bad: 0 },
        }
    }

    /// The lines read so far: those of the whole body once the iterator has ended.
    #[must_use]
    pub const fn tally(&self) -> Tally {
        self.tally
    }

    fn line(&mut self) -> Option<&'a str> {
        if self.rest.is_empty() {
            return None;
        }
        let (line, rest) = self.rest.split_once('\n').unwrap_or((self.rest, ""));
        self.rest = rest;
        Some(line)
    }
}

impl<'a, W: FnMut(&str) -> bool> Iterator for Samples<'a, W> {
    type Item = Sample<'a>;

    fn next(&mut self) -> Option<Sample<'a>> {
        while let Some(line) = self.line() {
            let line = line.trim_matches(is_blank);
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let Some(sample) = sample(line) else {
                self.tally.bad = self.tally.bad.saturating_add(1);
                continue;
            };
            self.tally.good = self.tally.good.saturating_add(1);
            if (self.wanted)(sample.name) {
                return Some(sample);
            }
        }
        None
    }
}

/// The carriage return of a CRLF counts as a blank.
const fn is_blank(letter: char) -> bool {
    matches!(letter, ' ' | '\t' | '\r')
}

const fn is_name_letter(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || matches!(letter, '_' | ':')
}

/// `name {labels} value [timestamp] [# exemplar]`; `None` for anything else.
fn sample(line: &str) -> Option<Sample<'_>> {
    let name_end = line.find(|letter| !is_name_letter(letter))?;
    let (name, rest) = line.split_at_checked(name_end)?;
    if name.is_empty() || name.starts_with(|letter: char| letter.is_ascii_digit()) {
        return None;
    }
    let after_name = rest.trim_start_matches(is_blank);
    let (labels, rest) = match after_name.strip_prefix('{') {
        Some(inside) => label_block(inside)?,
        // without braces a blank must part name and value
        None if after_name.len() == rest.len() => return None,
        None => ("", after_name),
    };
    let value = value_of(rest)?;
    Some(Sample {
        name,
        value,
        labels,
    })
}

/// Parts the text after `{` into the labels and what follows `}`. A comma after the last label is legal.
fn label_block(inside: &str) -> Option<(&str, &str)> {
    let mut rest = inside;
    loop {
        rest = rest.trim_start_matches(is_blank);
        if let Some(after) = rest.strip_prefix('}') {
            let length = inside.len().checked_sub(rest.len())?;
            return Some((inside.get(..length)?, after));
        }
        let (_, _, after) = one_label(rest)?;
        rest = after.trim_start_matches(is_blank);
        match rest.strip_prefix(',') {
            Some(after) => rest = after,
            None if rest.starts_with('}') => {}
            None => return None,
        }
    }
}

/// `name = "value"`: name, raw value, rest.
fn one_label(text: &str) -> Option<(&str, &str, &str)> {
    let (name, rest) = text.split_once('=')?;
    let name = name.trim_matches(is_blank);
    // wider than the format, so that a dot or dash in the name of a label costs no reading
    if name.is_empty() || name.contains(['{', '}', '"', ',', '#', ' ']) {
        return None;
    }
    let quoted = rest.trim_start_matches(is_blank).strip_prefix('"')?;
    let (value, rest) = quoted.split_at_checked(closing_quote(quoted)?)?;
    Some((name, value, rest.strip_prefix('"')?))
}

fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return Some(at),
            _ => {}
        }
    }
    None
}

/// The value behind name and labels. A timestamp is checked and dropped, since engines write none
/// that could be trusted; an exemplar is dropped unread.
fn value_of(text: &str) -> Option<f64> {
    let mut tokens = text.split(is_blank).filter(|token| !token.is_empty());
    let value = number(tokens.next()?)?;
    match tokens.next() {
        None => Some(value),
        Some(token) if token.starts_with('#') => Some(value),
        Some(token) => {
            number(token)?;
            tokens
                .next()
                .is_none_or(|token| token.starts_with('#'))
                .then_some(value)
        }
    }
}

fn number(token: &str) -> Option<f64> {
    token.parse().ok()
}

/// `\\`, `\"` and `\n`; another escape stays as it is written.
fn unescape(raw: &str) -> Cow<'_, str> {
    if !raw.contains('\\') {
        return Cow::Borrowed(raw);
    }
    let mut text = String::with_capacity(raw.len());
    let mut letters = raw.chars();
    while let Some(letter) = letters.next() {
        if letter != '\\' {
            text.push(letter);
            continue;
        }
        match letters.next() {
            Some('n') => text.push('\n'),
            Some(plain @ ('\\' | '"')) => text.push(plain),
            Some(other) => {
                text.push('\\');
                text.push(other);
            }
            None => text.push('\\'),
        }
    }
    Cow::Owned(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(text: &str) -> (Vec<Sample<'_>>, Tally) {
        let mut samples = Samples::new(text, |_: &str| true);
        let found = samples.by_ref().collect();
        (found, samples.tally())
    }

    fn only(line: &str) -> Sample<'_> {
        let (found, tally) = all(line);
        assert_eq!((tally.good, tally.bad), (1, 0), "{line}");
        found[0]
    }

    /// CAP2: legal details of the format do not change what is read.
    #[test]
    fn cap2_legal_details() {
        assert_eq!(only("a 1").value, 1.0);
        assert_eq!(only("a:b_total 5E5 1764400000000").value, 5e5);
        assert_eq!(only("  a { x = \"1\" , }\t+4  ").value, 4.0);
        assert_eq!(only("a{} 2").value, 2.0);
        assert_eq!(only("a{x=\"1\"}2").value, 2.0);
        assert!(only("a NaN").value.is_nan());
        assert_eq!(only("a +Inf").value, f64::INFINITY);
        assert_eq!(only("a -Inf").value, f64::NEG_INFINITY);
        assert_eq!(
            only("a_total{x=\"1\"} 17 1.5 # {trace=\"q\"} 0.5 1.2").value,
            17.0
        );
        assert_eq!(only("a_bucket{le=\"1\"} 17 # {} 0.5").value, 17.0);
        let (found, tally) = all("a 1\r\nb 2\r\n\r\n# EOF\r\n");
        assert_eq!(found[1].value, 2.0);
        assert_eq!(tally, Tally { good: 2, bad: 0 });
    }

    /// CAP2: braces, quotes, commas and # inside label values are text.
    #[test]
    fn cap2_label_values_are_text() {
        let sample = only(r#"a{m="x}y",n="b \"c\" {d=1},e # f\\g\nh\q"} 3"#);
        assert_eq!(sample.value, 3.0);
        assert_eq!(sample.label("m").as_deref(), Some("x}y"));
        assert_eq!(
            sample.label("n").as_deref(),
            Some("b \"c\" {d=1},e # f\\g\nh\\q")
        );
        assert_eq!(sample.label("o"), None);
        assert_eq!(sample.labels().count(), 2);
    }

    /// CAP2: lines that are no sample are counted and skipped, the rest stands.
    #[test]
    fn cap2_bad_lines_are_counted() {
        for bad in [
            "a",
            "a b",
            "1a 1",
            "a{x=\"1\" 1",
            "a{x=\"1\"y=\"2\"} 1",
            "a{x=1} 1",
            "a{x=\"1} 1",
            "a{,} 1",
            "a 1 2 3",
            "a 1 x",
            "a{x=\"1\"}",
            "{x=\"1\"} 1",
            "Internal Server Error",
        ] {
            let body = format!("before 1\n{bad}\nafter 2");
            let (found, tally) = all(&body);
            assert_eq!(tally, Tally { good: 2, bad: 1 }, "{bad}");
            assert_eq!(found.len(), 2, "{bad}");
        }
    }

    /// CAP2: an error page is unreadable; an empty body is readable and has nothing.
    #[test]
    fn cap2_error_page_is_unreadable() {
        let page =
            "<html>\n<head><title>502 Bad Gateway</title></head>\n<body>x 1 y</body>\n</html>\n";
        assert!(all(page).1.unreadable());
        assert!(!all("").1.unreadable());
        assert!(!all("# HELP a b\n").1.unreadable());
    }

    /// CAP2: comments that contain metric names give nothing; unwanted names are only counted.
    #[test]
    fn cap2_only_wanted_names() {
        let text = "# a comment with want 9\nwant_note 9\nwant 1\n";
        let mut samples = Samples::new(text, |name: &str| name == "want");
        assert_eq!(samples.next().map(|sample| sample.value), Some(1.0));
        assert_eq!(samples.next(), None);
        assert_eq!(samples.tally(), Tally { good: 2, bad: 0 });
    }

    #[derive(Clone, Debug)]
    struct Line {
        name: String,
        labels: Vec<(String, String)>,
        value: f64,
        blanks: bool,
        comma: bool,
        tail: &'static str,
    }

    fn line() -> impl Strategy<Value = Line> {
        (
            "[a-zA-Z_:][a-zA-Z0-9_:]{0,12}",
            prop::collection::vec(("[a-zA-Z_][a-zA-Z0-9_]{0,6}", "[^\r]{0,8}"), 0..4),
            prop::num::f64::ANY,
            any::<bool>(),
            any::<bool>(),
            prop::sample::select(vec!["", " 12", " -1.5", " # {a=\"b\"} 1", " 3 # {} 2 4"]),
        )
            .prop_map(|(name, labels, value, blanks, comma, tail)| Line {
                name,
                labels,
                value,
                blanks,
                comma,
                tail,
            })
    }

    fn written(line: &Line) -> String {
        let blank = if line.blanks { " \t" } else { "" };
        let labels: Vec<String> = line
            .labels
            .iter()
            .map(|(name, value)| {
                let value = value
                    .replace('\\', "\\\\")
                    .replace('"', "\\\"")
                    .replace('\n', "\\n");
                format!("{blank}{name}{blank}={blank}\"{value}\"{blank}")
            })
            .collect();
        let mut block = labels.join(",");
        if line.comma && !block.is_empty() {
            block.push(',');
        }
        if !block.is_empty() || line.comma {
            block = format!("{blank}{{{block}{blank}}}");
        }
        format!("{blank}{}{block} {}{}", line.name, line.value, line.tail)
    }

    proptest! {
        /// CAP2: what a generator writes is read back, whatever bad lines stand between.
        #[test]
        fn cap2_reads_what_was_written(
            lines in prop::collection::vec(line(), 0..20),
            crlf in any::<bool>(),
            last_end in any::<bool>(),
            noise in prop::sample::select(vec!["", "# TYPE a:b gauge", "<p>bad</p>"]),
        ) {
            let end = if crlf { "\r\n" } else { "\n" };
            let mut body = String::new();
            for line in &lines {
                body.push_str(noise);
                body.push_str(end);
                body.push_str(&written(line));
                body.push_str(end);
            }
            if !last_end {
                body.truncate(body.trim_end_matches(['\r', '\n']).len());
            }
            let (found, tally) = all(&body);
            let bad = if noise.starts_with('<') { lines.len() as u64 } else { 0 };
            prop_assert_eq!(tally, Tally { good: lines.len() as u64, bad });
            for (line, sample) in lines.iter().zip(found) {
                prop_assert_eq!(&line.name, sample.name);
                prop_assert!(line.value == sample.value || (line.value.is_nan() && sample.value.is_nan()));
                let labels: Vec<_> = sample.labels().map(|(name, value)| (name.to_owned(), value.into_owned())).collect();
                prop_assert_eq!(&line.labels, &labels);
            }
        }

        /// CAP2: no body makes the reader stop or panic, and each line is counted once.
        #[test]
        fn cap2_any_text_is_survived(body in "(\\PC|[\\n\\r\\t{}\",=#\\\\ 0-9a:]){0,200}") {
            let (_, tally) = all(&body);
            let lines = body.split('\n').map(|line| line.trim_matches(is_blank)).filter(|line| !line.is_empty() && !line.starts_with('#')).count();
            prop_assert_eq!(tally.good + tally.bad, lines as u64);
        }
    }
}
