//! The floor: axum with two handlers that read and write the bodies of an acquire and a release, and do
//! nothing else. What the service takes beyond this is its own.

use std::io::{self, BufRead, Write};
use std::net::Ipv4Addr;
use std::path::Path;

use axum::{Json, Router, routing};
use kvgate_api::{
    AcquireAnswer, AcquireRequest, Admit, AdmitReason, ReleaseOutcome, ReleaseRequest,
    ReleaseResult,
};
use tokio::net::{TcpListener, UnixListener};

/// Serves on a free port of loopback and on a Unix socket until stdin ends. The port is told on stdout.
///
/// # Errors
/// When an address cannot be taken.
pub async fn serve(socket: &Path) -> io::Result<()> {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let socket = UnixListener::bind(socket)?;
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{}", port.local_addr()?)?;
    stdout.flush()?;
    drop(stdout);
    let (ended, end) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        io::stdin()
            .lock()
            .lines()
            .map_while(Result::ok)
            .for_each(drop);
        // Nobody waits when the servers failed.
        let _ = ended.send(());
    });
    tokio::select! {
        _ = end => Ok(()),
        failed = axum::serve(port, router()).into_future() => failed,
        failed = axum::serve(socket, router()).into_future() => failed,
    }
}

fn router() -> Router {
    Router::new()
        .route("/v1/leases", routing::post(acquire))
        .route("/v1/leases/{lease_id}/release", routing::post(release))
}

async fn acquire(Json(asked): Json<AcquireRequest>) -> Json<AcquireAnswer> {
    Json(AcquireAnswer::Admit(Admit {
        reason: AdmitReason::CapacityAvailable,
        ticket_id: asked.ticket_id,
        session_id: asked.session_id,
        lease_id: "123456-0123456789abcdef".to_owned(),
        reservation_tokens: 22_528,
        epoch: 1,
        ttl_s: 600.0,
        ttl_clamped: false,
        expires_at: "2026-01-01T00:00:00.000Z".to_owned(),
        expires_in_s: 600.0,
        waited_s: 0.0,
        repeated: false,
        session_reopened: false,
    }))
}

async fn release(Json(_): Json<ReleaseRequest>) -> Json<ReleaseResult> {
    Json(ReleaseResult {
        outcome: ReleaseOutcome::Released,
    })
}
