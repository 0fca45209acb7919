//! House checks: what the compiler cannot see, as ordinary tests.
//!
//! Each fault names the file, the line and the better way. The tables below are the rules; they
//! are meant to be extended in the change that needs it, together with `docs/ARCHITECTURE.md`.
#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a check that cannot read the tree must fail loudly"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

// ---------------------------------------------------------------------------------------------
// The tables
// ---------------------------------------------------------------------------------------------

/// The rules of `docs/semantics.md` that are built: a prefix, and its numbers (none: all of them).
#[rustfmt::skip]
const BUILT: &[(&str, &[u32])] = &[
    ("ID", &[]),
    ("TOK", &[]),
    ("TIM", &[]),
    ("CAP", &[]),
    ("DEC", &[]),
    ("TIC", &[]),
    ("LEA", &[]),
    ("CLO", &[]),
    ("CNT", &[1]),
    ("REP", &[1]),
    ("DUR", &[1, 2, 3, 4, 5, 6]),
    ("SET", &[]),
];

/// Prefixes of rules that are not built yet.
const LATER: &[&str] = &[];

/// Libraries that belong to few places: the name in code, where it may be named, the better way.
/// A place that ends in `/` is a folder. `main.rs`, `boot.rs` and the command line join the rooms,
/// so they are listed only where they need the library itself.
#[rustfmt::skip]
const ROOMS: &[(&str, &[&str], &str)] = &[
    ("redb", &["src/store/", "migrations/", "src/load/machine.rs"], "go through `kvgate_core::store::Store`"),
    ("postcard", &["src/store/", "migrations/"], "row encodings belong to the store"),
    ("rustix", &["src/store/"], "only the store asks for room on the disk"),
    ("axum", &["src/http/", "src/web/", "src/demo/", "src/load/bare.rs"], "hand a plain value to the HTTP room"),
    ("hyper", &["src/http/", "src/web/", "src/demo/"], "hand a plain value to the HTTP room"),
    ("hyper_util", &["src/http/", "src/web/", "src/demo/"], "hand a plain value to the HTTP room"),
    ("http_body", &["src/http/", "src/web/", "src/demo/"], "hand a plain value to the HTTP room"),
    ("http_body_util", &["src/http/", "src/web/", "src/demo/"], "hand a plain value to the HTTP room"),
    ("tower_http", &["src/web/"], "only pages are compressed"),
    ("tower", &["src/http/", "src/web/", "src/demo/"], "hand a plain value to the HTTP room"),
    ("httparse", &["src/load/wire.rs"], "heads of answers are read by the load only; the rest has hyper and reqwest"),
    ("hdrhistogram", &["src/load/"], "the load counts latencies; metrics are made in the telemetry room"),
    ("tokio_rustls", &["src/http/"], "TLS of the service belongs to its listeners"),
    ("sd_notify", &["src/supervisor.rs"], "the supervisor is told in one place"),
    ("utoipa", &["src/http/", "src/web/", "crates/api/"], "schemas belong to the wire types"),
    ("utoipa_axum", &["src/http/", "src/web/"], "routes belong to the HTTP room"),
    ("reqwest", &["src/fleet/", "src/demo/", "src/cli.rs", "src/cli/", "src/check.rs", "src/check/", "clients/rust/src/wire.rs", "clients/rust/src/config.rs"], "readings belong to the fleet room, calls of the client to its wire"),
    ("sha2", &["src/access/"], "secrets are hashed and compared in the access room"),
    ("subtle", &["src/access/"], "secrets are hashed and compared in the access room"),
    ("cookie", &["src/access/"], "the cookie of a log-in is made in the access room"),
    ("prometheus_client", &["src/telemetry.rs", "src/telemetry/", "src/http/"], "metrics are made in the telemetry room"),
    ("askama", &["src/web/"], "templates belong to the web room"),
    ("clap", &["src/cli.rs", "src/cli/", "src/config.rs", "src/config/", "src/main.rs"], "hand on a checked configuration instead of arguments"),
    ("clap_complete", &["src/cli.rs", "src/cli/"], "completions are a command"),
    ("comfy_table", &["src/cli/"], "tables for people belong to the command line"),
    ("terminal_size", &["src/cli/"], "only the command line writes for a terminal"),
    ("anstream", &["src/cli/"], "colour belongs to the command line"),
    ("anstyle", &["src/cli/"], "colour belongs to the command line"),
    ("clap_mangen", &["src/cli/"], "the manual page is a command"),
    ("toml", &["src/config.rs", "src/config/"], "hand on a checked configuration instead of a file"),
    ("anyhow", &["src/main.rs", "src/boot.rs", "src/boot/", "src/cli.rs", "src/cli/", "src/check.rs", "src/check/"], "one small `thiserror` enum per room, its source kept"),
    ("jiff", &["src/clock.rs", "src/http/", "src/web/", "src/demo/"], "inside, times are `kvgate_core::units::Timestamp`"),
    ("SystemTime", &["src/clock.rs"], "ask the clock room: wall time jumps, its line does not"),
    ("tracing_subscriber", &["src/telemetry.rs", "src/telemetry/"], "emit with `tracing`; set-up is in one place"),
];

