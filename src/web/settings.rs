//! Settings and audit: what is in force and who set it, what this process was started with, the store,
//! the notices, and what operators did. A change goes through the confirmation.

use askama::Template;
use axum::extract::State;
use axum::response::Response;
use kvgate_api::{AuditAction, AuditEntry, Severity, StoreState};
use kvgate_core::command::SLICE_MAX;
use kvgate_core::policy::{AUDIT_MAX, Policy};
use kvgate_core::settings::{self, Moved, Setting, SettingValue};
use serde_json::{Map, Value};

use super::format::{bytes, duration, grouped, moment};
use super::link::link;
use super::page::{Ask, Look, Parts, Screen, Tab, Trouble, Web};
use crate::http::{App, Fault, Fields, read};
use crate::words;

/// Entries of the audit on one page.
const ROWS: usize = 50;

/// Actions of the audit that one can look for: the word of the API, and for people.
const ACTIONS: [(&str, &str); 6] = [
    ("settings_changed", "settings changed"),
    ("settings_reset", "settings reset"),
    ("lease_revoked", "lease revoked"),
    ("ticket_cancelled", "ticket cancelled"),
    ("session_closed", "session closed"),
    ("close_retried", "close retried"),
];

/// The place of an action in [`ACTIONS`].
const fn named(action: AuditAction) -> (&'static str, &'static str) {
    let [changed, reset, revoked, cancelled, closed, retried] = ACTIONS;
    match action {
        AuditAction::SettingsChanged => changed,
        AuditAction::SettingsReset => reset,
        AuditAction::LeaseRevoked => revoked,
        AuditAction::TicketCancelled => cancelled,
        AuditAction::SessionClosed => closed,
        AuditAction::CloseRetried => retried,
    }
}

#[derive(Template)]
#[template(path = "settings.html")]
struct Layout<'a> {
    parts: &'a Parts,
}

#[derive(Template)]
#[template(path = "parts/settings-runtime.html")]
struct RuntimePart {
    rows: Vec<RuntimeRow>,
    changed: usize,
    can_act: bool,
}

struct RuntimeRow {
    name: &'static str,
    about: &'static str,
    value: String,
    origin: String,
    origin_word: String,
    configured: String,
    configured_by: &'static str,
    /// What it can be; empty when it is written.
    choices: &'static [&'static str],
    is_set: bool,
}

#[derive(Template)]
#[template(path = "parts/settings-config.html")]
struct ConfigPart {
    rows: Vec<ConfigRow>,
}

struct ConfigRow {
    name: &'static str,
    value: String,
    origin: &'static str,
}

#[derive(Template)]
#[template(path = "parts/settings-tokens.html")]
struct TokensPart {
    open: bool,
    /// Names and scopes; never what opens the door.
    tokens: Vec<(String, &'static str)>,
}

#[derive(Template)]
#[template(path = "parts/settings-store.html")]
struct StorePart {
    /// Name, value, and which figure of the state it is.
    pairs: Vec<(&'static str, String, &'static str)>,
}

#[derive(Template)]
#[template(path = "parts/settings-notices.html")]
struct NoticesPart {
    notices: Vec<NoticeRow>,
}

struct NoticeRow {
    code: String,
    severity: &'static str,
    dot: &'static str,
    since: String,
    text: String,
}

#[derive(Template)]
#[template(path = "parts/settings-audit.html")]
struct AuditPart<'a> {
    total: Option<String>,
    filtered: bool,
    q: &'a str,
    action: &'a str,
    actions: &'static [(&'static str, &'static str)],
    rows: Vec<AuditRow>,
    newest: Option<String>,
    next: Option<String>,
}

struct AuditRow {
    no: u64,
    at: String,
    when: String,
    who: String,
    action: &'static str,
    detail: String,
}

/// What the address asks for.
struct Asked {
    q: String,
    action: String,
    before: Option<u64>,
}

/// `GET /settings`.
pub(super) async fn show(State(web): State<Web>, ask: Ask) -> Response {
    web.show(ask, build).await
}

