//! The scripts keep the rules.

use crate::caller::{Answer, Connection};
use crate::load::{Scripts, everything_was_given_back};
use crate::server::Server;
use crate::{Arguments, Transport};

/// A rival that does less would be faster. What is written here is answered by kvgate in the same way.
pub async fn check(arguments: &Arguments) {
    let server = Server::start(arguments, Transport::Unix);
    let mut one = server.connect().await;
    let mut two = server.connect().await;
    let scripts = Scripts::load(&mut one).await;
    one.number(&["HSET", "gate", "ceiling", "100"]).await;
    let acquire = async |connection: &mut Connection, ticket: &str, tokens: &str, ttl_s: &str| {
        let ask = [
            ticket, "session", tokens, "0", "train", "0", ttl_s, "rid", "client",
        ];
        words(connection.run(&scripts.acquire, &ask).await)
    };
    let release = async |connection: &mut Connection, ticket: &str, lease: &str| {
        words(connection.run(&scripts.release, &[ticket, lease]).await)
    };
    assert_eq!(acquire(&mut one, "a", "60", "600").await, "admit 1-1 0");
    assert_eq!(
        acquire(&mut one, "a", "60", "600").await,
        "admit 1-1 1",
        "a ticket is charged once"
    );
    assert_eq!(acquire(&mut one, "a", "61", "600").await, "conflict");
    assert_eq!(
        acquire(&mut one, "large", "101", "600").await,
        "bypass oversize"
    );
    assert_eq!(acquire(&mut one, "b", "60", "1").await, "wait 1");
    assert_eq!(
        acquire(&mut one, "c", "10", "600").await,
        "wait 2",
        "c would fit, but b is older"
    );
    assert_eq!(
        acquire(&mut one, "c", "10", "600").await,
        "wait 2",
        "a ticket stands in line once"
    );
    assert_eq!(release(&mut one, "a", "1-7").await, "lease_expired");
    assert_eq!(release(&mut one, "b", "1-2").await, "lease_expired");
    assert_eq!(release(&mut one, "d", "1-2").await, "lease_not_found");
    // A caller that waits is told at once, and the head comes first.
    let waits = tokio::spawn(async move { two.granted("b").await });
    assert_eq!(release(&mut one, "a", "1-1").await, "released");
    assert_eq!(waits.await.unwrap().as_deref(), Some("1-2"));
    assert_eq!(one.granted("c").await.as_deref(), Some("1-3"));
    assert_eq!(release(&mut one, "a", "1-1").await, "already_released");
    assert_eq!(acquire(&mut one, "a", "60", "600").await, "cancelled");
    assert_eq!(acquire(&mut one, "e", "40", "600").await, "wait 1");
    let books = async |connection: &mut Connection| {
        let gate = connection.fields(&["HGETALL", "gate"]).await;
        let session = connection.fields(&["HGETALL", "s:session"]).await;
        let ticket = connection.fields(&["HGETALL", "t:b"]).await;
        (gate, session, ticket)
    };
    let before = books(&mut one).await;
    assert_eq!(
        (
            &*before.0["reserved"],
            &*before.0["issued"],
            &*before.0["waits"]
        ),
        ("70", "3", "3")
    );
    assert_eq!(
        (
            &*before.1["leases"],
            &*before.1["tokens"],
            &*before.1["waiting"]
        ),
        ("2", "70", "1")
    );
    assert_eq!(
        (&*before.2["client"], &*before.2["request_id"]),
        ("client", "rid")
    );
    let server = server.killed_and_started_again(arguments, Transport::Unix);
    let mut one = server.connect().await;
    assert_eq!(
        books(&mut one).await,
        before,
        "what was answered is on disk"
    );
    let scripts = Scripts::load(&mut one).await;
    assert_eq!(one.run(&scripts.sweep, &["0"]).await, Answer::Number(0));
    // The end of b has come, that of c has not; e takes the room.
    assert_eq!(one.run(&scripts.sweep, &["60000"]).await, Answer::Number(1));
    assert_eq!(one.granted("e").await.as_deref(), Some("1-4"));
    for (ticket, lease) in [("c", "1-3"), ("e", "1-4")] {
        let outcome = one.run(&scripts.release, &[ticket, lease]).await;
        assert_eq!(outcome, Answer::Text("released"));
    }
    everything_was_given_back(&mut one, 4).await;
}

fn words(answer: Answer<'_>) -> String {
    match answer {
        Answer::Text(text) => text.to_owned(),
        Answer::Number(number) => number.to_string(),
        Answer::Nothing => String::new(),
        Answer::List(answers) => answers.into_iter().map(words).collect::<Vec<_>>().join(" "),
    }
}