/// What a place never names: libraries, or other rooms as `crate::room`.
#[rustfmt::skip]
const NEVER: &[(&str, &[&str], &str)] = &[
    ("crates/core/src/", &["std"], "the core is `no_std`: use `core` and `alloc`, and take time as an argument"),
    ("crates/core/src/", &["serde"], "core types do not cross the wire: translate in `http` or `store`"),
    ("crates/", &["tokio", "tracing", "kvgate"], "the packages below the service stay plain libraries"),
    ("clients/rust/", &["kvgate", "kvgate_core", "kvgate_sim"], "a client knows the wire, and nothing behind it"),
    ("migrations/", &["tokio", "kvgate_core", "kvgate_api"], "a step owns frozen copies of what it reads and writes"),
    ("src/access/", &["axum", "tokio", "crate::store", "crate::gate", "crate::http", "crate::web", "crate::fleet"], "who may ask is judged from plain values"),
    ("src/store/", &["tokio"], "a store is synchronous, on the writer's own thread"),
    ("src/store/", &["crate::gate", "crate::http", "crate::web", "crate::fleet", "crate::history"], "a store knows records and images only"),
    ("src/gate/", &["crate::http", "crate::web", "crate::fleet", "crate::history"], "the gate is called; it calls nobody but core and store"),
    ("src/history/", &["crate::store", "crate::http", "crate::web", "crate::fleet", "tokio"], "a history reads the view, on a thread of its own"),
    ("src/fleet/", &["crate::store", "crate::http", "crate::web"], "hand a round to the `Gate`"),
    ("src/http/", &["crate::store", "crate::fleet"], "ask the `Gate`, or read the view"),
    ("src/web/", &["crate::store", "crate::fleet"], "read the view"),
    ("src/demo/", &["crate::store", "crate::gate"], "the demo speaks HTTP, as any fleet and any caller would"),
    ("src/load/", &["crate::store", "crate::gate", "crate::http", "crate::web", "crate::fleet"], "the load speaks HTTP, as any caller would, to a process of its own"),
];

/// Text that ties a file to one machine or one registry. Written in pieces, so that this file passes.
#[rustfmt::skip]
const FOREIGN: &[(&str, &str)] = &[
    (concat!("/wo", "rk/"), "name files relative to the project"),
    (concat!("/ro", "ot"), "name files relative to the project"),
    (concat!("/tm", "p/"), "make a temporary directory with `tempfile`"),
    (concat!("/ho", "me/"), "name files relative to the project"),
    (concat!("../sha", "red"), "the project stands by itself: bring the text into `docs/`"),
    (concat!("crates", ".io"), "name the package only; cargo knows where it lives"),
    (concat!("pypi", ".org"), "name the package only; pip knows where it lives"),
    (concat!("python", "hosted.org"), "name the package only; pip knows where it lives"),
    (concat!("npm", "js."), "name the package only; npm knows where it lives"),
    (concat!("arti", "factory"), "name the package only"),
];

/// Areas of the cases from the field, and how many there are of each.
const CASES: [(char, usize); 9] = [
    ('D', 4),
    ('L', 3),
    ('M', 9),
    ('P', 2),
    ('Q', 9),
    ('S', 7),
    ('U', 4),
    ('W', 7),
    ('X', 5),
];

/// Files that a tool writes, with addresses in them.
const WRITTEN_BY_TOOLS: &[&str] = &["Cargo.lock"];

// ---------------------------------------------------------------------------------------------
// The checks
// ---------------------------------------------------------------------------------------------

#[test]
fn every_built_rule_is_named_by_a_test() {
    let tree = tree();
    let rules = rules(&tree);
    let mut evidence = String::new();
    for file in tree
        .iter()
        .filter(|file| file.path.ends_with(".rs") && file.path != "tests/it/tidy.rs")
    {
        let mask = file.test_lines();
        for (number, line) in file.text.lines().enumerate() {
            if mask.get(number) == Some(&true) {
                evidence.push_str(line);
                evidence.push('\n');
            }
        }
    }
    let mut faults = Vec::new();
    for (rule, line) in &rules {
        if is_built(rule) && !names(&evidence, rule) {
            faults.push(format!(
                "docs/semantics.md:{line}: no test names rule {rule}; write `{rule}` in a comment of the test that \
                 holds it, or `{}_` in its name",
                rule.to_lowercase()
            ));
        }
    }
    report(&faults);
}

#[test]
fn rules_are_numbered_without_gaps_and_named_rightly() {
    let tree = tree();
    let rules = rules(&tree);
    let mut faults = Vec::new();
    let mut last: BTreeMap<&str, u32> = BTreeMap::new();
    for (rule, line) in &rules {
        let (prefix, number) = split_rule(rule);
        let last = last.entry(prefix).or_insert(0);
        if number != *last + 1 {
            faults.push(format!(
                "docs/semantics.md:{line}: {rule} follows {prefix}{last}; number rules one by one"
            ));
        }
        *last = number;
        if !BUILT.iter().any(|(built, _)| *built == prefix) && !LATER.contains(&prefix) {
            faults.push(format!("docs/semantics.md:{line}: say in `BUILT` or `LATER` of tests/it/tidy.rs what {prefix} is"));
        }
    }
    let known: BTreeSet<&str> = rules.iter().map(|(rule, _)| rule.as_str()).collect();
    let prefixes: BTreeSet<&str> = last.keys().copied().collect();
    for (prefix, numbers) in BUILT {
        let missing = if numbers.is_empty() {
            !prefixes.contains(prefix)
        } else {
            false
        };
        let missing = missing
            || numbers
                .iter()
                .any(|number| !known.contains(format!("{prefix}{number}").as_str()));
        if missing {
            faults.push(format!("docs/semantics.md:1: the built rules {prefix} {numbers:?} are not all there; keep every id"));
        }
    }
    for file in tree
        .iter()
        .filter(|file| is_prose_or_code(&file.path) && file.path != "tests/it/tidy.rs")
    {
        for (number, line) in file.text.lines().enumerate() {
            for rule in mentioned_rules(line, &prefixes) {
                if !known.contains(rule.as_str()) {
                    faults.push(format!(
                        "{}:{}: there is no rule {rule} in docs/semantics.md",
                        file.path,
                        number + 1
                    ));
                }
            }
        }
    }
    report(&faults);
}

#[test]
fn libraries_and_rooms_keep_their_places() {
    let mut faults = Vec::new();
    for file in &tree() {
        let service = ["src/", "crates/", "migrations/", "clients/rust/"]
            .iter()
            .any(|place| file.path.starts_with(place));
        if !service
            || !file.path.ends_with(".rs")
            || is_test_file(&file.path)
            || file.path.contains("/benches/")
        {
            continue;
        }
        let mask = file.test_lines();
        let used = roots(&file.code())
            .into_iter()
            .filter(|(line, _)| mask.get(line - 1) != Some(&true));
        for (line, root) in used {
            for (library, places, better) in ROOMS {
                if root == *library && !places.iter().any(|place| file.path.starts_with(place)) {
                    faults.push(format!(
                        "{}:{line}: `{library}` is used in {} only; {better}",
                        file.path,
                        places.join(", ")
                    ));
                }
            }
            for (place, banned, better) in NEVER {
                if file.path.starts_with(place) && banned.contains(&root.as_str()) {
                    faults.push(format!(
                        "{}:{line}: {place} never names `{root}`; {better}",
                        file.path
                    ));
                }
            }
        }
    }
    report(&faults);
}

