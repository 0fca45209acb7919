//! Client of kvgate, a durable admission gate for the KV cache of SGLang fleets.
//!
//! Before a model request the caller asks for a [`Lease`] on the tokens that the request will need; the lease is
//! released when it is dropped.
//!
//! ```no_run
//! use kvgate_client::{Ask, Gate, GateConfig, Usage};
//!
//! # async fn rollout() -> Result<(), Box<dyn std::error::Error>> {
//! let gate = Gate::new(GateConfig::default())?;
//! let lease = gate.acquire(Ask::new("s-7", 18_432, 4_096)).await?;
//! let fields = lease.engine_fields(); // for the request to the engine
//! println!("{} {}, waited {:?}", lease.action(), lease.reason(), lease.waited());
//! # let _ = fields;
//! lease.release(Usage::default()).await;
//! # Ok(())
//! # }
//! ```
//!
//! It **fails open**: a gate that is away, slow, wrong or restarting is never an error for the rollout. What a request
//! may cost then is bounded by one time-out, and a breaker skips the gate while it is not well. The one error of an
//! acquire, [`TicketCancelled`], is a decision of the gate: do not start this request.
//!
//! A lease is a budget, not a lock: work goes on when its lease is lost.

mod answer;
mod ask;
mod client;
mod config;
mod courier;
mod fail_open;
mod guard;
mod room;
mod session;
mod turns;
mod wire;

pub use answer::{Action, Close, CloseStatus, Decision, StepReport, TicketCancelled};
pub use ask::{Ask, Usage};
pub use client::Gate;
pub use config::{GateConfig, GateError, Token};
pub use guard::{EngineFields, Lease};
pub use session::Session;

pub use kvgate_api::{CloseEngine, CloseEngineState, CloseMode, Scope, State};

/// The code of the page is compiled with the tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
