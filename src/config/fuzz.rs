//! Fuzz target of settings files: what is taken is in range and shown so that it is read again as the same.

use super::*;
use crate::fuzz::{Inputs, fuzz};

#[test]
fn settings_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kvgate.toml");
    let again = directory.path().join("again.toml");
    let load = |path: &Path, text: &[u8]| {
        std::fs::write(path, text).unwrap();
        Config::load(Layer::default(), [], Some(path))
    };
    let values = [
        "true",
        "false",
        "1",
        "0.5",
        "\"off\"",
        "\"none\"",
        "[]",
        "\"http://127.0.0.1:1\"",
        "inf",
        "nan",
        "-1",
    ];
    let every: Vec<String> = Layer::NAMES
        .iter()
        .zip(values.iter().cycle())
        .map(|(name, value)| format!("{name} = {value}\n"))
        .collect();
    let defaults = load(&path, b"").unwrap();
    let shown = |config: &Config| -> String {
        let lines = config.shown.iter();
        lines
            .map(|shown| format!("{} = {}\n", shown.name, shown.value))
            .collect()
    };
    let seeds = [
        shown(&defaults),
        "program_admission = true\nadmission_headroom = 0.7\nadmission_max_wait_s = 30\nmax_waiting = 5\nlease_ttl_s = 60".to_owned(),
        "session_lifecycle = true\nclose_attempts = 3\nclose_deadline_s = 60.5\njoin_timeout_s = 1\nsession_idle_close_s = 1800".to_owned(),
        "router = \"http://h:1\"\nengine = [\"http://h:2\", \"h:3@0\"]\nengine_network = [\"10.0.0.0/8\"]\nstale_after_s = 6".to_owned(),
        "listen = [\"[::1]:0\", \"unix:gate.sock\"]\nallowed_host = [\"gate.example\"]\nlog_format = \"json\"".to_owned(),
    ];
    let inputs = Inputs::of(seeds)
        .with_words(&every)
        .with_words(values)
        .with_words(["\n", " = ", "\"", "[a]", "1e400", "#", "\\u0000"]);
    fuzz!(inputs, |bytes: &[u8]| {
        match load(&path, bytes) {
            Ok(config) => {
                assert_eq!(config.policy.clone().validated().map(|_| ()), Ok(()));
                assert!(!config.listen.is_empty());
                let text = shown(&config);
                let read = load(&again, text.as_bytes()).unwrap();
                assert_eq!(shown(&read), text);
                assert_eq!(read.policy, config.policy);
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    });
}