#[test]
fn the_core_has_no_floats() {
    let mut faults = Vec::new();
    for file in tree()
        .iter()
        .filter(|file| file.path.starts_with("crates/core/src/") && file.path.ends_with(".rs"))
    {
        let mask = file.test_lines();
        for (line, found) in floats(&file.code()) {
            if mask.get(line - 1) != Some(&true) {
                faults.push(format!(
                    "{}:{line}: `{found}` is a float; ratios are `Ppm`, amounts `Tokens`, and floats end where gauges are read",
                    file.path
                ));
            }
        }
    }
    report(&faults);
}

#[test]
fn no_file_is_tied_to_a_machine_or_a_registry() {
    let mut faults = Vec::new();
    for file in tree()
        .iter()
        .filter(|file| !WRITTEN_BY_TOOLS.contains(&file.path.as_str()))
    {
        for (number, line) in file.text.lines().enumerate() {
            for (text, better) in foreign(line) {
                faults.push(format!(
                    "{}:{}: `{text}` does not belong into the tree; {better}",
                    file.path,
                    number + 1
                ));
            }
        }
    }
    report(&faults);
}

#[test]
fn nothing_is_left_for_later_and_tests_do_not_sleep() {
    let unfinished = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("X", "XX"),
    ];
    let mut faults = Vec::new();
    for file in &tree() {
        if !["rs", "py", "toml", "html", "css"]
            .iter()
            .any(|ending| file.path.ends_with(&format!(".{ending}")))
        {
            continue;
        }
        for (number, line) in file.text.lines().enumerate() {
            for word in unfinished {
                if has_word(line, word) {
                    faults.push(format!(
                        "{}:{}: `{word}` is a note to oneself; do it, or say in a full sentence what is missing and why",
                        file.path,
                        number + 1
                    ));
                }
            }
        }
        if file.path.ends_with(".rs") {
            let mask = file.test_lines();
            for (line, found, better) in shortcuts(&file.code()) {
                if mask.get(line - 1) == Some(&true) {
                    faults.push(format!(
                        "{}:{line}: `{found}` in a test; {better}",
                        file.path
                    ));
                }
            }
        }
    }
    report(&faults);
}

/// The table of attacks says which test tries each of them.
#[test]
fn every_test_that_the_security_page_names_is_there() {
    let tree = tree();
    let page = tree.iter().find(|file| file.path == "docs/SECURITY.md");
    let page = page.expect("the tree has docs/SECURITY.md");
    let mut faults = Vec::new();
    let mut count = 0;
    for (number, line) in page.text.lines().enumerate() {
        let names = line.split('`').filter(|part| part.contains("::"));
        for name in names {
            count += 1;
            let function = name.rsplit("::").next().unwrap_or(name);
            let start = format!("fn {function}(");
            let is_there = tree
                .iter()
                .any(|file| file.path.ends_with(".rs") && file.text.contains(&start));
            if !is_there {
                faults.push(format!(
                    "docs/SECURITY.md:{}: there is no test `{name}`; name the one that holds the line",
                    number + 1
                ));
            }
        }
    }
    assert!(count > 20, "the table is read: {count}");
    report(&faults);
}

/// Every case from the field is held by a test of its name, and the table of cases names all of them.
#[test]
fn every_case_has_a_test_of_its_name() {
    let tree = tree();
    let page = tree.iter().find(|file| file.path == "docs/cases.md");
    let page = page.expect("the tree has docs/cases.md");
    let mut faults = Vec::new();
    let mut named: BTreeSet<&str> = BTreeSet::new();
    let mut found: BTreeMap<char, usize> = BTreeMap::new();
    for (number, line) in page.text.lines().enumerate() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, id, _, _, tests, ..] = cells.as_slice() else {
            continue;
        };
        let Some(area) = case_area(id) else {
            continue;
        };
        *found.entry(area).or_default() += 1;
        let place = format!("docs/cases.md:{}", number + 1);
        let mut has_its_name = false;
        for test in tests.split('`').filter(|part| part.contains("::")) {
            let function = test.rsplit("::").next().unwrap_or(test);
            has_its_name |= is_named_after(function, id);
            named.insert(function);
            if !tree.iter().any(|file| file.has_test(function)) {
                faults.push(format!("{place}: there is no test `{test}`"));
            }
        }
        for title in tests.split('"').skip(1).step_by(2) {
            has_its_name |= title.starts_with(&format!("{id}:"));
            let start = format!("test(\"{title}\"");
            let mut browser = tree
                .iter()
                .filter(|file| file.path.starts_with("tests/browser/"));
            let any = browser.clone().next().is_some();
            if any && !browser.any(|file| file.text.contains(&start)) {
                faults.push(format!(
                    "{place}: there is no test \"{title}\" in tests/browser"
                ));
            }
        }
        if !has_its_name {
            faults.push(format!(
                "{place}: no test of {id} bears its name; begin one with `{}_`",
                id.to_lowercase()
            ));
        }
    }
    assert_eq!(
        found,
        BTreeMap::from(CASES),
        "the table has every case of each area once"
    );
    for file in tree
        .iter()
        .filter(|file| file.path.starts_with("tests/it/cases/"))
    {
        for (number, function) in file.tests() {
            let id = function
                .split('_')
                .next()
                .unwrap_or_default()
                .to_uppercase();
            if case_area(&id).is_some() && !named.contains(function.as_str()) {
                faults.push(format!(
                    "{}:{number}: docs/cases.md does not name `{function}`",
                    file.path
                ));
            }
        }
    }
    report(&faults);
}

