//! Settings: flag > environment > file > default. One list gives names, types and help.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use kvgate_core::capacity::FleetConfig;
use kvgate_core::policy::{self, AdmissionScope, Policy};
use kvgate_core::settings::{Hidden, Setting, Settings};
use kvgate_core::units::{Ppm, Span, Tokens};
use serde::Deserialize;
use url::Url;

use crate::access::{AllowedHost, TokenFile};
use crate::fleet::address::BaseUrl;
use crate::fleet::closer::CloserConfig;
use crate::fleet::discover;
use crate::fleet::networks::{Network, Networks};
use crate::fleet::poller::PollerConfig;
use crate::fleet::secret::Secret;
use crate::http::{Endpoint, TlsFiles};

/// What a Unix socket begins with in a list of addresses.
const UNIX_PREFIX: &str = "unix:";

/// Prefix of environment names.
const ENV_PREFIX: &str = "KVGATE_";

/// Variables with that prefix that are no settings: the command line's own, those of clients, and the name
/// by which scripts find the program.
const OTHER_VARIABLES: &[&str] = &["CONFIG", "URL", "TOKEN", "TOKEN_NAME", "TOKEN_FILE", "BIN"];

/// Largest file of settings, or of a key, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The longest duration that a setting may name: a year. Longer ones are slips of a unit.
const SECONDS_MAX: f64 = 366.0 * 86_400.0;

/// A setting that cannot be used. The process ends with exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

impl ConfigError {
    /// A sentence that names the setting and what it takes.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

fn refused(text: impl Into<String>) -> ConfigError {
    ConfigError::new(text)
}

/// Where a value comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// The file of `--config`.
    File,
    /// A `KVGATE_` variable.
    Env,
    /// The command line.
    Flag,
}

impl Origin {
    /// The word that is shown.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::File => "file",
            Self::Env => "env",
            Self::Flag => "flag",
        }
    }
}

/// Where the configured values come from of settings that can be changed at run time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Origins(BTreeMap<Setting, Origin>);

impl Origins {
    fn of_all(merged: &Merged) -> Self {
        Self(BTreeMap::from([
            (Setting::ProgramAdmission, merged.program_admission.1),
            (Setting::SessionLifecycle, merged.session_lifecycle.1),
            (Setting::Headroom, merged.admission_headroom.1),
            (
                Setting::PressureThreshold,
                merged.admission_pressure_threshold.1,
            ),
            (
                Setting::ExpectedDecodeCap,
                merged.admission_expected_decode_cap.1,
            ),
            (Setting::MaxWait, merged.admission_max_wait_s.1),
            (Setting::Scope, merged.admission_scope.1),
        ]))
    }

    /// Of one; what cannot be configured has its default.
    #[must_use]
    pub fn of(&self, setting: Setting) -> Origin {
        self.0.get(&setting).copied().unwrap_or(Origin::Default)
    }

    /// Settings that somebody configured and that a run-time setting hides, with who configured them.
    #[must_use]
    pub fn hidden(&self, settings: &Settings) -> Vec<(Hidden, Origin)> {
        let hidden = settings.hidden().into_iter();
        hidden
            .map(|hidden| (hidden, self.of(hidden.setting)))
            .filter(|(_, origin)| *origin != Origin::Default)
            .collect()
    }
}

