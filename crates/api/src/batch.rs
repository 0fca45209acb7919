//! `POST /v1/batch`: many operations in one durable turn.

use serde::{Deserialize, Serialize};

use crate::request::{
    AcquireRequest, CancelOperation, CloseOperation, ReleaseOperation, RenewOperation,
};

/// Up to 1,000 operations; none of them waits.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BatchRequest {
    /// In the order in which they are applied.
    #[cfg_attr(feature = "openapi", schema(max_items = 1000))]
    pub operations: Vec<BatchOperation>,
}

/// One operation: the fields of the call of its own.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum BatchOperation {
    /// As `POST /v1/leases` with a `wait_s` of 0.
    Acquire(Box<AcquireRequest>),
    /// As `POST /v1/leases/{lease_id}/release`.
    Release(ReleaseOperation),
    /// As `POST /v1/leases/{lease_id}/renew`.
    Renew(RenewOperation),
    /// As `DELETE /v1/tickets/{ticket_id}`.
    Cancel(CancelOperation),
    /// As `POST /v1/sessions/{session_id}/close`.
    Close(CloseOperation),
}

/// To a batch: one result for each operation, in order.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BatchResults {
    /// The results.
    pub results: Vec<BatchResult>,
}

/// What the call of its own would have been answered.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BatchResult {
    /// Status.
    pub status: u16,
    /// Body; a problem when the status is 400 or above.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub body: serde_json::Value,
}