/// The area of an id such as `Q03`.
fn case_area(id: &str) -> Option<char> {
    let area = id.chars().next()?;
    let number = id.strip_prefix(area)?;
    let is_id = CASES.iter().any(|(known, _)| *known == area)
        && number.len() == 2
        && number.bytes().all(|byte| byte.is_ascii_digit());
    is_id.then_some(area)
}

fn is_named_after(function: &str, id: &str) -> bool {
    let start = format!("{}_", id.to_lowercase());
    let function = function.strip_prefix("test_").unwrap_or(function);
    function.starts_with(&start)
}

#[test]
fn relative_links_lead_somewhere() {
    let tree = tree();
    let pages: BTreeMap<&str, BTreeSet<String>> = tree
        .iter()
        .filter(|file| file.path.ends_with(".md"))
        .map(|file| (file.path.as_str(), anchors(&file.text)))
        .collect();
    let mut faults = Vec::new();
    for file in tree.iter().filter(|file| file.path.ends_with(".md")) {
        for (line, target) in links(&file.text) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((target.as_str(), ""));
            let place = if path.is_empty() {
                Some(file.path.clone())
            } else {
                resolve(&file.path, path)
            };
            let found = place
                .as_deref()
                .filter(|place| Path::new(ROOT).join(place).exists());
            match found {
                None => faults.push(format!(
                    "{}:{line}: the link `{target}` leads nowhere; mend or remove it",
                    file.path
                )),
                Some(_) if anchor.is_empty() => {}
                Some(place) => {
                    if pages
                        .get(place)
                        .is_some_and(|anchors| !anchors.contains(anchor))
                    {
                        faults.push(format!(
                            "{}:{line}: {place} has no heading `#{anchor}`; mend the link",
                            file.path
                        ));
                    }
                }
            }
        }
    }
    report(&faults);
}

/// Each part of the page that a command writes ends with the sum of its text.
#[test]
fn figures_are_as_the_command_wrote_them() {
    let tree = tree();
    let text = |path: &str| {
        tree.iter()
            .find(|file| file.path == path)
            .map_or("", |file| file.text.as_str())
    };
    let writers: Vec<&str> = text("benches/compare/tables.py")
        .lines()
        .filter_map(|line| line.trim().strip_prefix('"')?.split_once("\": "))
        .filter(|(name, writer)| *writer == format!("{name}_part,"))
        .map(|(name, _)| name)
        .collect();
    assert!(writers.len() > 5, "the writers are read: {writers:?}");
    report(&figure_faults(text("docs/performance.md"), &writers));
}

fn figure_faults(page: &str, writers: &[&str]) -> Vec<String> {
    const BETTER: &str = "write them with `python3 benches/compare/run.py --write`";
    let mut faults = Vec::new();
    for name in writers {
        let part = page
            .split_once(&format!("<!-- figures: {name} -->\n"))
            .and_then(|(_, rest)| rest.split_once(&format!("<!-- end of {name}: ")));
        let Some((body, end)) = part else {
            faults.push(format!(
                "docs/performance.md: there are no figures `{name}`; {BETTER}"
            ));
            continue;
        };
        let sum = format!("{:08x} -->", crc32fast::hash(body.as_bytes()));
        if !end.starts_with(&sum) {
            faults.push(format!(
                "docs/performance.md: the figures `{name}` were changed by hand; {BETTER}"
            ));
        }
    }
    let places = page.matches("<!-- figures: ").count();
    if places != writers.len() {
        faults.push(format!(
            "docs/performance.md: {places} places for figures, of which {} are written; {BETTER}",
            writers.len()
        ));
    }
    faults
}

#[test]
fn the_check_script_keeps_its_promises() {
    let tree = tree();
    let text = |path: &str| {
        tree.iter()
            .find(|file| file.path == path)
            .map_or("", |file| file.text.as_str())
    };
    let (script, page, readme) = (text(".ci/run"), text("docs/ci.md"), text("README.md"));
    let mut faults = Vec::new();
    let mut sum = 0;
    for (number, line) in script.lines().enumerate() {
        let Some((_, stage)) = line
            .split_once("stage ")
            .filter(|(before, _)| before.is_empty() || before.ends_with("Dwarnings "))
        else {
            continue;
        };
        let mut words = stage.split(' ');
        let (name, cap) = (
            words.next().unwrap_or(""),
            words
                .next()
                .and_then(|cap| cap.parse::<u32>().ok())
                .unwrap_or(0),
        );
        sum += cap;
        let row = page
            .lines()
            .find(|line| line.starts_with(&format!("| `{name}` |")));
        if !row.is_some_and(|row| row.ends_with(&format!("| {cap} min |"))) {
            faults.push(format!(
                ".ci/run:{}: docs/ci.md has no row `{name}` with a cap of {cap} min",
                number + 1
            ));
        }
    }
    if sum == 0 || sum > 60 {
        faults.push(format!(
            ".ci/run:1: the caps add up to {sum} min; an hour is the bound"
        ));
    }
    let command = "cargo test --workspace";
    if !readme.contains(command)
        || !script
            .lines()
            .any(|line| line.starts_with("stage tests ") && line.ends_with(command))
    {
        faults.push(format!(
            ".ci/run:1: the stage `tests` runs the test command of the README, `{command}`"
        ));
    }
    report(&faults);
}

// ---------------------------------------------------------------------------------------------
// The tree
// ---------------------------------------------------------------------------------------------

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A text file, with its path from the root of the project.
struct File {
    path: String,
    text: String,
}

impl File {
    /// The text without comments and the insides of literals.
    fn code(&self) -> String {
        code_only(&self.text)
    }