macro_rules! settings {
    ($( $(#[$meta:meta])* $name:ident: $kind:ty = $default:expr; )*) => {
        /// One layer of settings: what one source says, `None` where it says nothing.
        #[derive(Args, Clone, Debug, Default, PartialEq, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct Layer {
            $( $(#[$meta])* pub $name: Option<$kind>, )*
        }

        impl Layer {
            /// Names of all settings, as they stand in a file.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name)),*];
        }

        /// Every value with its origin.
        #[derive(Clone, Debug)]
        struct Merged {
            $( $name: ($kind, Origin), )*
        }

        impl Merged {
            fn new(flags: Layer, env: Layer, file: Layer) -> Self {
                $(
                    let $name = None
                        .or(flags.$name.map(|value| (value, Origin::Flag)))
                        .or(env.$name.map(|value| (value, Origin::Env)))
                        .or(file.$name.map(|value| (value, Origin::File)))
                        .unwrap_or_else(|| ($default, Origin::Default));
                )*
                Self { $($name),* }
            }

            fn shown(&self) -> Vec<Shown> {
                vec![$(Shown {
                    name: stringify!($name),
                    value: self.$name.0.shown(),
                    origin: self.$name.1,
                }),*]
            }
        }
    };
}

settings! {
    /// Address of API and dashboard, or a Unix socket; may be given more than once. Port 0 takes any
    /// free one
    #[arg(long, value_name = "HOST:PORT|unix:PATH")]
    listen: Vec<String> = vec!["127.0.0.1:7070".to_owned()];
    /// Directory of the store
    #[arg(long, value_name = "DIR")]
    data: String = "./kvgate-data".to_owned();
    /// Router to discover engines through
    #[arg(long, value_name = "URL")]
    router: String = String::new();
    /// Static engine, instead of or beside a router; may be given more than once
    #[arg(long, value_name = "URL")]
    engine: Vec<String> = Vec::new();
    /// Turn program-aware admission on
    #[arg(long, visible_alias = "agentic-program-admission", num_args = 0..=1,
          require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    program_admission: bool = false;
    /// Turn session closes on
    #[arg(long, visible_alias = "agentic-session-lifecycle", num_args = 0..=1,
          require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    session_lifecycle: bool = false;
    /// Share of the fleet's KV capacity that may be reserved, above 0 and at most 1
    #[arg(long, visible_alias = "agentic-admission-headroom", value_name = "SHARE")]
    admission_headroom: f64 = 0.90;
    /// Worst engine usage at which new requests wait, above 0 and at most 1
    #[arg(long, visible_alias = "agentic-admission-pressure-threshold", value_name = "SHARE")]
    admission_pressure_threshold: f64 = 0.92;
    /// Upper bound on the completion part of a reservation, in tokens above 0, or `none`
    #[arg(long, visible_alias = "agentic-admission-expected-decode-cap", value_name = "TOKENS")]
    admission_expected_decode_cap: DecodeCap = DecodeCap(None);
    /// Longest wait before the aging bypass, in seconds; 0 lets nothing wait
    #[arg(long, visible_alias = "agentic-admission-max-wait-s", value_name = "SECONDS")]
    admission_max_wait_s: f64 = 30.0;
    /// Apply admission to `train` only, or to `all`
    #[arg(long, visible_alias = "agentic-admission-scope", value_name = "train|all")]
    admission_scope: String = "train".to_owned();
    /// Default lease life since grant or last renewal, in seconds: 1 to 86400
    #[arg(long, value_name = "SECONDS")]
    lease_ttl_s: f64 = 600.0;
    /// How long a place or a fresh grant is kept for a caller that is away, in seconds: 1 to 60
    #[arg(long, value_name = "SECONDS")]
    claim_grace_s: f64 = 10.0;
    /// Bound of the queue, above 0; who comes when it is full is a bypass
    #[arg(long, value_name = "COUNT")]
    max_waiting: u64 = 100_000;
    /// Time between two readings of the engines, in seconds above 0
    #[arg(long, value_name = "SECONDS")]
    poll_interval_s: f64 = 1.0;
    /// Time-out of one reading, in seconds above 0
    #[arg(long, value_name = "SECONDS")]
    poll_timeout_s: f64 = 2.0;
    /// Age at which a reading is no longer fresh, in seconds above 0
    #[arg(long, value_name = "SECONDS")]
    stale_after_s: f64 = 6.0;
    /// Time-out of one call of a session close to an engine, in seconds above 0
    #[arg(long, value_name = "SECONDS")]
    close_timeout_s: f64 = 5.0;
    /// Attempts of one session close at one engine, above 0
    #[arg(long, value_name = "COUNT")]
    close_attempts: u64 = 8;
    /// Longest time for the delivery of a session close to all engines, in seconds above 0
    #[arg(long, value_name = "SECONDS")]
    close_deadline_s: f64 = 120.0;
    /// Longest wait for the leases of a session that closes, in seconds; 0 waits until the last has ended
    #[arg(long, value_name = "SECONDS")]
    join_timeout_s: f64 = 0.0;
    /// Close sessions that are idle for longer, in seconds above 0, or `off`
    #[arg(long, value_name = "SECONDS")]
    session_idle_close_s: IdleClose = IdleClose(None);
    /// File with the bearer key of the router
    #[arg(long, value_name = "FILE")]
    router_key_file: String = String::new();
    /// File with the bearer key of the engines
    #[arg(long, value_name = "FILE")]
    engine_key_file: String = String::new();
    /// File with the bearer key for aborts at the engines, where it is another than that of the engines
    #[arg(long, value_name = "FILE")]
    engine_admin_key_file: String = String::new();
    /// File with the PEM certificate to serve TLS with, and those that lead to its root; needs --tls-key
    #[arg(long, value_name = "FILE")]
    tls_cert: String = String::new();
    /// File with the PEM private key of --tls-cert
    #[arg(long, value_name = "FILE")]
    tls_key: String = String::new();
    /// Network that engines may be in, as CIDR; may be given more than once. Default: any but link-local
    #[arg(long, value_name = "CIDR")]
    engine_network: Vec<String> = Vec::new();
    /// File with the tokens of callers: lines `name:scope:token`, scope `client`, `admin` or `view`
    #[arg(long, value_name = "FILE")]
    token_file: String = String::new();
    /// `/metrics` needs a token too
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_name = "BOOL")]
    metrics_auth: bool = false;
    /// Host header that is accepted beside loopback names and the bound address; may be given more
    /// than once, with a scheme where a proxy ends TLS (`https://gate.example`)
    #[arg(long, value_name = "HOST")]
    allowed_host: Vec<String> = Vec::new();
    /// Listen on a non-loopback address without tokens
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_name = "BOOL")]
    insecure_no_auth: bool = false;
    /// `text` or `json`; what is logged: RUST_LOG
    #[arg(long, value_name = "text|json")]
    log_format: String = "text".to_owned();
}

/// A number, or the word that says that there is none.
macro_rules! number_or_word {
    ($(#[$doc:meta])* $name:ident: $number:ty, $word:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $name(Option<$number>);

        impl FromStr for $name {
            type Err = <$number as FromStr>::Err;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                if text == $word {
                    return Ok(Self(None));
                }
                text.parse().map(|number| Self(Some(number)))
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                #[derive(Deserialize)]
                #[serde(untagged)]
                enum Written {
                    Number($number),
                    Word(String),
                }
                match Written::deserialize(deserializer)? {
                    Written::Number(number) => Ok(Self(Some(number))),
                    Written::Word(word) => word.parse().map_err(serde::de::Error::custom),
                }
            }
        }

        impl ShownValue for $name {
            fn shown(&self) -> String {
                self.0
                    .map_or_else(|| $word.to_owned().shown(), |number| number.shown())
            }
        }
    };
}
number_or_word!(
    /// A number of tokens, or none.
    DecodeCap: u64, "none"
);
number_or_word!(
    /// A number of seconds, or off.
    IdleClose: f64, "off"
);

/// A value as `--print-config` writes it: TOML.
trait ShownValue {
    fn shown(&self) -> String;
}

macro_rules! shown_as_toml {
    ($($kind:ty),*) => {$(
        impl ShownValue for $kind {
            fn shown(&self) -> String {
                toml::Value::from(self.clone()).to_string()
            }
        }
    )*};
}
shown_as_toml!(bool, f64);

impl ShownValue for String {
    fn shown(&self) -> String {
        toml::Value::from(masked(self).into_owned()).to_string()
    }
}

impl ShownValue for Vec<String> {
    fn shown(&self) -> String {
        let texts: Vec<String> = self.iter().map(|text| masked(text).into_owned()).collect();
        toml::Value::from(texts).to_string()
    }
}

impl ShownValue for u64 {
    fn shown(&self) -> String {
        self.to_string()
    }
}

/// One line of `--print-config`.
#[derive(Clone, PartialEq, Debug)]
pub struct Shown {
    /// Name as in a file.
    pub name: &'static str,
    /// Value in TOML.
    pub value: String,
    /// Who set it.
    pub origin: Origin,
}

