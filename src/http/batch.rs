//! Many operations in one durable turn.

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use kvgate_api::{
    AcquireAnswer, BatchOperation, BatchRequest, BatchResults, CancelResult, CloseAnswer, Lease,
    Problem, ReleaseRequest, ReleaseResult,
};
use kvgate_core::command::{Acquire, CloseRequest, Command};
use kvgate_core::effect::{CloseReply, Reply};
use kvgate_core::ids::{LeaseId, Seq};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::answer::{json, with_receipts, with_seq};
use super::app::{App, Shown};
use super::convert::{self, Asked, CallFacts};
use super::extract::{BatchBody, NoQuery, object, parse, unreadable};
use super::front::Passed;
use super::leases::{acquire_status, known};
use super::problem::{self, Fault};
use super::without_op::WithoutOp;
use crate::gate::{GateError, Receipt};
use crate::telemetry::RequestId;

/// Operations of one call.
const OPERATIONS_MAX: usize = 1_000;

/// The envelope; each operation is read by itself, so that a bad one spoils no other.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<'a> {
    #[serde(borrow)]
    operations: Vec<&'a RawValue>,
}

/// Apply up to 1,000 operations in order, in one durable turn. None of them waits.
#[utoipa::path(
    post,
    path = "/v1/batch",
    tag = "leases",
    request_body = BatchRequest,
    responses((status = 200, description = "One result for each operation, in order", body = BatchResults))
)]
pub(super) async fn batch(
    State(app): State<App>,
    Extension(passed): Extension<Passed>,
    _: NoQuery,
    BatchBody(bytes): BatchBody,
) -> Result<Response, Fault> {
    let operations = operations(&bytes)?;
    let planned: Vec<Result<Planned, Fault>> = operations
        .iter()
        .map(|operation| plan(operation, &app))
        .collect();
    let commands: Vec<Command> = planned
        .iter()
        .filter_map(|planned| planned.as_ref().ok().map(Planned::command))
        .collect();
    // Nobody needs the text while the commands wait for their turn.
    drop(operations);
    drop(bytes);
    let replies = if commands.is_empty() {
        Vec::new()
    } else {
        app.gate().batch(commands).await?
    };
    Ok(answer(&app, passed.id, planned, replies))
}

/// The operations of a body, within their bound and not read themselves.
pub(super) fn operations(body: &[u8]) -> Result<Vec<&RawValue>, Fault> {
    let text = object(body)?;
    let envelope: Envelope<'_> =
        serde_json::from_str(text).map_err(|error| unreadable("", &error, text))?;
    if envelope.operations.len() > OPERATIONS_MAX {
        return Err(Fault::field(
            "/operations",
            format!("at most {OPERATIONS_MAX} operations"),
        ));
    }
    Ok(envelope.operations)
}

/// An operation that can be applied.
enum Planned {
    Acquire(Box<Asked>),
    Release(LeaseId),
    Renew {
        lease: LeaseId,
        ttl: Option<(kvgate_core::units::Span, bool)>,
    },
    Cancel(kvgate_core::ids::TicketId),
    Close(CloseRequest),
}

impl Planned {
    fn command(&self) -> Command {
        match self {
            Self::Acquire(asked) => Command::Acquire(Acquire {
                stays: false,
                ..asked.acquire.clone()
            }),
            Self::Release(lease) => Command::Release(*lease),
            Self::Renew { lease, ttl } => Command::Renew {
                lease: *lease,
                ttl: ttl.map(|(ttl, _)| ttl),
            },
            Self::Cancel(ticket) => Command::Cancel(ticket.clone()),
            Self::Close(request) => Command::Close(request.clone()),
        }
    }
}