async fn build(mut look: Look) -> Result<Screen, Trouble> {
    let asked = Asked::take(&mut look)?;
    // While the store is away the page shows what else is known.
    let (found, more) = entries(&look.app, &asked).await.unwrap_or_default();
    let mut parts = Parts::default();
    parts.add("p-runtime", &runtime(&look))?;
    parts.add("p-config", &configuration(&look.app))?;
    parts.add("p-tokens", &tokens(&look.app))?;
    parts.add("p-store", &store(&look))?;
    parts.add("p-notices", &notices(&look))?;
    parts.add("p-audit", &audit(&asked, &found, more))?;
    Ok(Screen {
        tab: Some(Tab::Settings),
        title: "Settings".to_owned(),
        parts,
        layout: |parts| Layout { parts }.render(),
    })
}

impl Asked {
    fn take(look: &mut Look) -> Result<Self, Fault> {
        let mut query = std::mem::take(&mut look.query);
        let before = query.take("before").map(|text| text.parse::<u64>());
        let asked = Self {
            before: before
                .transpose()
                .map_err(|_| Fault::field("?before", "must be the number of an entry"))?,
            q: query.take("q").unwrap_or_default(),
            action: query.take("action").unwrap_or_default(),
        };
        query.done()?;
        let known = ACTIONS.iter().any(|(word, _)| *word == asked.action);
        if !known && !asked.action.is_empty() {
            return Err(Fault::field("?action", "must be an action of the audit"));
        }
        Ok(asked)
    }

    fn is_filtered(&self) -> bool {
        !self.q.is_empty() || !self.action.is_empty()
    }

    fn takes(&self, entry: &AuditEntry) -> bool {
        let action = self.action.is_empty() || named(entry.action).0 == self.action;
        action && (entry.who.contains(&self.q) || entry.detail.contains(&self.q))
    }

    fn page(&self, before: &str) -> String {
        let page = link(
            "settings",
            &[("action", &self.action), ("q", &self.q), ("before", before)],
        );
        format!("{page}#p-audit")
    }
}

// ---- settings ----------------------------------------------------------------------------------

fn runtime(look: &Look) -> RuntimePart {
    let settings = &look.app.gate().view().settings;
    let origins = &look.app.config().origins;
    let effective = settings.effective();
    let rows: Vec<RuntimeRow> = Setting::ALL
        .iter()
        .map(|&setting| {
            let is_set = settings.overrides.has(setting);
            let configured_by = origins.of(setting).word();
            RuntimeRow {
                name: words::setting(setting),
                about: about(setting),
                value: words::setting_value(setting.value(&effective)),
                origin: if is_set {
                    "run_time".to_owned()
                } else {
                    configured_by.to_owned()
                },
                origin_word: if is_set {
                    "run time".to_owned()
                } else {
                    configured_by.to_owned()
                },
                configured: words::setting_value(setting.value(&settings.configured)),
                configured_by,
                choices: choices(setting, &effective),
                is_set,
            }
        })
        .collect();
    RuntimePart {
        changed: rows.iter().filter(|row| row.is_set).count(),
        rows,
        can_act: look.can_act,
    }
}

const fn about(setting: Setting) -> &'static str {
    match setting {
        Setting::ProgramAdmission => "program-aware admission",
        Setting::SessionLifecycle => "session closes",
        Setting::Paused => "everything goes on without a lease",
        Setting::Headroom => "share of the capacity that may be reserved",
        Setting::PressureThreshold => "worst engine usage at which new work waits",
        Setting::ExpectedDecodeCap => "bound on the completion part of a reservation",
        Setting::MaxWait => "seconds until a waiter goes on without a lease",
        Setting::Scope => "which requests admission applies to",
    }
}

fn choices(setting: Setting, effective: &Policy) -> &'static [&'static str] {
    match setting.value(effective) {
        SettingValue::Switch(_) => &["on", "off"],
        SettingValue::Scope(_) => &["train", "all"],
        SettingValue::Share(_) | SettingValue::Cap(_) | SettingValue::Time(_) => &[],
    }
}