/// An address without user and password: keys belong into files of their own, but not everybody knows.
/// A rank behind the address of an engine (`@0`) is none.
pub(crate) fn masked(text: &str) -> Cow<'_, str> {
    let Some((scheme, rest)) = text.split_once("://") else {
        return Cow::Borrowed(text);
    };
    let is_rank = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (address, rank) = match rest.rsplit_once('@') {
        Some((address, rank)) if is_rank(rank) => (address, format!("@{rank}")),
        Some(_) | None => (rest, String::new()),
    };
    match address.rsplit_once('@') {
        Some((_, host)) => Cow::Owned(format!("{scheme}://***@{host}{rank}")),
        None => Cow::Borrowed(text),
    }
}

/// A flag with its default and its variable in the help, under the heading of its kind. Flags that are
/// no settings stay as they are.
pub(crate) fn described(flag: clap::Arg) -> clap::Arg {
    let name = flag.get_id().as_str().to_owned();
    let defaults = Merged::new(Layer::default(), Layer::default(), Layer::default()).shown();
    let Some(default) = defaults.iter().find(|shown| shown.name == name) else {
        return flag;
    };
    let mut help = flag.get_help().map(ToString::to_string).unwrap_or_default();
    let value = default.value.trim_matches(['[', ']']).replace('"', "");
    if !value.is_empty() {
        let value = value.strip_suffix(".0").unwrap_or(&value);
        help.push_str(&format!(" [default: {value}]"));
    }
    help.push_str(&format!(" [env: {ENV_PREFIX}{}]", name.to_uppercase()));
    flag.help(help).help_heading(heading(&name))
}

/// The kind of a setting.
fn heading(name: &str) -> &'static str {
    let begins = |with: &[&str]| with.iter().any(|with| name.starts_with(with));
    if begins(&[
        "program_admission",
        "admission_",
        "lease_",
        "claim_",
        "max_waiting",
    ]) {
        "Admission"
    } else if begins(&["session_", "close_", "join_"]) {
        "Session closes"
    } else if begins(&["router", "engine", "poll_", "stale_"]) {
        "Fleet"
    } else {
        "Service"
    }
}

/// Everything `kvgate serve` runs with, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen.
    pub listen: Vec<Endpoint>,
    /// Certificate and key, where ports speak TLS.
    pub tls: Option<TlsFiles>,
    /// Directory of the store.
    pub data: PathBuf,
    /// Settings of the gate, as they are configured.
    pub policy: Policy,
    /// Where those of them come from that can be changed at run time.
    pub origins: Origins,
    /// What was set at run time is forgotten at the start.
    pub reset_settings: bool,
    /// Where members come from.
    pub fleet: FleetConfig,
    /// How the fleet is read.
    pub poller: PollerConfig,
    /// How engines are called for session closes.
    pub closer: CloserConfig,
    /// Lease life where an acquire names none.
    pub lease_ttl: Span,
    /// Tokens of callers; everybody is let in without.
    pub token_file: Option<TokenFile>,
    /// `/metrics` needs a token too.
    pub metrics_auth: bool,
    /// Host headers accepted beside the usual.
    pub allowed_hosts: Vec<AllowedHost>,
    /// Logs as JSON.
    pub log_json: bool,
    /// What `--print-config` shows.
    pub shown: Vec<Shown>,
}

impl Config {
    /// Merges the sources and checks all values together.
    ///
    /// # Errors
    /// One sentence that names the setting and what it takes.
    pub fn load(
        flags: Layer,
        env: impl IntoIterator<Item = (String, String)>,
        file: Option<&Path>,
    ) -> Result<Self, ConfigError> {
        let file = match file {
            Some(path) => from_file(path)?,
            None => Layer::default(),
        };
        Self::checked(Merged::new(flags, from_env(env)?, file))
    }

    /// Every value with its origin, one a line.
    #[must_use]
    pub fn printed(&self) -> String {
        let line = |shown: &Shown| {
            format!(
                "{} = {}  # {}\n",
                shown.name,
                shown.value,
                shown.origin.word()
            )
        };
        self.shown.iter().map(line).collect()
    }