fn plan(operation: &RawValue, app: &App) -> Result<Planned, Fault> {
    match read(operation.get())? {
        BatchOperation::Acquire(request) => {
            convert::asked(&request, app.config()).map(|asked| Planned::Acquire(Box::new(asked)))
        }
        BatchOperation::Release(release) => {
            convert::check_usage(&ReleaseRequest {
                prompt_tokens: release.prompt_tokens,
                completion_tokens: release.completion_tokens,
                cached_tokens: release.cached_tokens,
                engine: release.engine,
            })?;
            known(LeaseId::parse(&release.lease_id)).map(Planned::Release)
        }
        BatchOperation::Renew(renew) => Ok(Planned::Renew {
            lease: known(LeaseId::parse(&renew.lease_id))?,
            ttl: renew.ttl_s.map(convert::ttl),
        }),
        BatchOperation::Cancel(cancel) => {
            convert::ticket("/ticket_id", &cancel.ticket_id).map(Planned::Cancel)
        }
        BatchOperation::Close(close) => {
            let session = convert::session_id("/session_id", &close.session_id)?;
            let request = kvgate_api::CloseRequest {
                mode: close.mode,
                reason: close.reason,
            };
            Ok(Planned::Close(convert::close_request(session, request)))
        }
    }
}

/// Reads one operation. serde collects the fields of a tagged choice before it reads them, which is slow and loses
/// their places. So its word is read first, and then the fields without it.
pub(super) fn read(text: &str) -> Result<BatchOperation, Fault> {
    let text = object(text.as_bytes())?;
    if let Some(operation) = read_as_named(text) {
        return Ok(operation);
    }
    serde_json::from_str(text).map_err(|error| {
        let fault = unreadable("", &error, text);
        place_inside(text)
            .filter(|placed| placed.status() == fault.status())
            .unwrap_or(fault)
    })
}

/// `None` when it has a fault.
fn read_as_named(text: &str) -> Option<BatchOperation> {
    #[derive(Deserialize)]
    struct Named<'a> {
        #[serde(borrow)]
        op: &'a str,
    }
    let Named { op } = serde_json::from_str(text).ok()?;
    Some(match op {
        "acquire" => BatchOperation::Acquire(fields(text)?),
        "release" => BatchOperation::Release(fields(text)?),
        "renew" => BatchOperation::Renew(fields(text)?),
        "cancel" => BatchOperation::Cancel(fields(text)?),
        "close" => BatchOperation::Close(fields(text)?),
        _ => return None,
    })
}

fn fields<'a, T: Deserialize<'a>>(text: &'a str) -> Option<T> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = T::deserialize(WithoutOp(&mut reader)).ok()?;
    reader.end().ok()?;
    Some(value)
}

fn place_inside(text: &str) -> Option<Fault> {
    let mut fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(text).ok()?;
    let op = fields.remove("op")?;
    let bytes = serde_json::to_vec(&fields).ok()?;
    match op.as_str()? {
        "acquire" => parse::<kvgate_api::AcquireRequest>(&bytes).err(),
        "release" => parse::<kvgate_api::ReleaseOperation>(&bytes).err(),
        "renew" => parse::<kvgate_api::RenewOperation>(&bytes).err(),
        "cancel" => parse::<kvgate_api::CancelOperation>(&bytes).err(),
        "close" => parse::<kvgate_api::CloseOperation>(&bytes).err(),
        _ => None,
    }
}

/// [`BatchResults`] as they are written: each body as its call of its own would write it.
#[derive(Serialize)]
struct Results {
    results: Vec<Answered>,
}

#[derive(Serialize)]
struct Answered {
    status: u16,
    body: AnsweredBody,
}

#[derive(Serialize)]
#[serde(untagged)]
enum AnsweredBody {
    Acquire(Box<AcquireAnswer>),
    Release(ReleaseResult),
    Lease(Box<Lease>),
    Cancel(CancelResult),
    Close(Box<CloseAnswer>),
    Problem(Box<Problem>),
}

/// The answer to one operation as it is gathered.
struct Gathered {
    request: RequestId,
    shown: Shown,
    receipts: Vec<Receipt>,
    seq: Option<Seq>,
}

