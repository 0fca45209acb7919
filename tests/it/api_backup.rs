//! `GET /v1/backup` beside callers that read slowly.

use kvgate::store::read_copy;
use kvgate_core::command::{Acquire, Command};
use kvgate_core::decision::Scope;
use kvgate_core::ids::{Label, SessionId, TicketId};
use kvgate_core::policy::Policy;
use kvgate_core::ticket::Sent;
use kvgate_core::units::{Span, Tokens};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::time::timeout;

use crate::support::app::{Builder, SOON};

/// More than the buffers between two ends of a connection hold: lines of 4 KiB.
const TICKETS: usize = 3_000;

fn waiter(number: usize) -> Command {
    // Each quotation mark takes two bytes in JSON.
    let long = format!("{number:06}{}", "\"".repeat(506));
    Command::Acquire(Acquire {
        ticket: TicketId::new(&long).unwrap(),
        session: SessionId::new(&long).unwrap(),
        sent: Sent::Sum(Tokens::new(600).unwrap()),
        scope: Scope::Train,
        protected: false,
        ttl: Span::from_secs(60),
        client: Some(Label::new(&long).unwrap()),
        request_id: Some(Label::new(&long).unwrap()),
        stays: false,
    })
}

/// Each backup under way keeps a picture of the store in memory: there is one at a time, and a caller
/// that goes away gives its room back.
#[tokio::test]
async fn there_is_one_backup_at_a_time() {
    let app = Builder {
        policy: Policy {
            claim_grace: Span::from_secs(60),
            ..Builder::default().policy
        },
        ..Builder::default()
    }
    .start()
    .await;
    let commands = (0..TICKETS).map(waiter).collect();
    app.gate.batch(commands).await.unwrap();

    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4_096).unwrap();
    let mut slow = socket.connect(app.address).await.unwrap();
    let request = b"GET /v1/backup HTTP/1.1\r\nHost: localhost\r\n\r\n";
    slow.write_all(request).await.unwrap();
    slow.read_exact(&mut [0]).await.unwrap();
    let refused = app.get("/v1/backup").await;
    refused.is_problem(503, "overloaded");
    assert!(refused.header("retry-after").is_some());
    drop(slow);

    let whole = async {
        loop {
            let answer = app.get("/v1/backup").await;
            if answer.status == 200 {
                return answer;
            }
        }
    };
    let whole = timeout(SOON, whole).await.unwrap();
    let image = read_copy(whole.text.as_bytes()).unwrap();
    assert_eq!(image.tickets.len(), TICKETS);
    assert_eq!(whole.header("cache-control"), Some("no-store"));
    app.get("/v1/backup?all=1")
        .await
        .is_problem(422, "invalid_request");
}
