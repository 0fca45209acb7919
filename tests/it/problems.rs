//! Every problem has its page, and `docs/problems.md` says the same.

use std::fmt::Write as _;

use kvgate::http::{Fault, advice, title};
use kvgate_api::ProblemCode;

use crate::support::app::TestApp;

/// What the pages say, as one document.
fn document() -> String {
    let mut text = String::from(
        "# Problems\n\nAn answer that is no success is a problem (RFC 9457): `type` leads to a page of the service, \
         `/problems/<code>`, and `code` is stable. The same texts are here; a test compares them. What a careful client does \
         in general is in [API.md](API.md#rules-for-clients-fail-open).\n\n| status | code | |\n|---|---|---|\n",
    );
    for code in ProblemCode::ALL.iter().copied() {
        let (name, status) = (code.as_str(), Fault::new(code, "").status().as_u16());
        writeln!(text, "| {status} | [`{name}`](#{name}) | {} |", title(code)).unwrap();
    }
    for code in ProblemCode::ALL.iter().copied() {
        let advice = advice(code);
        write!(
            text,
            "\n## {}\n\n{}.\n\n- **What happened.** {}\n- **What a caller does.** {}\n- **What an operator does.** {}\n",
            code.as_str(),
            title(code),
            advice.happened,
            advice.client,
            advice.operator
        )
        .unwrap();
    }
    text
}

/// The words of a page, without markup.
fn words(html: &str) -> String {
    let mut text = String::new();
    let mut inside = false;
    for c in html.chars() {
        match c {
            '<' => inside = true,
            '>' => inside = false,
            c if !inside => text.push(c),
            _ => {}
        }
    }
    text.replace("&#60;", "<")
        .replace("&#62;", ">")
        .replace("&#34;", "\"")
        .replace("&#39;", "'")
        .replace("&#38;", "&")
}

#[tokio::test]
async fn every_problem_has_a_page_for_callers_and_operators() {
    let app = TestApp::start().await;
    for code in ProblemCode::ALL.iter().copied() {
        let page = app.get(&format!("/problems/{}", code.as_str())).await;
        assert_eq!(page.status, 200);
        assert_eq!(
            page.header("content-type"),
            Some("text/html; charset=utf-8")
        );
        let shown = words(&page.text);
        let advice = advice(code);
        for text in [advice.happened, advice.client, advice.operator] {
            // What a reader could not act on is no advice.
            assert!(text.len() > 15 && text.ends_with('.'), "{code:?}: {text}");
            assert_eq!(text.matches('`').count() % 2, 0, "{code:?}: {text}");
            assert!(
                shown.contains(&text.replace('`', "")),
                "{code:?} lacks {text:?}:\n{shown}"
            );
        }
        let status = Fault::new(code, "").status().as_u16();
        assert!(shown.contains(&format!("{}, status {status}", code.as_str())));
        // The page works below the path prefix of a proxy.
        assert!(!page.text.contains("=\"/"), "{}", page.text);
    }
    app.get("/problems/nothing")
        .await
        .is_problem(404, "not_found");
}

#[test]
fn the_document_says_what_the_pages_say() {
    let path = format!("{}/docs/problems.md", env!("CARGO_MANIFEST_DIR"));
    let found = std::fs::read_to_string(path).unwrap_or_default();
    let expected = document();
    assert!(found == expected, "docs/problems.md should be:\n{expected}");
}

/// What an operator is told to look at exists.
#[test]
fn advice_names_alerts_and_metrics_that_exist() {
    let page = include_str!("../../docs/OPERATIONS.md");
    let mut named = 0;
    for code in ProblemCode::ALL.iter().copied() {
        let advice = advice(code);
        for text in [advice.happened, advice.client, advice.operator] {
            for word in text.split('`').skip(1).step_by(2) {
                if word.starts_with("Kvgate") {
                    assert!(
                        page.contains(&format!("\n### {word}\n")),
                        "{code:?}: {word}"
                    );
                    named += 1;
                } else if word.starts_with("kvgate_") {
                    assert!(page.contains(&format!("| `{word}` |")), "{code:?}: {word}");
                    named += 1;
                }
            }
        }
    }
    assert!(named > 4, "only {named} names were found");
}