    /// For each line, whether it belongs to tests.
    /// The tests of the file: line and name.
    fn tests(&self) -> Vec<(usize, String)> {
        let mut tests = Vec::new();
        let mut is_test = false;
        for (number, line) in self.text.lines().enumerate() {
            let line = line.trim_start();
            if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
                is_test = true;
            }
            let name = line
                .strip_prefix("async ")
                .unwrap_or(line)
                .strip_prefix("fn ");
            if let Some((name, _)) = name.and_then(|rest| rest.split_once('('))
                && is_test
            {
                tests.push((number + 1, name.to_owned()));
                is_test = false;
            }
        }
        tests
    }

    /// Whether it has this test, in Rust or in Python.
    fn has_test(&self, function: &str) -> bool {
        if self.path.ends_with(".py") {
            return self.text.contains(&format!("def {function}("));
        }
        self.path.ends_with(".rs") && self.tests().iter().any(|(_, test)| test == function)
    }

    fn test_lines(&self) -> Vec<bool> {
        if is_test_file(&self.path) {
            vec![true; self.text.lines().count()]
        } else {
            test_mask(&self.code())
        }
    }
}

/// All text files of the project, in order. What git ignores is left out.
fn tree() -> Vec<File> {
    let mut files = Vec::new();
    walk(Path::new(ROOT), "", &mut files);
    files.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(
        files.iter().any(|file| file.path == "Cargo.toml"),
        "the tree at {ROOT} has no Cargo.toml"
    );
    files
}

fn walk(folder: &Path, prefix: &str, files: &mut Vec<File>) {
    const SKIPPED: &[&str] = &[
        "target",
        ".git",
        ".venv",
        "node_modules",
        "__pycache__",
        "kvgate-data",
    ];
    for entry in fs::read_dir(folder).expect("a folder of the project can be read") {
        let entry = entry.expect("an entry of a folder can be read");
        let name = entry.file_name().to_string_lossy().into_owned();
        if SKIPPED.contains(&name.as_str()) || name.starts_with("mutants.out") {
            continue;
        }
        let path = format!("{prefix}{name}");
        let kind = entry.file_type().expect("the kind of an entry is known");
        if kind.is_dir() {
            walk(&entry.path(), &format!("{path}/"), files);
        } else if kind.is_file() {
            // not text: fonts, stores; gone meanwhile: an editor's file
            if let Ok(text) = fs::read_to_string(entry.path()) {
                files.push(File { path, text });
            }
        }
    }
}

fn report(faults: &[String]) {
    assert!(
        faults.is_empty(),
        "{} to mend:\n{}\n",
        faults.len(),
        faults.join("\n")
    );
}

fn is_test_file(path: &str) -> bool {
    path.starts_with("tests/")
        || path.contains("/tests/")
        || ["/tests.rs", "/fuzz.rs"]
            .iter()
            .any(|end| path.ends_with(end))
}

fn is_prose_or_code(path: &str) -> bool {
    path.ends_with(".rs") || path.ends_with(".md")
}

// ---------------------------------------------------------------------------------------------
// Reading Rust
// ---------------------------------------------------------------------------------------------

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Blanks comments, strings and character literals; lines stay where they are.
fn code_only(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let mut out = String::with_capacity(text.len());
    let blank = |out: &mut String, from: usize, to: usize| {
        out.extend(
            chars[from..to.min(chars.len())]
                .iter()
                .map(|c| if *c == '\n' { '\n' } else { ' ' }),
        );
    };
    let mut i = 0;
    while i < chars.len() {
        let from = i;
        let begins = i == 0 || !is_name(at(i - 1));
        if at(i) == '/' && at(i + 1) == '/' {
            while i < chars.len() && at(i) != '\n' {
                i += 1;
            }
        } else if at(i) == '/' && at(i + 1) == '*' {
            let mut depth = 0;
            while i < chars.len() {
                match (at(i), at(i + 1)) {
                    ('/', '*') => (depth, i) = (depth + 1, i + 2),
                    ('*', '/') => (depth, i) = (depth - 1, i + 2),
                    _ => i += 1,
                }
                if depth == 0 {
                    break;
                }
            }
        } else if let Some(end) = begins.then(|| raw_string_end(&chars, i)).flatten() {
            i = end;
        } else if at(i) == '"' {
            i += 1;
            while i < chars.len() && at(i) != '"' {
                i += if at(i) == '\\' { 2 } else { 1 };
            }
            i += 1;
        } else if at(i) == '\'' && (at(i + 1) == '\\' || at(i + 2) == '\'') {
            i += if at(i + 1) == '\\' { 3 } else { 2 };
            while i < chars.len() && at(i) != '\'' {
                i += 1;
            }
            i += 1;
        } else {
            out.push(at(i));
            i += 1;
            continue;
        }
        blank(&mut out, from, i);
    }
    out
}

/// Where a raw string that begins at `i` ends, after its last `#`.
fn raw_string_end(chars: &[char], i: usize) -> Option<usize> {
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let mut j = if matches!(at(i), 'b' | 'c') { i + 1 } else { i };
    if at(j) != 'r' {
        return None;
    }
    j += 1;
    let mut hashes = 0;
    while at(j) == '#' {
        (j, hashes) = (j + 1, hashes + 1);
    }
    if at(j) != '"' {
        return None;
    }
    j += 1;
    while j < chars.len() {
        if at(j) == '"' && (1..=hashes).all(|k| at(j + k) == '#') {
            return Some(j + 1 + hashes);
        }
        j += 1;
    }
    Some(chars.len())
}

/// For each line of `code`, whether it belongs to an item under `#[cfg(test)]`.
fn test_mask(code: &str) -> Vec<bool> {
    let chars: Vec<char> = code.chars().collect();
    let mut mask = vec![false; code.lines().count()];
    let mut line = 0;
    let mut i = 0;
    while i < chars.len() {
        let rest = &chars[i..];
        if starts_with(rest, "#![cfg(test)]") {
            return vec![true; mask.len()];
        }
        if starts_with(rest, "#[cfg(test)]") || starts_with(rest, "#[cfg(all(test") {
            let end = item_end(&chars, i);
            let last = line + chars[i..end].iter().filter(|c| **c == '\n').count();
            for covered in mask.iter_mut().skip(line).take(last + 1 - line) {
                *covered = true;
            }
            (i, line) = (end, last);
            continue;
        }
        if chars[i] == '\n' {
            line += 1;
        }
        i += 1;
    }
    mask
}