/// The change that a form wishes for: fields that are as they were when the page was made stay, so
/// that nobody undoes what another one changed meanwhile.
pub(super) fn change(
    fields: &Fields,
    settings: &settings::Settings,
) -> Result<settings::SettingsChange, Fault> {
    let effective = settings.effective();
    let mut wished = Map::new();
    for &setting in Setting::ALL {
        let name = words::setting(setting);
        if fields.get(&format!("configured.{name}")).is_some() {
            wished.insert(name.to_owned(), Value::Null);
            continue;
        }
        let Some(text) = fields.get(name).map(str::trim) else {
            continue;
        };
        let was = format!("was.{name}");
        if fields.get(&was) == Some(text) {
            continue;
        }
        wished.insert(
            name.to_owned(),
            value(name, text, setting.value(&effective))?,
        );
    }
    let wished = serde_json::from_value(Value::Object(wished))
        .map_err(|error| Fault::bad_request(format!("The settings cannot be read: {error}.")))?;
    read::settings_change(&wished)
}

/// A text of the form as the API takes it.
fn value(name: &str, text: &str, kind: SettingValue) -> Result<Value, Fault> {
    let field = |detail: &str| Fault::field(format!("/{name}"), detail);
    let number = || {
        let number = text.parse::<f64>().ok();
        number
            .and_then(serde_json::Number::from_f64)
            .map(Value::Number)
    };
    match kind {
        SettingValue::Switch(_) => match text {
            "on" => Ok(Value::Bool(true)),
            "off" => Ok(Value::Bool(false)),
            _ => Err(field("must be on or off")),
        },
        SettingValue::Share(_) => number().ok_or_else(|| field("must be above 0 and at most 1")),
        SettingValue::Time(_) => number().ok_or_else(|| field("must be seconds, at least 0")),
        SettingValue::Cap(_) => match (text, text.parse::<u64>()) {
            ("none", _) => Ok(Value::from("none")),
            (_, Ok(tokens)) => Ok(Value::from(tokens)),
            _ => Err(field("must be a number of tokens, or none")),
        },
        SettingValue::Scope(_) => match text {
            "train" | "all" => Ok(Value::from(text)),
            _ => Err(field("must be train or all")),
        },
    }
}

/// One setting that moves: its name, and from where to where.
pub(super) fn moved(moved: &Moved) -> (String, String) {
    let (from, to) = (
        words::setting_value(moved.from),
        words::setting_value(moved.to),
    );
    let text = match (moved.from == moved.to, moved.is_set) {
        (false, true) => format!("{from} → {to}"),
        (false, false) => format!("{from} → {to}, as configured"),
        (true, true) => format!("stays {to}, whatever is configured"),
        (true, false) => format!("stays {to}, as configured"),
    };
    (words::setting(moved.setting).to_owned(), text)
}

fn configuration(app: &App) -> ConfigPart {
    let configured = app.config().configured.iter();
    ConfigPart {
        rows: configured
            .map(|shown| ConfigRow {
                name: shown.name,
                value: shown.value.clone(),
                origin: shown.origin.word(),
            })
            .collect(),
    }
}

fn tokens(app: &App) -> TokensPart {
    let access = &app.config().access;
    let callers = access.callers().into_iter();
    TokensPart {
        open: access.is_open(),
        tokens: callers
            .map(|caller| (caller.name.to_string(), caller.right.word()))
            .collect(),
    }
}

// ---- store, build, notices ---------------------------------------------------------------------

