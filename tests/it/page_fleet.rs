//! Engines, reports and settings as they are served.

use std::sync::Arc;

use kvgate::http::{EngineDetails, FleetDetails};
use serde_json::{Value, json};

use crate::support::app::{Builder, TestApp};

/// Rows of the table of engines, by the addresses in them.
fn engines(page: &str) -> Vec<&str> {
    let rows = page.match_indices(" data-id=\"http://");
    rows.filter_map(|(at, _)| page[at..].split('"').nth(1))
        .collect()
}

/// 256 engines are shown by pages of 50, each with its figures as the API has them.
#[tokio::test]
async fn many_engines_are_paged_and_filtered() {
    let names: Vec<(&'static str, u64)> = (0..256)
        .map(|number| {
            let name: &'static str = format!("http://engine-{number:03}:30000").leak();
            (name, 1_000 + number)
        })
        .collect();
    let app = Builder {
        engines: names,
        ..Builder::default()
    }
    .start()
    .await;
    let mut seen = Vec::new();
    let mut path = "/engines".to_owned();
    for pages in 1.. {
        let page = app.get(&path).await;
        assert_eq!(page.status, 200, "{}", page.text);
        assert!(page.text.len() < 300 << 10, "{}", page.text.len());
        assert!(page.text.contains("data-total=\"256\""));
        seen.extend(engines(&page.text).into_iter().map(str::to_owned));
        let next = page.text.split("<a href=\"engines?from=").nth(1);
        let Some(from) = next.and_then(|rest| rest.split('"').next()) else {
            assert_eq!(pages, 6);
            break;
        };
        if seen.len() == 256 {
            break;
        }
        path = format!("/engines?from={}", seen.len());
        assert!(!from.is_empty());
    }
    let api: Value = app.get("/v1/engines").await.json();
    let all: Vec<&str> = api["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|engine| engine["url"].as_str().unwrap())
        .collect();
    assert_eq!(seen, all);
    let page = app.get("/engines?q=engine-25").await.text;
    assert_eq!(engines(&page).len(), 6, "250 to 255");
    assert!(page.contains("data-col=\"capacity\">1,250<"), "{page}");
    let none = app.get("/engines?state=away").await.text;
    assert!(engines(&none).is_empty() && none.contains("No engine matches."));
    for wrong in ["?state=x", "?from=x", "?before=x", "?what=x"] {
        let page = app.get(&format!("/engines{wrong}")).await;
        assert_eq!(page.status, 422, "{wrong}");
    }
}

/// What the readings tell beside their figures, and markup that an engine or a router sends.
#[tokio::test]
async fn what_engines_and_router_say_of_themselves() {
    let app = TestApp::start().await;
    let details = EngineDetails {
        close_support: Some(false),
        version: Some("0.5.23<b>".to_owned()),
        dialect: Some(":"),
        ..EngineDetails::default()
    };
    app.fleet.send_replace(Arc::new(FleetDetails {
        has_router: true,
        router_kind: Some("smg".to_owned()),
        bad_entries: vec![("<i>entry".to_owned(), "no URL".to_owned())],
        engines: [("http://engine-1:30000".to_owned(), details)].into(),
    }));
    let page = app.get("/engines").await.text;
    assert!(page.contains("SGLang 0.5.23&#60;b&#62;"), "{page}");
    assert!(page.contains("sglang:*") && page.contains("no such call"));
    assert!(page.contains("&#60;i&#62;entry") && page.contains("no URL"));
    assert!(!page.contains("<b>0") && !page.contains("<i>entry"));
    assert!(page.contains("first engines") && page.contains("id=\"epochs\""));
}

/// Reports stand under their keys, can be narrowed by run and column, and come as files.
#[tokio::test]
async fn step_reports_as_table_and_files() {
    let app = TestApp::start().await;
    app.acquire("held", 900).await;
    app.acquire("waits", 300).await;
    for (run, step) in [("exp-7", 1), ("exp-7", 2), ("=cmd", 1), ("a,\"b\"", 1)] {
        let answer = app
            .post("/v1/steps", &json!({"run": run, "step": step}))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text);
    }
    let page = app.get("/steps").await.text;
    assert!(
        page.contains("title=\"agentic_kv/admission/admit\""),
        "{page}"
    );
    assert!(
        !page.contains("title=\"agentic_kv/budget/ceiling\""),
        "not a main key"
    );
    assert!(page.contains("=cmd") && page.contains("<td class=\"num\">open</td>"));
    let page = app.get("/steps?run=exp-7&columns=budget").await.text;
    assert!(page.contains("title=\"agentic_kv/budget/ceiling\""));
    assert!(!page.contains("title=\"agentic_kv/admission/admit\""));
    assert!(page.contains("steps 1 to 2"), "{page}");
    assert!(!page.contains("<th scope=\"row\">=cmd"));
    let page = app.get("/steps?c.budget/epoch=on").await.text;
    assert!(page.contains("title=\"agentic_kv/budget/epoch\""));
    assert_eq!(page.matches("title=\"agentic_kv/").count(), 1);
    let page = app.get("/steps?before=2").await.text;
    assert!(page.contains("id=\"st-1\"") && !page.contains("id=\"st-2\""));

    let csv = app.get("/steps.csv").await;
    assert!(csv.header("content-type").unwrap().starts_with("text/csv"));
    assert!(
        csv.header("content-disposition")
            .unwrap()
            .contains("kvgate-steps.csv")
    );
    let lines: Vec<&str> = csv.text.lines().collect();
    assert_eq!(lines.len(), 5, "{}", csv.text);
    assert!(lines[0].starts_with("run,step,from,to,agentic_kv/"));
    assert!(lines[1].starts_with("\"a,\"\"b\"\"\",1,") && lines[2].starts_with("'=cmd,1,"));
    let json = app.get("/steps.json?run=exp-7").await.json();
    let api = app.get("/v1/steps?run=exp-7").await.json();
    assert_eq!(json, api["items"]);
    assert_eq!(app.get("/steps.json?run=none").await.json(), json!([]));
    assert_eq!(app.get("/steps.csv?what=x").await.status, 422);
}

/// Settings in force with who set them, and the audit with its filters.
#[tokio::test]
async fn settings_and_audit() {
    let app = TestApp::start().await;
    let change = app
        .patch("/v1/settings", &json!({"headroom": 0.5, "scope": "all"}))
        .await;
    assert_eq!(change.status, 200, "{}", change.text);
    let page = app.get("/settings").await.text;
    assert!(page.contains("2 set at run time"), "{page}");
    assert!(page.contains("headroom from 1 to 0.5"));
    assert!(page.contains("name=\"was.headroom\" value=\"0.5\""));
    let page = app.get("/settings?action=lease_revoked").await.text;
    assert!(page.contains("No entry matches."));
    let page = app
        .get("/settings?action=settings_changed&q=local")
        .await
        .text;
    assert!(page.contains("headroom from 1 to 0.5"));
    for wrong in ["?action=x", "?before=x", "?what=x"] {
        let page = app.get(&format!("/settings{wrong}")).await;
        assert_eq!(page.status, 422, "{wrong}");
    }
}
