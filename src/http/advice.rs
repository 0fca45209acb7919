//! What a problem means and what to do about it, in the words of the pages at `/problems/{code}` and of
//! `docs/problems.md`, which is compared with them. Code stands between backticks, as in Markdown.

use kvgate_api::ProblemCode;

/// The texts of one problem.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Advice {
    /// What happened.
    pub happened: &'static str,
    /// What the program that called does about it.
    pub client: &'static str,
    /// What the operator of the service does about it.
    pub operator: &'static str,
}

/// Nothing is wrong with the service.
const CALLER_ONLY: &str = "Nothing: the request is at fault. The caller's log has the answer, whose `instance` is the \
    request's id.";

/// The texts of a problem.
#[must_use]
pub const fn advice(code: ProblemCode) -> Advice {
    match code {
        ProblemCode::InvalidJson => Advice {
            happened: "The body of the request is not one JSON value in UTF-8, or it was cut off.",
            client: "Send one JSON value with nothing after it, and send it whole. A repeat of the same bytes fails the \
                same way; new work goes on without a lease.",
            operator: CALLER_ONLY,
        },
        ProblemCode::InvalidId => Advice {
            happened: "A ticket, session, lease or close id breaks a rule. `detail` names the rule, `errors` the place.",
            client: "Ids have 1 to 512 bytes of UTF-8, contain no control characters, and are not `.` or `..`. In a path, \
                percent-encode every byte that is not a letter, a digit or one of `-` `.` `_` `~`, exactly once.",
            operator: "Nothing, unless a proxy decodes paths on their way: it must pass them on as they came.",
        },
        ProblemCode::InvalidRequest => Advice {
            happened: "The request can be read, but a field, a parameter or its form is not as it should be.",
            client: "Read `errors` in the answer: each entry names a place in the request and what is wrong there. Unknown \
                fields and parameters are refused, so that a typo is never silently ignored. New work goes on without a \
                lease; do not repeat the request as it is.",
            operator: "Look whether callers and service are of versions that belong together.",
        },
        ProblemCode::Unauthorized => Advice {
            happened: "The call needs a token, and none came with it or an unknown one.",
            client: "Send `Authorization: Bearer` with a token that stands in the service's token file; browsers log in at \
                `/login`. Trying again without one does not help; new work goes on without a lease.",
            operator: "Look whether the caller's token stands in the service's token file, and whether the file was read \
                again since it was changed.",
        },
        ProblemCode::Forbidden => Advice {
            happened: "The caller is known but may not make this call; or a web page of another origin tried to write.",
            client: "Use a token with the right for this call. From a browser, write only from the service's own pages.",
            operator: "Give the token the right it needs, and no more. When a proxy ends TLS, name the address that browsers \
                use with `--allowed-host https://...`.",
        },
        ProblemCode::NotFound => Advice {
            happened: "Nothing is served at this address.",
            client: "Look at `/openapi.json` for what this version serves. Ids in a path must be percent-encoded.",
            operator: "When a proxy serves the gate under a path prefix, let it take the prefix off.",
        },
        ProblemCode::LeaseNotFound => Advice {
            happened: "No lease with this id was ever issued by this store.",
            client: "Check the id: it is the `lease_id` of an admit. A lease is never found by its ticket. There is nothing \
                to give back.",
            operator: "After `kvgate store reset`, or a start on another data directory, all older leases are unknown: \
                callers that release them are told so once.",
        },
        ProblemCode::TicketNotFound => Advice {
            happened: "The ticket was never sent, or it ended more than ten minutes ago and is forgotten.",
            client: "Ask for a lease with a new ticket if the work still needs one. A cancel of it is not needed any more.",
            operator: CALLER_ONLY,
        },
        ProblemCode::SessionNotFound => Advice {
            happened: "The session was never used here, or it is forgotten.",
            client: "Nothing to do. A session is known from its first acquire or close on.",
            operator: CALLER_ONLY,
        },
        ProblemCode::CloseNotFound => Advice {
            happened: "No close with this id is known. Finished closes are remembered for an hour.",
            client: "Check the id: it is the `close_id` of a close. Close the session again if it should be closed; that \
                does no harm.",
            operator: CALLER_ONLY,
        },
        ProblemCode::MethodNotAllowed => Advice {
            happened: "The address is served, but not with this method.",
            client: "Use one of the methods that the header `Allow` lists.",
            operator: CALLER_ONLY,
        },
        ProblemCode::TicketConflict => Advice {
            happened: "The ticket was sent before with another session or other numbers.",
            client: "A ticket names one attempt. A repeat sends the same session and the same numbers; a new attempt takes a \
                new ticket.",
            operator: "Look for two callers that make the same ticket ids, such as two runs with the same name.",
        },
        ProblemCode::CloseSuperseded => Advice {
            happened: "The session was used or closed anew since the close that was to be sent again.",
            client: "Nothing is sent: it would hit the newer use of the session. Close the session itself when that use has \
                ended.",
            operator: "Nothing. Callers that give each attempt a fresh session id never meet this.",
        },
        ProblemCode::LeaseExpired => Advice {
            happened: "The lease has expired, was revoked, or ended so long ago that it is forgotten. Its tokens may be \
                reserved by others already.",
            client: "Running work goes on; do not release the lease again. Work that takes longer renews its lease at a third \
                of its life, or asks for a longer one with `ttl_s`.",
            operator: "When this happens often, callers die or hold work for longer than they say: see the alert \
                `KvgateLeaseExpiries`.",
        },
        ProblemCode::LeaseReleased => Advice {
            happened: "The lease was given back before.",
            client: "Nothing to do. Work that goes on needs a new ticket.",
            operator: CALLER_ONLY,
        },
        ProblemCode::BodyTooLarge => Advice {
            happened: "The body has more than 1 MiB, or more than 4 MiB at `/v1/batch`.",
            client: "Split larger batches. A prompt is never part of a request: only its length in tokens is.",
            operator: CALLER_ONLY,
        },
        ProblemCode::UnsupportedMediaType => Advice {
            happened: "The body is not plain JSON: its content type is another one, or it is compressed.",
            client: "Send `Content-Type: application/json` and no `Content-Encoding`.",
            operator: "Look whether a proxy compresses requests or drops the header.",
        },
        ProblemCode::HostNotAllowed => Advice {
            happened: "The `Host` header is neither the address that the service listens on, nor a loopback name, nor a \
                name of its configuration.",
            client: "Reach the service by an address that its operator named.",
            operator: "Name the host name under which callers, proxies and Prometheus reach the service with \
                `--allowed-host`. The rule keeps foreign web pages from reaching the service through a name of their own.",
        },
        ProblemCode::Recovering => Advice {
            happened: "The store is being loaded, or the fleet was not read yet. This takes seconds.",
            client: "New work goes on without a lease. A ticket that waits asks again after `Retry-After` with the same \
                ticket: its place is kept. Releases, cancels and closes are sent again.",
            operator: "Nothing for the first seconds. If it lasts, the log says what the start waits for.",
        },
        ProblemCode::Draining => Advice {
            happened: "The service is stopping. Places in line and leases are kept.",
            client: "New work goes on without a lease. A ticket that waits asks again with the same ticket: its place is kept \
                over the restart.",
            operator: "Nothing: an orderly stop was asked for, and ends within 5 s.",
        },
        ProblemCode::Overloaded => Advice {
            happened: "More calls wait than the service takes, or more closes are open than it keeps.",
            client: "New work goes on without a lease. Send releases, cancels and closes again later, and ask less often: a \
                waiting call with `wait_s` instead of many short ones, a batch instead of single calls.",
            operator: "Look at the time of commits (`kvgate_store_commit_seconds`): a slow disk is the usual cause. See the \
                alerts `KvgateStoreSlow` and `KvgateHttpErrors`.",
        },
        ProblemCode::StoreUnavailable => Advice {
            happened: "The store cannot promise durability now: a commit failed, or the disk does not answer.",
            client: "New work goes on without a lease. Send releases, cancels and closes again later.",
            operator: "Make room on the disk or mend it; the service comes back by itself, without a restart. See the alerts \
                `KvgateStoreDown` and `KvgateStoreLowSpace`.",
        },
    }
}
