//! Q02: a client goes away in the instant of its grant.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use kvgate_core::decision::Scope;
use kvgate_core::policy::Policy;
use kvgate_core::units::Span;
use kvgate_core::view::View;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::app::{Builder, SOON, TestApp, post_bytes};

/// Gates that are tried at once; each has its own line.
const LANES: u64 = 4;

/// Rounds of each lane. `KVGATE_CASE_ROUNDS=10000` tries as many as the case tells of.
fn rounds() -> u64 {
    let all = std::env::var("KVGATE_CASE_ROUNDS").map_or(400, |rounds| rounds.parse().unwrap());
    all / LANES
}

/// One round in so many is left to the claim grace, which takes a second.
const UNCLAIMED_EVERY: u64 = 50;

/// Q02, TIC3, TIC4: t1 is released and in the same 2 ms the client of t2 drops. A retry finds the grant;
/// without one it is taken back at the end of the claim grace; what was written whole is claimed, and ends
/// by the cancel that the client sends. The waiter behind is granted every time. At the end nothing is held,
/// without waiting for the life of a lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn q02_a_client_goes_away_in_the_instant_of_the_grant() {
    let claimed: u64 = join_all((0..LANES).map(one_lane)).await.into_iter().sum();
    let all = rounds() * LANES;
    assert!(
        claimed < all,
        "some clients went before their answer: {claimed} of {all}"
    );
}

fn admits(view: &View) -> u64 {
    view.tally.scope(Scope::Train).admit
}

/// Lets the time pass without leaving the scheduler.
async fn spin(time: Duration) {
    let began = Instant::now();
    while began.elapsed() < time {
        tokio::task::yield_now().await;
    }
}

/// How many of the dropped clients had been written their answer whole.
async fn one_lane(lane: u64) -> u64 {
    let app = Builder {
        policy: Policy {
            claim_grace: Span::from_secs(1),
            ..Builder::default().policy
        },
        engines: vec![("http://engine-1:30000", 900_000)],
        ..Builder::default()
    }
    .start()
    .await;
    let mut claimed = 0;
    // Any sequence does: the offsets are spread over -2 to 2 ms.
    let mut draw = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(lane + 1);
    for round in 0..rounds() {
        draw = draw
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let offset = (draw >> 33) % 4_001;
        claimed += u64::from(one_round(&app, round, offset).await);
    }
    let view = app.gate.view();
    assert_eq!((view.reserved.get(), view.leases, view.waiting), (0, 0, 0));
    assert_eq!(app.gate.waiting_calls(), 0);
    claimed
}

/// `offset` is 2,000 microseconds and what the drop comes later than the release.
async fn one_round(app: &TestApp, round: u64, offset: u64) -> bool {
    let ask = |ticket: &str, tokens: u64| json!({"ticket_id": format!("{ticket}-{round}"), "session_id": "s", "reservation_tokens": tokens, "wait_s": 60});
    let held = app.acquire(&format!("t1-{round}"), 800_000).await;
    let lease = format!("/v1/leases/{}", held["lease_id"].as_str().unwrap());
    let mut t2 = app.connect().await;
    t2.write_all(&post_bytes("/v1/leases", &ask("t2", 200_000)))
        .await
        .unwrap();
    app.until(|view| view.waiting == 1).await;
    let mut t3 = app.connect().await;
    t3.write_all(&post_bytes("/v1/leases", &ask("t3", 150_000)))
        .await
        .unwrap();
    app.until(|view| view.waiting == 2).await;
    let before = admits(&app.gate.view());

    let (released, ()) = tokio::join!(
        async {
            spin(Duration::from_micros(2_000_u64.saturating_sub(offset))).await;
            app.delete(&lease).await
        },
        async {
            spin(Duration::from_micros(offset.saturating_sub(2_000))).await;
            drop(t2);
        }
    );
    assert_eq!(released.json()["outcome"], "released");
    let mut text = String::new();
    tokio::time::timeout(SOON, t3.read_to_string(&mut text))
        .await
        .expect("the waiter behind is stuck")
        .unwrap();
    assert!(text.contains(r#""action":"admit""#), "{text}");
    assert_eq!(
        app.delete(&format!("/v1/tickets/t3-{round}")).await.json()["outcome"],
        "released"
    );

    let ticket = format!("/v1/tickets/t2-{round}");
    if round % UNCLAIMED_EVERY == UNCLAIMED_EVERY - 1 {
        // Nobody asks again: it was claimed, and the cancel ends it, or it is taken back in a second.
        app.until(|view| view.leases == 0 || admits(view) == before + 2)
            .await;
        let claimed = app.gate.view().leases > 0;
        app.delete(&ticket).await;
        app.until(|view| view.leases == 0 && view.waiting == 0)
            .await;
        return claimed;
    }
    let again = app.post("/v1/leases", &ask("t2", 200_000)).await.json();
    assert_eq!(
        again["action"], "admit",
        "a retry within the grace gets the grant: {again}"
    );
    let held = app.gate.view();
    assert_eq!(
        (held.leases, held.reserved.get()),
        (1, 200_000),
        "round {round}"
    );
    assert_eq!(app.delete(&ticket).await.json()["outcome"], "released");
    again["repeated"] == true
}
