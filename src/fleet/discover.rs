//! Asks the router which engines there are (CAP1, CAP7).
//!
//! `/workers` first; only a 404 leads on to `/list_workers`, since a router that asks for a key is
//! another fault than one that does not know the path. What the answer means is in `rows`.

use kvgate_core::ids::EngineId;
use kvgate_core::reading::{RouterAnswer, RouterFailure};
use reqwest::Client;
use url::Url;

use super::address::BaseUrl;
use super::fetch::{self, Ask, BODY_BYTES_MAX, FetchError};
use super::rows::{self, BadEntries, RouterKind, Spellings};
use super::secret::Secret;

/// What the router said.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Discovery {
    /// Its engines, or why there are none.
    pub answer: RouterAnswer,
    /// Entries that were skipped.
    pub bad: BadEntries,
    /// Engines that are written in several ways.
    pub spellings: Spellings,
    /// Told by this answer; `None` when it does not tell.
    pub kind: Option<RouterKind>,
}

impl Discovery {
    /// No good answer.
    #[must_use]
    pub fn failed(failure: RouterFailure) -> Self {
        Self {
            answer: RouterAnswer::Failed(failure),
            bad: BadEntries::default(),
            spellings: Spellings::new(),
            kind: None,
        }
    }
}

/// A router and how to ask it.
#[derive(Clone, Debug)]
pub struct Router {
    /// Its address without a trailing slash, query, fragment and user info; a path before its routes
    /// stays.
    base: String,
    /// What an engine at this address would be called.
    engine: Option<EngineId>,
    key: Option<Secret>,
}

/// What an engine at the address of a router would be called: no engine is (CLO4).
#[must_use]
pub fn as_engine(router: &Url) -> Option<EngineId> {
    let base = BaseUrl::parse(router.as_str()).ok()?;
    Some(base.engine())
}

impl Router {
    /// The router at `url`.
    #[must_use]
    pub fn new(url: &Url, key: Option<Secret>) -> Self {
        let mut url = url.clone();
        url.set_query(None);
        url.set_fragment(None);
        // keys come from key files; an address is shown and logged
        let _ = url.set_username("");
        let _ = url.set_password(None);
        Self {
            base: url.as_str().trim_end_matches('/').to_owned(),
            engine: as_engine(&url),
            key,
        }
    }

    /// Asks once. With `kind_wanted` and an answer whose rows do not tell the kind, `/list_workers`
    /// is asked too: whether and how it is missing tells the rest.
    pub async fn ask(&self, client: &Client, kind_wanted: bool) -> Discovery {
        let (mut found, on_list_workers) = match self.get(client, "/workers").await {
            Err(FetchError::Status {
                status: 404,
                from_smg,
            }) => {
                let mut found = self.discovery(self.get(client, "/list_workers").await);
                found.kind = found.kind.or(from_smg.then_some(RouterKind::Smg));
                (found, true)
            }
            answer => (self.discovery(answer), false),
        };
        let listed = matches!(found.answer, RouterAnswer::Workers(_));
        if kind_wanted && found.kind.is_none() && listed && !on_list_workers {
            found.kind = self.kind_by_list_workers(client).await;
        }
        found
    }

    fn discovery(&self, answer: Result<Vec<u8>, FetchError>) -> Discovery {
        let body = match answer {
            Ok(body) => body,
            Err(error) => return Discovery::failed(failure(&error)),
        };
        let Ok(mut listed) = rows::read(&body) else {
            return Discovery::failed(RouterFailure::Unreadable);
        };
        if let Some(engine) = &self.engine {
            listed = listed.without_router(engine);
        }
        Discovery {
            answer: RouterAnswer::Workers(listed.workers),
            bad: listed.bad,
            spellings: listed.spellings,
            kind: listed.kind,
        }
    }

    async fn kind_by_list_workers(&self, client: &Client) -> Option<RouterKind> {
        match self.get(client, "/list_workers").await {
            // a front that answers every path with a page tells nothing
            Ok(body) => rows::read(&body).ok().map(|_| RouterKind::VllmRouter),
            Err(FetchError::Status { from_smg: true, .. }) => Some(RouterKind::Smg),
            Err(_) => None,
        }
    }

    async fn get(&self, client: &Client, path: &str) -> Result<Vec<u8>, FetchError> {
        let ask = Ask {
            url: &format!("{}{path}", self.base),
            key: self.key.as_ref(),
            accept: "application/json",
        };
        fetch::get(client, ask, BODY_BYTES_MAX).await
    }
}

const fn failure(error: &FetchError) -> RouterFailure {
    match error {
        FetchError::Status {
            status: status @ (401 | 403),
            ..
        } => RouterFailure::KeyRefused(*status),
        FetchError::Status { status, .. } => RouterFailure::Status(*status),
        FetchError::Unreadable => RouterFailure::Unreadable,
        FetchError::Refused(_) | FetchError::NotAllowed(_) => RouterFailure::Refused,
    }
}