fn starts_with(chars: &[char], text: &str) -> bool {
    text.chars()
        .enumerate()
        .all(|(i, c)| chars.get(i) == Some(&c))
}

/// Where the item with the attribute at `from` ends: after its `;`, its `,` or its closing brace.
fn item_end(chars: &[char], from: usize) -> usize {
    let (mut round, mut curly) = (0_i32, 0_i32);
    for (i, c) in chars.iter().enumerate().skip(from) {
        match c {
            '(' | '[' => round += 1,
            ')' | ']' => round -= 1,
            '{' => curly += 1,
            '}' => {
                curly -= 1;
                if curly <= 0 && round <= 0 {
                    return if curly < 0 { i } else { i + 1 };
                }
            }
            ';' | ',' if round == 0 && curly == 0 => return i + 1,
            _ => {}
        }
    }
    chars.len()
}

/// The names with which paths begin (`redb`, `std`, ...), `crate::room` for paths inside the
/// service, and single names that stand for a library item (`SystemTime`); with their lines.
fn roots(code: &str) -> Vec<(usize, String)> {
    let chars: Vec<char> = code.chars().collect();
    let mut found = Vec::new();
    let mut line = 1;
    let mut i = 0;
    while i < chars.len() {
        let begins = is_name(chars[i]) && (i == 0 || !is_name(chars[i - 1]));
        if !begins {
            line += usize::from(chars[i] == '\n');
            i += 1;
            continue;
        }
        let name = name_at(&chars, i);
        let end = i + name.chars().count();
        let after: String = chars[end..].iter().take(2).collect();
        if name == "use" && !after.starts_with('<') {
            let tree: String = chars[end..].iter().take_while(|c| **c != ';').collect();
            found.extend(imported(&tree).into_iter().map(|root| (line, root)));
            line += tree.matches('\n').count();
            i = end + tree.chars().count();
            continue;
        }
        let is_root = after == "::" && !continues_a_path(&chars, i);
        if is_root && name == "crate" {
            found.push((line, format!("crate::{}", name_at(&chars, end + 2))));
        } else if is_root || name == "SystemTime" || follows_extern_crate(&chars, i) {
            found.push((line, name));
        }
        i = end;
    }
    found
}

fn name_at(chars: &[char], from: usize) -> String {
    chars[from..].iter().take_while(|c| is_name(**c)).collect()
}

/// Whether the name at `i` stands after `something::` or after a dot.
fn continues_a_path(chars: &[char], i: usize) -> bool {
    let before = |k: usize| {
        i.checked_sub(k)
            .and_then(|at| chars.get(at))
            .copied()
            .unwrap_or(' ')
    };
    if before(1) == ':' && before(2) == ':' {
        return is_name(before(3)) || before(3) == '>';
    }
    before(1) == '.'
}

fn follows_extern_crate(chars: &[char], i: usize) -> bool {
    const WORDS: &str = "extern crate ";
    i.checked_sub(WORDS.len())
        .is_some_and(|from| starts_with(&chars[from..i], WORDS))
}

/// The roots of what a `use` brings in, groups included.
fn imported(tree: &str) -> Vec<String> {
    let mut found = Vec::new();
    for branch in branches(tree) {
        let branch = branch.trim().trim_start_matches("::");
        if let Some(group) = branch.strip_prefix('{') {
            found.extend(imported(group.strip_suffix('}').unwrap_or(group)));
            continue;
        }
        let root: String = branch.chars().take_while(|c| is_name(*c)).collect();
        let rest = branch[root.len()..].trim_start_matches("::");
        if root == "crate" {
            found.extend(
                imported(rest)
                    .into_iter()
                    .map(|room| format!("crate::{room}")),
            );
        } else if !root.is_empty() {
            found.push(root);
            found.extend(has_word(rest, "SystemTime").then(|| "SystemTime".to_owned()));
        }
    }
    found
}

/// The parts between the commas that stand in no inner group.
fn branches(tree: &str) -> Vec<&str> {
    let mut depth = 0;
    tree.split(|c| {
        depth += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        c == ',' && depth == 0
    })
    .collect()
}

/// Float types and float literals, with their lines.
fn floats(code: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in code.lines().enumerate() {
        let chars: Vec<char> = line.chars().collect();
        let mut i = 0;
        while i < chars.len() {
            if !is_name(chars[i]) {
                i += 1;
                continue;
            }
            let member = i > 0 && chars[i - 1] == '.' && !(i > 1 && chars[i - 2] == '.');
            let mut word = name_at(&chars, i);
            i += word.chars().count();
            if word.starts_with(|c: char| c.is_ascii_digit()) && !member {
                let next_is_digit = chars.get(i + 1).is_some_and(char::is_ascii_digit);
                if chars.get(i) == Some(&'.') && next_is_digit {
                    word = format!("{word}.{}", name_at(&chars, i + 1));
                    i += 1 + name_at(&chars, i + 1).chars().count();
                    found.push((number + 1, word));
                    continue;
                }
                let exponent = word
                    .find(['e', 'E'])
                    .is_some_and(|at| word[at + 1..].starts_with(|c: char| c.is_ascii_digit()));
                let decimal =
                    !word.starts_with("0x") && !word.starts_with("0b") && !word.starts_with("0o");
                if decimal && (exponent || word.ends_with("f32") || word.ends_with("f64")) {
                    found.push((number + 1, word));
                }
            } else if word == "f32" || word == "f64" {
                found.push((number + 1, word));
            }
        }
    }
    found
}

