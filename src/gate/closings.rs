//! Who waits until a close is done.

use std::collections::HashMap;

use kvgate_core::close::CloseIntent;
use kvgate_core::ids::CloseId;
use tokio::sync::oneshot;

/// Open calls by close. A part of the writer; the bound on open calls bounds it.
#[derive(Debug, Default)]
pub(super) struct Closings(HashMap<CloseId, Vec<oneshot::Sender<CloseIntent>>>);

impl Closings {
    /// Answers at once when the close is done.
    pub(super) fn wait_for(&mut self, close: CloseIntent, reply: oneshot::Sender<CloseIntent>) {
        if close.is_done() {
            // Whoever went away reads it another time.
            let _ = reply.send(close);
            return;
        }
        let waiting = self.0.entry(close.id).or_default();
        waiting.retain(|other| !other.is_closed());
        waiting.push(reply);
    }

    /// Whoever waits: a reloaded core is asked anew how their closes stand.
    pub(super) fn take(&mut self) -> Vec<(CloseId, oneshot::Sender<CloseIntent>)> {
        let waiting = std::mem::take(&mut self.0).into_iter();
        waiting
            .flat_map(|(close, replies)| replies.into_iter().map(move |reply| (close, reply)))
            .filter(|(_, reply)| !reply.is_closed())
            .collect()
    }

    /// A close is done.
    pub(super) fn done(&mut self, close: &CloseIntent) {
        for reply in self.0.remove(&close.id).unwrap_or_default() {
            let _ = reply.send(close.clone());
        }
    }
}
