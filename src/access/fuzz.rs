//! Fuzz targets of what decides who is let in: token files, host names, cookies.

use super::hosts::AllowedHost;
use super::{TOKENS_MAX, TokenFileError, TokenSet, login_ids};
use crate::fuzz::{Inputs, fuzz};

/// X01: a file that is taken lets in whom it names and tells no token; one that is refused tells none either.
#[test]
fn token_files() {
    let seeds = [
        "# callers\n\n rollout : client : client-token-000001 \r\nops@head.1:admin:admin-token-00000+/=~\nwall:view:view-token-0000000\n",
        "a:client:0123456789abcdef\nb:view:0123456789abcdeg",
        "a:client:SECRET-SECRET-SECRET\na:client:SECRET-SECRET-SECRE2",
    ];
    let long = format!("n:view:{}", "x".repeat(512));
    let words = [
        ":", "::", "client", "admin", "view", "local", "#", "\n", "\r\n", "\u{a0}", "\u{2028}",
        "\0", " ", "é",
    ];
    fuzz!(
        Inputs::of(seeds).and([long]).with_words(words),
        |bytes: &[u8]| {
            let text = String::from_utf8_lossy(bytes);
            let lines = text.lines().map(str::trim);
            let mut tokens = lines
                .filter(|line| !line.starts_with('#'))
                .filter_map(|line| line.splitn(3, ':').nth(2).map(str::trim))
                .filter(|token| token.len() >= 16);
            match TokenSet::parse(&text) {
                Ok(set) => {
                    assert!((1..=TOKENS_MAX).contains(&set.count()));
                    assert_eq!(tokens.clone().count(), set.count());
                    assert!(tokens.all(|token| set.find(token).is_some()));
                    assert!(set.find("").is_none() && set.find("a token of nobody").is_none());
                }
                Err(error) => {
                    let said = format!("{error} {error:?}");
                    assert!(said.len() < 300, "a sentence and no part of the file");
                    assert!(tokens.all(|token| !said.contains(token)), "{said}");
                    if let TokenFileError::Line { line, .. } = error {
                        assert!((1..=text.lines().count()).contains(&line));
                    }
                }
            }
        }
    );
}

/// X02: a name that is let in is a name: it is shown and read again as the same.
#[test]
fn host_names_and_cookies() {
    let seeds = [
        "gate.example",
        "gate.example:7070",
        "[::1]:7070",
        "127.0.0.1",
        "a=b; kvgate_login=x; c=\"d\"",
        "xn--a.example.",
    ];
    let words = [
        "*",
        ".",
        "..",
        ":",
        "@",
        "/",
        "[",
        "]",
        "%",
        "%3b",
        ";",
        "=",
        "\"",
        ",",
        " ",
        "\t",
        "kvgate_login=",
        "é",
        "\0",
    ];
    fuzz!(Inputs::of(seeds).with_words(words), |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        let host: Result<AllowedHost, _> = text.parse();
        assert_eq!(host, text.parse(), "the same text is the same name");
        if host.is_ok() {
            let odd = ['@', '?', '#', '\\', '\0', ' ', '*'];
            assert!(!text.trim().contains(odd), "{text:?}");
        }
        let ids: Vec<String> = login_ids([&*text, &*text]).collect();
        assert!(ids.len() <= 4, "a bound on what is looked at");
        assert!(ids.iter().map(String::len).sum::<usize>() <= 2 * text.len());
    });
}