fn store(look: &Look) -> StorePart {
    let state = &look.state;
    let view = look.app.gate().view();
    let commit = state.store.commit_p99_s;
    StorePart {
        pairs: vec![
            (
                "State",
                match state.store.state {
                    StoreState::Ok => "ok",
                    StoreState::Recovering => "recovering",
                    StoreState::Unavailable => "not available",
                    StoreState::LowSpace => "low space on the disk",
                }
                .to_owned(),
                "",
            ),
            ("Size on disk", bytes(state.store.bytes), ""),
            (
                "Commit, 99th percentile",
                commit.map_or_else(
                    || "–".to_owned(),
                    |seconds| format!("{:.1} ms", seconds * 1e3),
                ),
                "",
            ),
            ("Last change", format!("#{}", grouped(view.seq.0)), ""),
            ("Worker-set generation", grouped(state.epoch), "epoch"),
            ("Leases", grouped(state.leases.count), "leases.count"),
            ("Waiting", grouped(state.queue.waiting), "queue.waiting"),
            (
                "Closes under way",
                grouped(state.closes.pending),
                "closes.pending",
            ),
            (
                "Failed closes",
                grouped(state.closes.failed),
                "closes.failed",
            ),
            ("Version", state.version.clone(), "version"),
            ("Build", build_kind().to_owned(), ""),
            ("Started", moment(&state.started_at), ""),
            ("Runs for", duration(look.app.uptime()), ""),
        ],
    }
}

const fn build_kind() -> &'static str {
    if cfg!(debug_assertions) {
        "with debug checks"
    } else {
        "release"
    }
}

fn notices(look: &Look) -> NoticesPart {
    let notices = look.state.notices.iter();
    NoticesPart {
        notices: notices
            .map(|notice| NoticeRow {
                code: notice.code.clone(),
                severity: match notice.severity {
                    Severity::Error => "error",
                    Severity::Warning => "warning",
                    Severity::Info => "for information",
                },
                dot: match notice.severity {
                    Severity::Error => "b",
                    Severity::Warning => "w",
                    Severity::Info => "g",
                },
                since: moment(&notice.since),
                text: notice.text.clone(),
            })
            .collect(),
    }
}

// ---- audit -------------------------------------------------------------------------------------

/// The entries of the page, and whether there are more. Without a filter one slice is read.
async fn entries(app: &App, asked: &Asked) -> Result<(Vec<(u64, AuditEntry)>, bool), Fault> {
    let mut found = Vec::new();
    let mut from = Some(
        asked
            .before
            .map_or(u64::MAX, |before| before.saturating_sub(1)),
    );
    let rows = if asked.is_filtered() { SLICE_MAX } else { ROWS };
    while let Some(first) = from.take() {
        let (slice, more) = read::audit_slice(app, first, rows).await?;
        let last = slice.last().map(|(no, _)| *no);
        found.extend(slice.into_iter().filter(|(_, entry)| asked.takes(entry)));
        if found.len() > ROWS || !asked.is_filtered() {
            let more = more || found.len() > ROWS;
            found.truncate(ROWS);
            return Ok((found, more));
        }
        if more {
            from = last.and_then(|last| last.checked_sub(1));
            tokio::task::yield_now().await;
        }
    }
    Ok((found, false))
}

fn audit<'a>(asked: &'a Asked, found: &[(u64, AuditEntry)], more: bool) -> AuditPart<'a> {
    // The oldest ones are forgotten first, so that the numbers tell how many there are.
    let newest = found
        .first()
        .filter(|_| !asked.is_filtered() && asked.before.is_none());
    let most = u64::try_from(AUDIT_MAX).unwrap_or(u64::MAX);
    AuditPart {
        total: newest.map(|(no, _)| grouped((*no).min(most))),
        filtered: asked.is_filtered(),
        q: &asked.q,
        action: &asked.action,
        actions: &ACTIONS,
        rows: found
            .iter()
            .map(|(no, entry)| AuditRow {
                no: *no,
                at: entry.at.clone(),
                when: moment(&entry.at),
                who: entry.who.clone(),
                action: named(entry.action).1,
                detail: entry.detail.clone(),
            })
            .collect(),
        newest: asked.before.map(|_| asked.page("")),
        next: found
            .last()
            .filter(|_| more)
            .map(|(no, _)| asked.page(&no.to_string())),
    }
}