/// Ways to make a test pass by waiting or by not running it, with their lines.
fn shortcuts(code: &str) -> Vec<(usize, &'static str, &'static str)> {
    const WAIT: &str = "wait for the condition itself (a channel, a notice, the log line, a polled call) under a time-out, \
                        or drive the clock";
    let mut found = Vec::new();
    for (number, line) in code.lines().enumerate() {
        if line.contains("#[ignore") {
            found.push((
                number + 1,
                "#[ignore]",
                "run it or delete it; what needs more than the image runs under a variable",
            ));
        }
        let slept = [
            ("thread::sleep", "thread::sleep"),
            ("time::sleep", "time::sleep"),
            ("sleep(", "sleep"),
            ("sleep_until(", "sleep_until"),
        ];
        if let Some((_, name)) = slept.iter().find(|(text, _)| {
            line.match_indices(text)
                .any(|(at, _)| !line[..at].ends_with(is_name))
        }) {
            found.push((number + 1, name, WAIT));
        }
    }
    found
}

// ---------------------------------------------------------------------------------------------
// Reading prose
// ---------------------------------------------------------------------------------------------

/// The rules that `docs/semantics.md` defines, in order, with their lines.
fn rules(tree: &[File]) -> Vec<(String, usize)> {
    let page = tree
        .iter()
        .find(|file| file.path == "docs/semantics.md")
        .expect("the tree has docs/semantics.md");
    defined_rules(&page.text)
}

fn defined_rules(text: &str) -> Vec<(String, usize)> {
    let mut rules = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let bold = line
            .trim_start_matches("- ")
            .strip_prefix("**")
            .and_then(|rest| rest.split_once("**"));
        if let Some((id, _)) = bold
            && let (prefix, digits) =
                id.split_at(id.find(|c: char| c.is_ascii_digit()).unwrap_or(id.len()))
            && (2..=3).contains(&prefix.len())
            && prefix.chars().all(|c| c.is_ascii_uppercase())
            && !digits.is_empty()
            && digits.chars().all(|c| c.is_ascii_digit())
        {
            rules.push((id.to_owned(), number + 1));
        }
    }
    rules
}

fn split_rule(rule: &str) -> (&str, u32) {
    let (prefix, number) = rule.split_at(
        rule.find(|c: char| c.is_ascii_digit())
            .unwrap_or(rule.len()),
    );
    (prefix, number.parse().unwrap_or(0))
}

fn is_built(rule: &str) -> bool {
    let (prefix, number) = split_rule(rule);
    BUILT.iter().any(|(built, numbers)| {
        *built == prefix && (numbers.is_empty() || numbers.contains(&number))
    })
}

/// Whether `text` names the rule: as a word, or as a part of a snake-case name, in any case.
fn names(text: &str, rule: &str) -> bool {
    let (text, rule) = (text.to_ascii_uppercase(), rule.to_ascii_uppercase());
    text.match_indices(&rule).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + rule.len()..].chars().next();
        !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
    })
}

/// Words of the line that look like rule ids of the known prefixes.
fn mentioned_rules(line: &str, prefixes: &BTreeSet<&str>) -> Vec<String> {
    line.split(|c: char| !is_name(c))
        .filter(|word| {
            let digits = word
                .find(|c: char| c.is_ascii_digit())
                .unwrap_or(word.len());
            let (prefix, number) = word.split_at(digits);
            prefixes.contains(prefix)
                && !number.is_empty()
                && number.chars().all(|c| c.is_ascii_digit())
        })
        .map(str::to_owned)
        .collect()
}

fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        !line[..at].ends_with(is_name) && !line[at + word.len()..].starts_with(is_name)
    })
}

/// The foreign texts of a line. A path counts where it begins, not inside a longer one.
fn foreign(line: &str) -> Vec<(&'static str, &'static str)> {
    FOREIGN
        .iter()
        .filter(|(text, _)| {
            line.match_indices(text).any(|(at, _)| {
                let before = line[..at].chars().next_back();
                let after = line[at + text.len()..].chars().next();
                let inside = before.is_some_and(|c| is_name(c) || matches!(c, '.' | '-' | '}'));
                let longer =
                    !text.ends_with(['/', '.']) && after.is_some_and(|c| is_name(c) || c == '-');
                !(longer || text.starts_with('/') && inside)
            })
        })
        .copied()
        .collect()
}

/// Targets of the links and pictures of a page, with their lines. Code is left out.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose_lines(text) {
        let mut rest = line.as_str();
        while let Some((_, after)) = rest.split_once("](") {
            let (inside, tail) = after.split_once(')').unwrap_or((after, ""));
            let target = inside
                .split_whitespace()
                .next()
                .unwrap_or("")
                .trim_matches(['<', '>']);
            if !target.is_empty() {
                found.push((number, target.to_owned()));
            }
            rest = tail;
        }
        if line.starts_with('[')
            && let Some((_, target)) = line.split_once("]: ")
        {
            found.push((number, target.trim().to_owned()));
        }
    }
    found
}

/// The lines outside fenced code, with inline code blanked.
fn prose_lines(text: &str) -> Vec<(usize, String)> {
    let mut fenced = false;
    let mut lines = Vec::new();
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            let prose: String = line
                .split('`')
                .enumerate()
                .map(|(i, part)| if i % 2 == 0 { part } else { "" })
                .collect();
            lines.push((number + 1, prose));
        }
    }
    lines
}

/// The anchors of the headings of a page, as a reader of Markdown makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced || !line.starts_with('#') {
            continue;
        }
        let slug: String = line
            .trim_start_matches('#')
            .trim()
            .to_lowercase()
            .chars()
            .filter_map(|c| match c {
                ' ' => Some('-'),
                c if is_name(c) || c == '-' => Some(c),
                _ => None,
            })
            .collect();
        let mut anchor = slug.clone();
        let mut again = 0;
        while !anchors.insert(anchor) {
            again += 1;
            anchor = format!("{slug}-{again}");
        }
    }
    anchors
}