fn answer(
    app: &App,
    request: RequestId,
    planned: Vec<Result<Planned, Fault>>,
    replies: Vec<Result<(Option<Seq>, Reply), GateError>>,
) -> Response {
    let mut gathered = Gathered {
        request,
        shown: app.shown(),
        receipts: Vec::new(),
        seq: None,
    };
    let mut replies = replies.into_iter();
    let mut results = Vec::with_capacity(planned.len());
    for planned in planned {
        let result = planned.and_then(|planned| {
            let reply = replies.next().unwrap_or(Err(GateError::Draining));
            gathered.result(app, &planned, reply)
        });
        results.push(result.unwrap_or_else(|fault| {
            let problem = Box::new(fault.problem(gathered.request));
            answered(fault.status(), AnsweredBody::Problem(problem))
        }));
    }
    let response = with_seq(json(StatusCode::OK, &Results { results }), gathered.seq);
    with_receipts(response, gathered.receipts)
}

impl Gathered {
    fn result(
        &mut self,
        app: &App,
        planned: &Planned,
        reply: Result<(Option<Seq>, Reply), GateError>,
    ) -> Result<Answered, Fault> {
        let reply = match (reply, planned) {
            (Ok((seq, reply)), _) => {
                self.seq = self.seq.max(seq);
                reply
            }
            (Err(GateError::StoreUnavailable), Planned::Acquire(asked)) => {
                if !asked.local_bypasses.is_empty() {
                    app.gate().local_bypasses(asked.local_bypasses.clone());
                }
                let answer = Box::new(convert::store_unavailable(asked, app));
                return Ok(answered(StatusCode::OK, AnsweredBody::Acquire(answer)));
            }
            (Err(error), _) => return Err(error.into()),
        };
        match (reply, planned) {
            (Reply::Acquire(result), Planned::Acquire(asked)) => {
                let decision = app.gate().with_receipt(result?);
                if !asked.local_bypasses.is_empty() {
                    app.gate().local_bypasses(asked.local_bypasses.clone());
                }
                self.receipts.extend(decision.receipt);
                let facts = CallFacts {
                    ttl_clamped: asked.ttl_clamped,
                    waited_out: false,
                };
                let status = acquire_status(&decision.answer.outcome);
                let answer = convert::acquire_answer(decision.answer, facts, &self.shown);
                Ok(answered(status, AnsweredBody::Acquire(Box::new(answer))))
            }
            (Reply::Release(result), _) => {
                let outcome = convert::release_outcome(result?);
                let body = AnsweredBody::Release(ReleaseResult { outcome });
                Ok(answered(StatusCode::OK, body))
            }
            (Reply::Lease(result), Planned::Renew { ttl, .. }) => {
                let clamped = ttl.is_some_and(|(_, clamped)| clamped);
                let lease = Box::new(convert::lease(&result?, clamped, &self.shown));
                Ok(answered(StatusCode::OK, AnsweredBody::Lease(lease)))
            }
            (Reply::Cancel(outcome), _) => {
                let outcome = convert::cancel_outcome(outcome);
                let body = AnsweredBody::Cancel(CancelResult { outcome });
                Ok(answered(StatusCode::OK, body))
            }
            (Reply::Close(CloseReply::Taken(close)), _) => {
                let close = CloseAnswer::Taken(convert::close(&close, &self.shown));
                let body = AnsweredBody::Close(Box::new(close));
                Ok(answered(StatusCode::ACCEPTED, body))
            }
            (Reply::Close(CloseReply::Disabled), _) => {
                let body = Box::new(CloseAnswer::Disabled(convert::CLOSE_DISABLED));
                Ok(answered(StatusCode::OK, AnsweredBody::Close(body)))
            }
            (Reply::Close(CloseReply::Full), _) => Err(problem::too_many_closes()),
            (other, _) => {
                tracing::error!(reply = ?other, "the writer answered an operation in the words of another");
                Err(GateError::Overloaded.into())
            }
        }
    }
}

const fn answered(status: StatusCode, body: AnsweredBody) -> Answered {
    Answered {
        status: status.as_u16(),
        body,
    }
}