    fn checked(merged: Merged) -> Result<Self, ConfigError> {
        let shown = merged.shown();
        let token_file = token_file(&merged.token_file.0)?;
        if merged.metrics_auth.0 && token_file.is_none() {
            return Err(refused(
                "metrics_auth needs token_file: without tokens everybody is let in",
            ));
        }
        let may_be_open = token_file.is_some() || merged.insecure_no_auth.0;
        let listen = endpoints(&merged.listen.0, may_be_open)?;
        let policy = policy(&merged)?;
        let router = match merged.router.0.as_str() {
            "" => None,
            text => Some(router_url(text)?),
        };
        let engines = merged
            .engine
            .0
            .iter()
            .map(|text| {
                refuse_user_info("engine", text)?;
                BaseUrl::parse(text)
                    .map(|url| url.engine())
                    .map_err(|error| refused(format!("engine {:?}: {error}", masked(text))))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let router_as_engine = router.as_ref().and_then(discover::as_engine);
        if let Some(both) = engines
            .iter()
            .find(|&one| Some(one) == router_as_engine.as_ref())
        {
            return Err(refused(format!(
                "engine {} is the router's address: session closes go to engines directly and never to a router; name the engines behind it, or leave --engine out",
                both.as_str()
            )));
        }
        let networks = networks(&merged.engine_network.0)?;
        let engine_key = key("engine_key_file", &merged.engine_key_file.0)?;
        let lease_ttl = span("lease_ttl_s", merged.lease_ttl_s.0, true)?;
        if policy::ttl_in_range(lease_ttl).1 {
            return Err(refused(format!(
                "lease_ttl_s must be 1 to 86400 seconds, not {}",
                merged.lease_ttl_s.0
            )));
        }
        Ok(Self {
            listen,
            tls: tls(&merged.tls_cert.0, &merged.tls_key.0)?,
            data: PathBuf::from(&merged.data.0),
            fleet: FleetConfig {
                has_router: router.is_some(),
                static_engines: engines.iter().cloned().collect(),
            },
            poller: PollerConfig {
                router,
                engines,
                known: Vec::new(),
                router_key: key("router_key_file", &merged.router_key_file.0)?,
                engine_key: engine_key.clone(),
                networks: networks.clone(),
                interval: duration("poll_interval_s", merged.poll_interval_s.0)?,
                timeout: duration("poll_timeout_s", merged.poll_timeout_s.0)?,
                session_lifecycle: merged.session_lifecycle.0,
            },
            closer: CloserConfig {
                router: router_as_engine,
                networks,
                engine_key,
                admin_key: key("engine_admin_key_file", &merged.engine_admin_key_file.0)?,
                timeout: duration("close_timeout_s", merged.close_timeout_s.0)?,
            },
            policy,
            origins: Origins::of_all(&merged),
            reset_settings: false,
            lease_ttl,
            token_file,
            metrics_auth: merged.metrics_auth.0,
            allowed_hosts: allowed_hosts(&merged.allowed_host.0)?,
            log_json: match merged.log_format.0.as_str() {
                "text" => false,
                "json" => true,
                other => {
                    return Err(refused(format!(
                        "log_format must be text or json, not {other:?}"
                    )));
                }
            },
            shown,
        })
    }
}

fn policy(merged: &Merged) -> Result<Policy, ConfigError> {
    let admission = merged.program_admission.0;
    Policy {
        program_admission: admission,
        session_lifecycle: merged.session_lifecycle.0,
        paused: false,
        headroom: share("admission_headroom", merged.admission_headroom.0, admission)?,
        pressure_threshold: share(
            "admission_pressure_threshold",
            merged.admission_pressure_threshold.0,
            admission,
        )?,
        expected_decode_cap: decode_cap(merged.admission_expected_decode_cap.0, admission)?,
        max_wait: wait(merged.admission_max_wait_s.0, admission)?,
        scope: match merged.admission_scope.0.as_str() {
            "train" => AdmissionScope::Train,
            "all" => AdmissionScope::All,
            other => {
                return Err(refused(format!(
                    "admission_scope must be train or all, not {other:?}"
                )));
            }
        },
        claim_grace: claim_grace(merged.claim_grace_s.0)?,
        max_waiting: match merged.max_waiting.0 {
            0 => return Err(refused("max_waiting must be above 0")),
            count => count,
        },
        stale_after: span("stale_after_s", merged.stale_after_s.0, true)?,
        close_attempts: u32::try_from(merged.close_attempts.0)
            .ok()
            .filter(|attempts| *attempts > 0)
            .ok_or_else(|| {
                refused(format!(
                    "close_attempts must be above 0 and at most {}, not {}",
                    u32::MAX,
                    merged.close_attempts.0
                ))
            })?,
        close_deadline: span("close_deadline_s", merged.close_deadline_s.0, true)?,
        join_timeout: join_timeout(merged.join_timeout_s.0)?,
        session_idle_close: merged
            .session_idle_close_s
            .0
            .0
            .map(|limit| span("session_idle_close_s", limit, true))
            .transpose()?,
    }
    .validated()
    .map_err(|error| refused(error.to_string()))
}

// The numeric constraints of admission hold while admission is on. A value that would not do stands in
// the policy as one that cannot be turned on at run time either.

fn share(name: &str, value: f64, admission: bool) -> Result<Ppm, ConfigError> {
    match millionths(value) {
        Some(share) => Ok(share),
        None if !admission => Ok(Ppm::clamped(0)),
        None => Err(refused(format!(
            "{name} must be above 0 and at most 1, not {value}"
        ))),
    }
}

fn decode_cap(cap: DecodeCap, admission: bool) -> Result<Option<Tokens>, ConfigError> {
    let Some(cap) = cap.0 else {
        return Ok(None);
    };
    match Tokens::new(cap) {
        Some(cap) if cap != Tokens::ZERO => Ok(Some(cap)),
        Some(_) | None if !admission => Ok(Some(Tokens::ZERO)),
        Some(_) | None => Err(refused(format!(
            "admission_expected_decode_cap must be above 0 and at most 2^53-1 tokens, or none, not {cap}"
        ))),
    }
}

fn wait(value: f64, admission: bool) -> Result<Span, ConfigError> {
    match max_wait("admission_max_wait_s", value) {
        Err(_) if !admission => Ok(Span::from_millis(u64::MAX)),
        result => result,
    }
}

fn claim_grace(value: f64) -> Result<Span, ConfigError> {
    match (1.0..=60.0).contains(&value) {
        true => span("claim_grace_s", value, true),
        false => Err(refused(format!(
            "claim_grace_s must be 1 to 60 seconds, not {value}"
        ))),
    }
}

/// 0 is no limit.
fn join_timeout(value: f64) -> Result<Option<Span>, ConfigError> {
    let limit = span("join_timeout_s", value, false)?;
    Ok((value > 0.0).then(|| limit.max(Span::from_millis(1))))
}

/// A share above 0 and at most 1, in millionths; it never becomes 0. `None` for any other number.
#[must_use]
pub fn millionths(share: f64) -> Option<Ppm> {
    if !(share > 0.0 && share <= 1.0) {
        return None;
    }
    let millionths = (share * 1e6).floor().max(1.0);
    format!("{millionths:.0}").parse().ok().and_then(Ppm::new)
}

/// The longest wait before the aging bypass: at most a year, in whole milliseconds.
///
/// # Errors
/// A sentence that names the setting and what it takes.
pub fn max_wait(name: &str, seconds: f64) -> Result<Span, ConfigError> {
    span(name, seconds, false)
}

fn seconds(name: &str, value: f64, above_zero: bool) -> Result<Duration, ConfigError> {
    let least = if above_zero { "above 0" } else { "at least 0" };
    let inside = (0.0..=SECONDS_MAX).contains(&value) && !(above_zero && value == 0.0);
    let parsed = inside.then(|| Duration::try_from_secs_f64(value).ok());
    parsed.flatten().ok_or_else(|| {
        refused(format!(
            "{name} must be {least} and at most a year, in seconds, not {value}"
        ))
    })
}

fn duration(name: &str, value: f64) -> Result<Duration, ConfigError> {
    seconds(name, value, true)
}

/// Whole milliseconds; a time above 0 never becomes 0.
fn span(name: &str, value: f64, above_zero: bool) -> Result<Span, ConfigError> {
    let duration = seconds(name, value, above_zero)?;
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    Ok(Span::from_millis(millis.max(u64::from(above_zero))))
}

fn endpoints(listen: &[String], may_be_open: bool) -> Result<Vec<Endpoint>, ConfigError> {
    let endpoints = listen
        .iter()
        .map(|text| match text.strip_prefix(UNIX_PREFIX) {
            Some("") => Err(refused(
                "listen must name a path after unix:, such as unix:/run/kvgate/gate.sock",
            )),
            Some(path) => Ok(Endpoint::Unix(PathBuf::from(path))),
            None => address(text, may_be_open).map(Endpoint::Tcp),
        })
        .collect::<Result<Vec<_>, _>>()?;
    if endpoints.is_empty() {
        return Err(refused("listen must name at least one address"));
    }
    Ok(endpoints)
}

fn address(text: &str, may_be_open: bool) -> Result<SocketAddr, ConfigError> {
    let text = text.replacen("localhost:", "127.0.0.1:", 1);
    let address: SocketAddr = text.parse().map_err(|_| {
        refused(format!(
            "listen must be HOST:PORT with an IP address, such as 127.0.0.1:7070 or [::1]:7070, or unix:PATH, not {text:?}"
        ))
    })?;
    if !address.ip().is_loopback() && !may_be_open {
        return Err(refused(format!(
            "{address} is open to the network: name the tokens of callers by --token-file, or listen on a loopback address, or say --insecure-no-auth"
        )));
    }
    Ok(address)
}

fn tls(certificate: &str, key: &str) -> Result<Option<TlsFiles>, ConfigError> {
    match (certificate, key) {
        ("", "") => Ok(None),
        (_, "") => Err(refused(
            "tls_cert needs tls_key, the file with its private key",
        )),
        ("", _) => Err(refused(
            "tls_key needs tls_cert, the file with its certificate",
        )),
        (certificate, key) => Ok(Some(TlsFiles {
            certificate: PathBuf::from(certificate),
            key: PathBuf::from(key),
        })),
    }
}

fn token_file(path: &str) -> Result<Option<TokenFile>, ConfigError> {
    if path.is_empty() {
        return Ok(None);
    }
    let read = TokenFile::read(Path::new(path));
    let file = read.map_err(|error| refused(format!("token_file {path:?}: {error}")))?;
    Ok(Some(file))
}

fn allowed_hosts(texts: &[String]) -> Result<Vec<AllowedHost>, ConfigError> {
    texts
        .iter()
        .map(|text| {
            text.parse()
                .map_err(|error| refused(format!("allowed_host {text:?}: {error}")))
        })
        .collect()
}

/// A password in an address would be shown wherever the address is. `@3` at its end is the rank of an engine.
fn refuse_user_info(name: &str, text: &str) -> Result<(), ConfigError> {
    let rest = text.split_once("://").map_or(text, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let is_rank = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let before_host = match authority.rsplit_once('@') {
        Some((before, rank)) if is_rank(rank) => before.contains('@'),
        found => found.is_some(),
    };
    if before_host {
        return Err(refused(format!(
            "{name} must not carry a user name or a password: put the key into a file for --{name}-key-file"
        )));
    }
    Ok(())
}

fn router_url(text: &str) -> Result<Url, ConfigError> {
    refuse_user_info("router", text)?;
    let url = Url::parse(text)
        .ok()
        .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    url.ok_or_else(|| {
        refused(format!(
            "router must be an http or https URL, such as http://127.0.0.1:30000, not {:?}",
            masked(text)
        ))
    })
}

fn networks(list: &[String]) -> Result<Networks, ConfigError> {
    if list.is_empty() {
        return Ok(Networks::default());
    }
    let networks = list
        .iter()
        .map(|text| {
            text.parse::<Network>().map_err(|_| {
                refused(format!(
                    "engine_network must be CIDR, such as 10.0.0.0/8, not {text:?}"
                ))
            })
        })
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Networks::only(networks))
}

/// Reads a key file. The key is never shown.
fn key(name: &str, path: &str) -> Result<Option<Secret>, ConfigError> {
    if path.is_empty() {
        return Ok(None);
    }
    let text = text_of(Path::new(path))
        .map_err(|error| refused(format!("{name} {path:?} cannot be read: {error}")))?;
    let secret =
        Secret::new(&text).map_err(|error| refused(format!("{name} {path:?}: {error}")))?;
    Ok(Some(secret))
}

/// A wrong path may lead to something without an end.
fn text_of(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let mut bounded = File::open(path)?.take(FILE_BYTES_MAX + 1);
    bounded.read_to_string(&mut text)?;
    if bounded.limit() == 0 {
        let error = format!("it has more than {FILE_BYTES_MAX} bytes");
        return Err(io::Error::other(error));
    }
    Ok(text)
}

fn from_file(path: &Path) -> Result<Layer, ConfigError> {
    let text = text_of(path)
        .map_err(|error| refused(format!("{} cannot be read: {error}", path.display())))?;
    let table: toml::Table = text
        .parse()
        .map_err(|error| refused(format!("{}: {error}", path.display())))?;
    for name in table.keys() {
        known(name).map_err(|error| refused(format!("{}: {error}", path.display())))?;
    }
    Layer::deserialize(table).map_err(|error| refused(format!("{}: {error}", path.display())))
}

/// Refuses a name that is not a setting, with the nearest that is.
fn known(name: &str) -> Result<(), ConfigError> {
    if Layer::NAMES.contains(&name) {
        return Ok(());
    }
    Err(refused(format!(
        "there is no setting {name:?}; the nearest is {:?}",
        nearest(name)
    )))
}

fn nearest(name: &str) -> &'static str {
    let names = Layer::NAMES.iter();
    names
        .min_by_key(|known| strsim::damerau_levenshtein(known, name))
        .copied()
        .unwrap_or_default()
}

/// Variables that are named like a setting. A name that is none is refused, since nobody would notice
/// a mistyped one.
fn from_env(env: impl IntoIterator<Item = (String, String)>) -> Result<Layer, ConfigError> {
    let mut table = toml::Table::new();
    let env: BTreeMap<String, String> = env.into_iter().collect();
    for (variable, text) in &env {
        let Some(name) = variable.strip_prefix(ENV_PREFIX) else {
            continue;
        };
        let setting = name.to_lowercase();
        if name != setting.to_uppercase() || !Layer::NAMES.contains(&setting.as_str()) {
            if OTHER_VARIABLES.contains(&name) || is_service_link(name) {
                continue;
            }
            let nearest = nearest(&setting).to_uppercase();
            return Err(refused(format!(
                "there is no setting for the variable {variable}; the nearest is {ENV_PREFIX}{nearest}: correct it, or unset it"
            )));
        }
        let value = env_value(&setting, text)
            .ok_or_else(|| refused(format!("{variable} is not a value for {setting}: {text:?}")))?;
        table.insert(setting, value);
    }
    Layer::deserialize(table).map_err(|error| refused(error.to_string()))
}

/// What Kubernetes sets in every container for a service whose name begins with ours:
/// `KVGATE_SERVICE_HOST`, `KVGATE_PORT_7070_TCP_ADDR` and their like.
fn is_service_link(name: &str) -> bool {
    let name = format!("_{name}");
    let port = |rest: &str| rest.is_empty() || rest.starts_with('_');
    name.ends_with("_SERVICE_HOST")
        || ["_SERVICE_PORT", "_PORT"]
            .iter()
            .any(|mark| name.rsplit_once(mark).is_some_and(|(_, rest)| port(rest)))
}

/// The first reading of the text that fits the setting's type; lists are split at commas.
fn env_value(name: &str, text: &str) -> Option<toml::Value> {
    let list = text
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty());
    let candidates = [
        text.parse().ok().map(toml::Value::Boolean),
        text.parse().ok().map(toml::Value::Integer),
        text.parse().ok().map(toml::Value::Float),
        Some(toml::Value::String(text.to_owned())),
        Some(toml::Value::from(list.collect::<Vec<_>>())),
    ];
    candidates.into_iter().flatten().find(|value| {
        let table = toml::Table::from_iter([(name.to_owned(), value.clone())]);
        Layer::deserialize(table).is_ok()
    })
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    fn load(flags: Layer, env: &[(&str, &str)], file: &str) -> Result<Config, ConfigError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kvgate.toml");
        std::fs::write(&path, file).unwrap();
        let env = env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        Config::load(flags, env, Some(&path))
    }

    fn shown(config: &Config, name: &str) -> (String, &'static str) {
        let shown = config
            .shown
            .iter()
            .find(|shown| shown.name == name)
            .unwrap();
        (shown.value.clone(), shown.origin.word())
    }

    #[test]
    fn a_flag_wins_over_the_environment_over_the_file_over_the_default() {
        let flags = Layer {
            admission_headroom: Some(0.5),
            ..Layer::default()
        };
        let env = [
            ("KVGATE_ADMISSION_HEADROOM", "0.6"),
            ("KVGATE_CLAIM_GRACE_S", "20"),
            ("KVGATE_ENGINE", "http://127.0.0.1:1, http://127.0.0.1:2"),
            ("KVGATE_PROGRAM_ADMISSION", "true"),
            ("KVGATE_URL", "not a setting"),
        ];
        let file =
            "admission_headroom = 0.7\nclaim_grace_s = 30\nmax_waiting = 5\nlease_ttl_s = 60";
        let config = load(flags, &env, file).unwrap();
        assert_eq!(config.policy.headroom, Ppm::clamped(500_000));
        assert_eq!(shown(&config, "admission_headroom"), ("0.5".into(), "flag"));
        assert_eq!(config.origins.of(Setting::Headroom), Origin::Flag);
        assert_eq!(config.origins.of(Setting::ProgramAdmission), Origin::Env);
        assert_eq!(config.origins.of(Setting::MaxWait), Origin::Default);
        assert_eq!(config.policy.claim_grace, Span::from_secs(20));
        assert_eq!(shown(&config, "claim_grace_s").1, "env");
        assert_eq!(config.policy.max_waiting, 5);
        assert_eq!(shown(&config, "max_waiting").1, "file");
        assert_eq!(config.lease_ttl, Span::from_secs(60));
        assert_eq!(config.fleet.static_engines.len(), 2);
        assert!(config.policy.program_admission);
        assert_eq!(shown(&config, "stale_after_s"), ("6.0".into(), "default"));
    }

    #[test]
    fn a_mistyped_name_in_a_file_is_refused_with_the_nearest() {
        let error = load(Layer::default(), &[], "max_wating = 5").unwrap_err();
        assert!(error.to_string().contains("\"max_waiting\""), "{error}");
        let error = load(Layer::default(), &[], "max_waiting = \"many\"").unwrap_err();
        assert!(error.to_string().contains("max_waiting"), "{error}");
        let error = load(Layer::default(), &[("KVGATE_MAX_WAITING", "many")], "").unwrap_err();
        assert!(error.to_string().contains("KVGATE_MAX_WAITING"), "{error}");
    }

    #[test]
    fn numbers_outside_their_range_are_refused_by_name() {
        for (file, name) in [
            (
                "program_admission = true\nadmission_headroom = 0.0",
                "headroom",
            ),
            (
                "program_admission = true\nadmission_headroom = 1.5",
                "headroom",
            ),
            (
                "program_admission = true\nadmission_pressure_threshold = nan",
                "threshold",
            ),
            (
                "program_admission = true\nadmission_expected_decode_cap = 0",
                "admission_expected_decode_cap",
            ),
            ("admission_expected_decode_cap = \"some\"", "invalid digit"),
            (
                "program_admission = true\nadmission_max_wait_s = -1",
                "admission_max_wait_s",
            ),
            (
                "program_admission = true\nadmission_max_wait_s = inf",
                "admission_max_wait_s",
            ),
            ("lease_ttl_s = 86401", "1 to 86400"),
            ("lease_ttl_s = 0.5", "lease_ttl_s"),
            ("claim_grace_s = 61", "claim_grace_s must be 1 to 60"),
            ("claim_grace_s = 0.9", "claim_grace_s must be 1 to 60"),
            ("max_waiting = 0", "max_waiting must be above 0"),
            ("poll_interval_s = 0", "poll_interval_s"),
            ("poll_timeout_s = 0", "poll_timeout_s"),
            ("stale_after_s = 0", "stale_after_s"),
            ("close_timeout_s = 0", "close_timeout_s"),
            ("close_attempts = 0", "close_attempts must be above 0"),
            ("close_attempts = 5000000000", "close_attempts"),
            ("close_deadline_s = 0", "close_deadline_s"),
            ("join_timeout_s = -1", "join_timeout_s"),
            ("session_idle_close_s = 0", "session_idle_close_s"),
            ("session_idle_close_s = nan", "session_idle_close_s"),
            ("session_idle_close_s = \"never\"", "invalid float"),
            (
                "engine_admin_key_file = \"does-not-exist\"",
                "engine_admin_key_file",
            ),
            (
                "router = \"http://Host:30000/\"\nengine = [\"host:30000\"]",
                "never to a router",
            ),
            ("admission_scope = \"eval\"", "admission_scope"),
            ("router = \"ftp://127.0.0.1\"", "router"),
            ("engine = [\"http://\"]", "engine"),
            ("engine_network = [\"10.0.0.0/99\"]", "engine_network"),
            ("listen = [\"7070\"]", "listen"),
            ("listen = []", "listen"),
            ("listen = [\"unix:\"]", "path after unix:"),
            ("tls_cert = \"cert.pem\"", "needs tls_key"),
            ("tls_key = \"key.pem\"", "needs tls_cert"),
            ("listen = [\"0.0.0.0:7070\"]", "insecure-no-auth"),
            ("listen = [\"0.0.0.0:7070\"]", "--token-file"),
            ("token_file = \"does-not-exist\"", "token_file"),
            ("metrics_auth = true", "token_file"),
            ("allowed_host = [\"*\"]", "allowed_host"),
            ("allowed_host = [\"gate.example/path\"]", "allowed_host"),
            ("log_format = \"xml\"", "log_format"),
            ("router_key_file = \"does-not-exist\"", "router_key_file"),
        ] {
            let error = load(Layer::default(), &[], file).expect_err(file);
            assert!(error.to_string().contains(name), "{file}: {error}");
        }
    }

    #[test]
    fn settings_of_session_closes() {
        let config = load(Layer::default(), &[], "").unwrap();
        assert_eq!(config.policy, Policy::default());
        assert_eq!(config.closer.timeout, Duration::from_secs(5));
        assert!(config.closer.router.is_none() && !config.poller.session_lifecycle);
        assert_eq!(
            shown(&config, "session_idle_close_s"),
            ("\"off\"".into(), "default")
        );
        let env = [
            ("KVGATE_SESSION_IDLE_CLOSE_S", "1800"),
            ("KVGATE_CLOSE_ATTEMPTS", "3"),
            ("KVGATE_JOIN_TIMEOUT_S", "0.0001"),
        ];
        let file = "session_lifecycle = true\nclose_timeout_s = 2\nclose_deadline_s = 60.5\n\
            router = \"http://h:1\"\nengine = [\"http://h:2\"]";
        let config = load(Layer::default(), &env, file).unwrap();
        let policy = &config.policy;
        assert!(policy.session_lifecycle && config.poller.session_lifecycle);
        assert_eq!(policy.close_attempts, 3);
        assert_eq!(policy.close_deadline, Span::from_millis(60_500));
        assert_eq!(policy.join_timeout, Some(Span::from_millis(1)));
        assert_eq!(policy.session_idle_close, Some(Span::from_secs(1_800)));
        assert_eq!(config.closer.timeout, Duration::from_secs(2));
        assert_eq!(
            config.closer.router.as_ref().map(|router| router.as_str()),
            Some("http://h:1")
        );
        assert_eq!(
            shown(&config, "session_idle_close_s"),
            ("1800.0".into(), "env")
        );
        assert_eq!(shown(&config, "close_attempts"), ("3".into(), "env"));
        let env = [("KVGATE_SESSION_IDLE_CLOSE_S", "off")];
        let config = load(Layer::default(), &env, "session_idle_close_s = 5").unwrap();
        assert_eq!(config.policy.session_idle_close, None);
        let error = load(Layer::default(), &[], "join_timout_s = 5").unwrap_err();
        assert!(error.to_string().contains("\"join_timeout_s\""), "{error}");
    }

    #[test]
    fn keys_of_closes_and_aborts() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, key: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, key).unwrap();
            path.to_string_lossy().into_owned()
        };
        let flags = Layer {
            engine_key_file: Some(file("engine", "key-1\n")),
            engine_admin_key_file: Some(file("admin", "key-2\n")),
            ..Layer::default()
        };
        let config = load(flags, &[], "").unwrap();
        let header = |secret: &Option<Secret>| secret.as_ref().unwrap().authorization();
        assert_eq!(header(&config.closer.engine_key), "Bearer key-1");
        assert_eq!(header(&config.closer.admin_key), "Bearer key-2");
        assert_eq!(header(&config.poller.engine_key), "Bearer key-1");
        assert!(!format!("{config:?}").contains("key-1"));
    }

    /// A number that would not do is taken while admission is off, and refused when it is turned on, then
    /// or later.
    #[test]
    fn admission_numbers_are_free_while_admission_is_off() {
        for number in [
            "admission_headroom = 7.0",
            "admission_headroom = 0.0",
            "admission_pressure_threshold = nan",
            "admission_pressure_threshold = -0.1",
            "admission_expected_decode_cap = 0",
            "admission_max_wait_s = -1.0",
            "admission_max_wait_s = nan",
        ] {
            let config = load(Layer::default(), &[], number).expect(number);
            let turned_on = Policy {
                program_admission: true,
                ..config.policy
            };
            assert!(turned_on.validated().is_err(), "{number}");
            let on = format!("program_admission = true\n{number}");
            let (name, _) = number.split_once(' ').unwrap();
            let error = load(Layer::default(), &[], &on).expect_err(number);
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn files_have_a_bound() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("large");
        let fits = usize::try_from(FILE_BYTES_MAX).unwrap();
        std::fs::write(&path, "#".repeat(fits)).unwrap();
        assert!(Config::load(Layer::default(), [], Some(&path)).is_ok());
        std::fs::write(&path, "#".repeat(fits + 1)).unwrap();
        let error = Config::load(Layer::default(), [], Some(&path)).unwrap_err();
        assert!(error.to_string().contains("more than"), "{error}");
        let error = key("router_key_file", path.to_str().unwrap()).unwrap_err();
        assert!(error.to_string().contains("more than"), "{error}");
    }

    #[test]
    fn a_mistyped_variable_is_refused_with_the_nearest() {
        let env = [("KVGATE_MAX_WATING", "5")];
        let error = load(Layer::default(), &env, "").unwrap_err();
        assert!(error.to_string().contains("KVGATE_MAX_WAITING"), "{error}");
        let error = load(Layer::default(), &[("KVGATE_max_waiting", "5")], "").unwrap_err();
        assert!(error.to_string().contains("KVGATE_MAX_WAITING"), "{error}");
        // Not ours to judge: other programs, other commands, and what Kubernetes sets for a service.
        let env = [
            ("KVGATED_X", "1"),
            ("KVGATE_URL", "http://127.0.0.1:7070"),
            ("KVGATE_TOKEN_NAME", "ops"),
            ("KVGATE_SERVICE_HOST", "10.0.0.1"),
            ("KVGATE_SERVICE_PORT_HTTP", "7070"),
            ("KVGATE_PORT", "tcp://10.0.0.1:7070"),
            ("KVGATE_PORT_7070_TCP_ADDR", "10.0.0.1"),
            ("KVGATE_METRICS_SERVICE_HOST", "10.0.0.2"),
            ("KVGATE_METRICS_PORT_9090_TCP", "tcp://10.0.0.2:9090"),
        ];
        load(Layer::default(), &env, "").unwrap();
    }

    /// Keys stand in files; one that was written into an address all the same is not shown.
    #[test]
    fn an_address_shows_no_password() {
        for (text, shown) in [
            ("http://h:1", "http://h:1"),
            ("http://me:hid/@den@h:1/x", "http://***@h:1/x"),
            ("http://h:1@0", "http://h:1@0"),
            ("http://me:hidden@h:1@0", "http://***@h:1@0"),
            ("10.0.0.0/8", "10.0.0.0/8"),
        ] {
            assert_eq!(masked(text), shown);
        }
        let error = load(Layer::default(), &[], "router = \"ftp://me:hidden@h\"").unwrap_err();
        assert!(!error.to_string().contains("hidden"), "{error}");
    }

    #[test]
    fn every_setting_is_printed_and_described() {
        let config = load(Layer::default(), &[], "").unwrap();
        let printed = config.printed();
        for name in Layer::NAMES {
            let line = printed
                .lines()
                .find(|line| line.starts_with(&format!("{name} = ")));
            assert!(
                line.is_some_and(|line| line.ends_with("  # default")),
                "{name}"
            );
        }
        let flags = Layer::augment_args(clap::Command::new("serve")).mut_args(described);
        for flag in flags.get_arguments() {
            let help = flag.get_help().unwrap().to_string();
            let env = format!("[env: KVGATE_{}]", flag.get_id().as_str().to_uppercase());
            assert!(help.ends_with(&env), "{help}");
        }
        let help = |name: &str| {
            let flag = flags.get_arguments().find(|flag| flag.get_id() == name);
            flag.unwrap().get_help().unwrap().to_string()
        };
        assert!(help("admission_max_wait_s").contains("[default: 30]"));
        assert!(help("admission_headroom").contains("[default: 0.9]"));
        assert!(help("listen").contains("[default: 127.0.0.1:7070]"));
        assert!(!help("router").contains("[default"));
    }

    /// Each admission flag keeps the name that it has in a launch script of the in-process feature.
    #[test]
    fn admission_flags_have_their_former_names() {
        let flags = Layer::augment_args(clap::Command::new("serve"));
        let aliased = |flag: &&clap::Arg| {
            let name = flag.get_id().as_str();
            let features = ["program_admission", "session_lifecycle"];
            name.starts_with("admission_") || features.contains(&name)
        };
        let mut count = 0;
        for flag in flags.get_arguments().filter(aliased) {
            let alias = format!("agentic-{}", flag.get_long().unwrap());
            assert_eq!(flag.get_visible_aliases(), Some(vec![alias.as_str()]));
            count += 1;
        }
        assert_eq!(count, 7);
    }

    /// X01: tokens open a non-loopback address; what is wrong with their file is told without a part of it.
    #[test]
    fn a_non_loopback_address_takes_tokens() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        let load_with = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let flags = Layer {
                listen: Some(vec!["0.0.0.0:7070".into()]),
                token_file: Some(path.to_string_lossy().into_owned()),
                ..Layer::default()
            };
            load(flags, &[], "")
        };
        let config = load_with("ops:admin:a-long-secret-token").unwrap();
        assert_eq!(config.token_file.as_ref().unwrap().tokens.count(), 1);
        assert!(shown(&config, "token_file").0.contains("tokens"));
        assert!(!format!("{config:?}").contains("a-long-secret-token"));
        let error = load_with("ops:admin:a-long-secret-token\nops:view:b-long-secret-token");
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("token_file") && error.contains("line 2"),
            "{error}"
        );
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn passwords_in_addresses_are_refused_and_not_shown() {
        for file in [
            "router = \"http://user:secret@host:30000\"",
            "router = \"http://secret@host:30000/path\"",
            "engine = [\"http://user:secret@host:30000\"]",
            "engine = [\"user:secret@host:30000@3\"]",
        ] {
            let error = load(Layer::default(), &[], file).unwrap_err().to_string();
            assert!(error.contains("key-file"), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
        let ranks = "engine = [\"http://host:30000@3\", \"host:30001@0\"]";
        assert!(load(Layer::default(), &[], ranks).is_ok());
    }

    #[test]
    fn a_non_loopback_address_needs_the_word() {
        let flags = Layer {
            listen: Some(vec!["0.0.0.0:7070".into(), "[::1]:0".into()]),
            insecure_no_auth: Some(true),
            ..Layer::default()
        };
        assert_eq!(load(flags, &[], "").unwrap().listen.len(), 2);
    }

    #[test]
    fn addresses_and_certificates() {
        let env = [
            ("KVGATE_LISTEN", "localhost:7070,unix:run/gate.sock"),
            ("KVGATE_TLS_CERT", "cert.pem"),
            ("KVGATE_TLS_KEY", "key.pem"),
        ];
        let config = load(Layer::default(), &env, "").unwrap();
        assert_eq!(
            config.listen,
            [
                Endpoint::Tcp(([127, 0, 0, 1], 7070).into()),
                Endpoint::Unix("run/gate.sock".into()),
            ]
        );
        let files = TlsFiles {
            certificate: "cert.pem".into(),
            key: "key.pem".into(),
        };
        assert_eq!(config.tls, Some(files));
        assert_eq!(load(Layer::default(), &[], "").unwrap().tls, None);
    }
}