/// The path from the root that `target` means on the page `from`; `None` when it leaves the tree.
fn resolve(from: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

// ---------------------------------------------------------------------------------------------
// The checks hold what they say
// ---------------------------------------------------------------------------------------------

#[test]
fn code_is_told_from_comments_and_literals() {
    let code = code_only(
        "a // b\n/* c /* d */ e */ f \"g \\\" h\" i 'j' '\\'' k r#\"l \" m\"# n b\"o\" &'p q\n",
    );
    let words: Vec<&str> = code.split_whitespace().collect();
    assert_eq!(words, ["a", "f", "i", "k", "n", "b", "&'p", "q"]);
    assert_eq!(code.lines().count(), 2);
}

#[test]
fn test_parts_of_a_source_are_found() {
    let source = "use a;\n#[cfg(test)]\nuse b;\nfn c() {}\n#[cfg(test)]\n#[allow(x, reason = \"y\")]\nmod tests {\n    fn d() {}\n}\nfn e() {}\n";
    let mask = test_mask(&code_only(source));
    assert_eq!(
        mask,
        [
            false, true, true, false, true, true, true, true, true, false
        ]
    );
    assert_eq!(test_mask("#![cfg(test)]\nfn a() {}\n"), [true, true]);
    assert_eq!(
        test_mask("struct A {\n    #[cfg(test)]\n    b: u8,\n    c: u8,\n}\n"),
        [false, true, true, false, false]
    );
}

#[test]
fn a_rule_is_named_in_comments_and_names() {
    assert!(names("// DEC1: top to bottom", "DEC1"));
    assert!(names("fn dec1_oversize_bypasses() {", "DEC1"));
    assert!(names("fn holds_dec1() {", "DEC1"));
    assert!(names("(TIC2/TIC3)", "TIC3"));
    assert!(!names("// DEC10 and DEC12", "DEC1"));
    assert!(!names("fn codec1_round_trip() {", "DEC1"));
    assert!(!names("", "DEC1"));
}

#[test]
fn rules_are_read_from_the_page() {
    let page =
        "**ID1** *Ids.* text\n- **TOK2** text\ntext **CAP3** inside\n**Bold** text\n**DEC4**\n";
    let found: Vec<String> = defined_rules(page)
        .into_iter()
        .map(|(rule, line)| format!("{rule}:{line}"))
        .collect();
    assert_eq!(found, ["ID1:1", "TOK2:2", "DEC4:5"]);
    assert!(is_built("CAP3") && is_built("DUR6") && is_built("REP1") && !is_built("CNT2"));
    let prefixes = BTreeSet::from(["DEC", "ID"]);
    assert_eq!(
        mentioned_rules("DEC9, ID12x, (ID3) CAP1", &prefixes),
        ["DEC9", "ID3"]
    );
}

#[test]
fn path_roots_are_found() {
    let code = "use redb::Database;\nuse axum;\nlet a = ::tokio::spawn(x);\nlet b = self.redb.get();\nuse crate::{store::Rows, gate};\n\
                let c = crate::http::serve();\nuse core::mem;\nlet d = my::redb::x();\n";
    let found: Vec<String> = roots(code)
        .into_iter()
        .map(|(line, root)| format!("{line} {root}"))
        .collect();
    assert_eq!(
        found,
        [
            "1 redb",
            "2 axum",
            "3 tokio",
            "5 crate::store",
            "5 crate::gate",
            "6 crate::http",
            "7 core",
            "8 my"
        ]
    );
    assert_eq!(roots("extern crate std;"), [(1, "std".to_owned())]);
    assert_eq!(
        roots("use std::time::SystemTime;"),
        [(1, "std".to_owned()), (1, "SystemTime".to_owned())]
    );
}

#[test]
fn floats_are_told_from_other_numbers() {
    let found: Vec<String> =
        floats("let a = 1.5; let b: f64 = 2e3; let c = 3f32;\nlet d = 0x1e3;\n")
            .into_iter()
            .map(|(_, word)| word)
            .collect();
    assert_eq!(found, ["1.5", "f64", "2e3", "3f32"]);
    assert!(floats("self.0.1 + pair.1; 0..10; 1..=2; x.0; a[1].2; 1_000; 0x1f64").is_empty());
}

#[test]
fn foreign_text_is_found_where_it_begins() {
    assert_eq!(foreign(concat!("see /wo", "rk/a")).len(), 1);
    assert_eq!(foreign(concat!("\"/tm", "p/a\"")).len(), 1);
    assert_eq!(foreign(concat!("cd /ro", "ot")).len(), 1);
    assert!(foreign("GET /workers, /rooted, framework/x, a/work/b, npm, templates").is_empty());
}

#[test]
fn shortcuts_of_tests_are_found() {
    let code = concat!(
        "#[ign",
        "ore]\nstd::thread::sle",
        "ep(x);\nsle",
        "ep(y);\nasleep(z);\n"
    );
    let found: Vec<usize> = shortcuts(code)
        .into_iter()
        .map(|(line, _, _)| line)
        .collect();
    assert_eq!(found, [1, 2, 3]);
}

#[test]
fn figures_that_were_changed_are_found() {
    let page = |figure: &str| {
        let sum = crc32fast::hash(b"\n| 1 |\n\n");
        format!("a\n<!-- figures: x -->\n\n| {figure} |\n\n<!-- end of x: {sum:08x} -->\nb\n")
    };
    assert!(figure_faults(&page("1"), &["x"]).is_empty());
    assert_eq!(figure_faults(&page("2"), &["x"]).len(), 1);
    assert_eq!(figure_faults(&page("1"), &["x", "y"]).len(), 2);
    assert_eq!(figure_faults(&page("1"), &[]).len(), 1);
}

#[test]
fn links_and_anchors_are_read() {
    let page = "# A `b`: c, d\n[x](y.md#z) and ![p](q.svg \"t\")\n```\n[no](no)\n```\n`[no](no)`\n## A b c d\n## A b c d\n";
    let found: Vec<String> = links(page)
        .into_iter()
        .map(|(line, target)| format!("{line} {target}"))
        .collect();
    assert_eq!(found, ["2 y.md#z", "2 q.svg"]);
    let expected = ["a-b-c-d", "a-b-c-d-1", "a-b-c-d-2"].map(str::to_owned);
    assert_eq!(anchors(page), BTreeSet::from(expected));
    assert_eq!(
        resolve("docs/a.md", "../b/./c.md").as_deref(),
        Some("b/c.md")
    );
    assert_eq!(resolve("a.md", "../b.md"), None);
}
