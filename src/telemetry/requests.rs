//! Lines of the log that a request caused carry its id.
//!
//! A span for each request would tell the same, but it is formatted, entered and left for every call, and hardly any
//! call causes a line: a tenth of the instructions of an acquire and its release.

use std::fmt;
use std::future::Future;

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

tokio::task_local! {
    /// The request that is being served.
    static REQUEST: RequestId;
}

/// kvgate's own id of a request: unique over restarts, and short enough to be read aloud.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestId {
    salt: u64,
    number: u64,
}

impl RequestId {
    /// `salt` is random and the same for all requests of a process.
    #[must_use]
    pub const fn new(salt: u64, number: u64) -> Self {
        Self { salt, number }
    }

    /// Does something for this request.
    pub fn within<T>(self, act: impl FnOnce() -> T) -> T {
        REQUEST.sync_scope(self, act)
    }

    /// The same for what takes its time.
    pub fn during<F: Future>(self, act: F) -> impl Future<Output = F::Output> {
        REQUEST.scope(self, act)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{:x}", self.salt, self.number)
    }
}

/// A format of lines that ends them with the id of the request.
#[derive(Debug)]
pub(super) struct WithRequest<F> {
    pub(super) format: F,
    /// Lines are JSON objects.
    pub(super) json: bool,
}

impl<S, N, F> FormatEvent<S, N> for WithRequest<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let Ok(id) = REQUEST.try_with(|id| *id) else {
            return self.format.format_event(context, writer, event);
        };
        let mut line = String::new();
        self.format
            .format_event(context, Writer::new(&mut line), event)?;
        let line = line.trim_end();
        match line.strip_suffix('}').filter(|_| self.json) {
            Some(fields) => writeln!(writer, "{fields},\"request\":\"{id}\"}}"),
            None => writeln!(writer, "{line} request={id}"),
        }
    }
}
