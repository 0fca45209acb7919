//! [`Session`]: one multi-turn program, closed at its end.

use std::sync::Arc;

use kvgate_api::{CloseMode, EndedAs};
use tokio::sync::watch;

use crate::answer::{Action, Close, TicketCancelled};
use crate::ask::Ask;
use crate::client::Inner;
use crate::guard::Lease;

/// One multi-turn program. Its end closes the session at the gate, once its own bypassed work has ended: the gate
/// itself joins the leases, but it cannot see what runs without one.
///
/// [`close`](Self::close) says that the program came to its end; a session that is dropped without it was given up.
#[derive(Debug)]
#[must_use = "a session that is dropped is closed"]
pub struct Session {
    inner: Arc<Inner>,
    session_id: String,
    /// How many of its leases are bypasses that still run.
    bypassed: watch::Sender<usize>,
    is_closed: bool,
}

/// Bypassed work that runs; dropped when it has ended.
#[derive(Debug)]
pub struct Joined(watch::Sender<usize>);

impl Joined {
    fn new(bypassed: &watch::Sender<usize>) -> Self {
        bypassed.send_modify(|count| *count += 1);
        Self(bypassed.clone())
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count = count.saturating_sub(1));
    }
}

impl Session {
    pub(crate) fn new(inner: Arc<Inner>, session_id: String) -> Self {
        Self {
            inner,
            session_id,
            bypassed: watch::Sender::new(0),
            is_closed: false,
        }
    }

    /// Its id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.session_id
    }

    /// What a request of this session asks for, to be handed to [`acquire`](Self::acquire).
    #[must_use]
    pub fn ask(&self, prompt_tokens: u64, max_new_tokens: u64) -> Ask {
        Ask::new(&self.session_id, prompt_tokens, max_new_tokens)
    }

    /// A lease of this session, whatever session the ask names; see [`Gate::acquire`](crate::Gate::acquire).
    ///
    /// # Errors
    ///
    /// [`TicketCancelled`] when the gate says that the request must not start.
    pub fn acquire(
        &self,
        ask: Ask,
    ) -> impl Future<Output = Result<Lease, TicketCancelled>> + Send + 'static + use<> {
        let inner = Arc::clone(&self.inner);
        let ask = ask.of_session(&self.session_id);
        let bypassed = self.bypassed.clone();
        async move {
            let lease = inner.acquire(ask).await?;
            Ok(match lease.action() {
                Action::Admit => lease,
                Action::Bypass => lease.join(Joined::new(&bypassed)),
            })
        }
    }

    /// Closes the session: the engines drop its KV. The close is sent when the last bypassed lease of the session is
    /// dropped, whether or not this is awaited; awaiting it while holding one waits for ever.
    pub fn close(mut self, mode: CloseMode) -> impl Future<Output = Close> + Send + use<> {
        self.end(mode, EndedAs::Terminal)
    }

    fn end(
        &mut self,
        mode: CloseMode,
        reason: EndedAs,
    ) -> impl Future<Output = Close> + Send + use<> {
        self.is_closed = true;
        let inner = Arc::clone(&self.inner);
        let session_id = std::mem::take(&mut self.session_id);
        // At once when nothing runs, so that a flush right afterwards knows of it.
        let at_once =
            (*self.bypassed.borrow() == 0).then(|| inner.close(&session_id, mode, reason));
        let mut running = self.bypassed.subscribe();
        let later = at_once.is_none().then(|| {
            let handle = inner.shared.handle.clone();
            let session_id = session_id.clone();
            handle.spawn(async move {
                // The sender lives in the leases; without any nothing runs either.
                let _ = running.wait_for(|count| *count == 0).await;
                inner.close(&session_id, mode, reason).await
            })
        });
        async move {
            if let Some(closing) = at_once {
                return closing.await;
            }
            let closed = match later {
                Some(task) => task.await.ok(),
                None => None,
            };
            closed.unwrap_or_else(|| Close::unanswered(&session_id))
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !self.is_closed {
            drop(self.end(CloseMode::Join, EndedAs::Dropped));
        }
    }
}
