//! A strict reader of kvgate's own `/metrics` in OpenMetrics: what it does not expect fails the test.

use std::collections::{BTreeMap, BTreeSet};

/// One family.
#[derive(Clone, Debug, Default)]
pub struct Family {
    pub kind: String,
    pub help: String,
    pub unit: Option<String>,
    /// Names of its labels, `le` left out.
    pub labels: BTreeSet<String>,
}

/// One scrape that was read whole.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    /// By name, without the suffixes of samples.
    pub families: BTreeMap<String, Family>,
    /// By series, as it stands in the text.
    pub samples: BTreeMap<String, f64>,
    /// Names of samples with their families.
    pub names: BTreeMap<String, String>,
    pub bytes: usize,
}

impl Scrape {
    #[track_caller]
    pub fn read(text: &str) -> Self {
        let mut scrape = Self {
            bytes: text.len(),
            ..Self::default()
        };
        let body = text.strip_suffix("# EOF\n").expect("the end is marked");
        let mut present = String::new();
        for line in body.lines() {
            if let Some(comment) = line.strip_prefix("# ") {
                let (word, rest) = comment.split_once(' ').unwrap();
                let (name, value) = rest.split_once(' ').unwrap();
                let family = scrape.families.entry(name.to_owned()).or_default();
                match word {
                    "HELP" => {
                        assert!(family.help.is_empty(), "HELP twice: {line}");
                        value.clone_into(&mut family.help);
                        name.clone_into(&mut present);
                    }
                    "TYPE" => value.clone_into(&mut family.kind),
                    "UNIT" => {
                        assert!(name.ends_with(&format!("_{value}")), "{line}");
                        family.unit = Some(value.to_owned());
                    }
                    _ => panic!("{line}"),
                }
                assert_eq!(name, present, "families are not mixed: {line}");
                continue;
            }
            scrape.sample(line, &present);
        }
        for (name, family) in &scrape.families {
            assert!(
                !family.kind.is_empty() && family.help.ends_with('.'),
                "{name}: {family:?}"
            );
        }
        scrape
    }

    fn sample(&mut self, line: &str, present: &str) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let value: f64 = value.parse().unwrap();
        assert!(value.is_finite() && value >= 0.0, "{line}");
        let (name, labels) = parse_series(series);
        let family = self.families.get_mut(present).expect("HELP comes first");
        let suffix = name.strip_prefix(present).unwrap_or_else(|| {
            panic!("{line}: a sample of another family than {present}");
        });
        let suffixes: &[&str] = match family.kind.as_str() {
            "counter" => &["_total"],
            "gauge" => &[""],
            "info" => &["_info"],
            "histogram" => &["_bucket", "_sum", "_count"],
            kind => panic!("{present}: {kind}"),
        };
        assert!(suffixes.contains(&suffix), "{line}");
        family
            .labels
            .extend(labels.into_keys().filter(|label| label != "le"));
        self.names.insert(name, present.to_owned());
        let again = self.samples.insert(series.to_owned(), value);
        assert!(again.is_none(), "{line} stands twice");
    }

    /// The value of a series.
    #[track_caller]
    pub fn value(&self, series: &str) -> f64 {
        self.get(series)
            .unwrap_or_else(|| panic!("no {series} in {:#?}", self.samples.keys()))
    }

    pub fn get(&self, series: &str) -> Option<f64> {
        self.samples.get(series).copied()
    }

    /// The sum of the series whose text contains all of these.
    pub fn sum(&self, parts: &[&str]) -> f64 {
        let of = |series: &&String| parts.iter().all(|part| series.contains(part));
        let samples = self.samples.iter();
        samples
            .filter(|(series, _)| of(series))
            .map(|(_, value)| value)
            .sum()
    }

    /// Every series, without values.
    pub fn series(&self) -> BTreeSet<&str> {
        self.samples.keys().map(String::as_str).collect()
    }

    /// Series of counters and histograms, which never go back within a process.
    pub fn cumulative(&self) -> BTreeMap<&str, f64> {
        self.samples
            .iter()
            .filter(|(series, _)| {
                let (name, _) = parse_series(series);
                let kind = &self.families[&self.names[&name]].kind;
                kind == "counter" || kind == "histogram"
            })
            .map(|(series, value)| (series.as_str(), *value))
            .collect()
    }
}

/// Name and labels of a series.
pub fn parse_series(series: &str) -> (String, BTreeMap<String, String>) {
    let Some((name, rest)) = series.split_once('{') else {
        return (series.to_owned(), BTreeMap::new());
    };
    let mut labels = BTreeMap::new();
    let mut rest = rest.strip_suffix('}').unwrap();
    while !rest.is_empty() {
        let (label, after) = rest.split_once("=\"").unwrap();
        let end = after
            .char_indices()
            .scan(false, |escaped, (at, c)| {
                let ends = c == '"' && !*escaped;
                *escaped = c == '\\' && !*escaped;
                Some((at, ends))
            })
            .find(|(_, ends)| *ends)
            .unwrap()
            .0;
        labels.insert(label.to_owned(), after[..end].to_owned());
        rest = after[end + 1..].trim_start_matches(',');
    }
    (name.to_owned(), labels)
}
