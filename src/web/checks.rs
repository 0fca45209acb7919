//! Health checks: what an operator should look at, judged from figures, with what to do about it.
//!
//! Pure: the figures are handed in. Each check says what it saw even when all is well.

use kvgate_api::{Notice, Severity};
use kvgate_core::close::TargetState;
use kvgate_core::decision::{BypassReason, Scope, WaitReason};
use kvgate_core::policy::Policy;
use kvgate_core::tally::{LeaseEnd, LocalBypass, Tally};
use kvgate_core::units::{Ppm, Span, Tokens};

use super::format::{about, counted, duration, grouped, percent, percent_of, set};

/// Use of the ceiling that is near it.
pub(super) const NEAR: Ppm = Ppm::clamped(950_000);
/// What lasts shorter is no news.
const LASTING: Span = Span::from_secs(300);
/// An engine with running work whose figures are the same for so long does not move.
const STILL_AFTER: Span = Span::from_secs(60);
/// A share of decisions or ends above this is serious: a twentieth.
const MANY: u64 = 20;
/// Fewer closes than this tell nothing of the KV.
const CLOSES_MIN: u64 = 20;
/// With less free KV at any time than this share the pools were full.
const FREE_MIN: f64 = 0.05;
/// Cached KV above this share at any time is much.
const CACHED_MUCH: f64 = 0.2;
/// Causes that are told of one check.
const TOLD_MAX: usize = 3;

/// How a check came out, the worst last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Health {
    Ok,
    /// Worth a look.
    Look,
    /// It harms work now.
    Bad,
}

/// One check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Check {
    pub(super) name: String,
    pub(super) health: Health,
    /// The figures.
    pub(super) evidence: String,
    /// What to do; empty when nothing is to be done.
    pub(super) advice: String,
    /// The page that shows more.
    pub(super) href: &'static str,
}

/// What the resident KV of the fleet was lately, as shares of the pools.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Resident {
    /// Least and greatest of used and cached together.
    pub(super) low: f64,
    pub(super) high: f64,
    /// The least that was cached.
    pub(super) cached_low: f64,
}

/// A member of the fleet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct EngineFact {
    pub(super) name: String,
    /// Why it is not counted, when its capacity should be.
    pub(super) missing: Option<String>,
    /// How long its figures have been the same while it runs work.
    pub(super) still: Option<Span>,
    /// Age of its reading, when it is counted.
    pub(super) age: Option<Span>,
}

/// A time without figures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Gap {
    pub(super) length: Span,
    /// Time since its end.
    pub(super) ago: Span,
}

/// What the checks are judged from.
#[derive(Clone, Debug)]
pub(super) struct Facts<'a> {
    pub(super) policy: &'a Policy,
    /// What was counted lately, and in how long a time.
    pub(super) counts: Tally,
    pub(super) over: Span,
    /// Why there is no usable ceiling.
    pub(super) degraded: Option<String>,
    pub(super) reserved: Tokens,
    pub(super) ceiling: Tokens,
    /// How long the use of the ceiling has been near it.
    pub(super) near_for: Option<Span>,
    pub(super) waiting: u64,
    /// How long the queue has not been empty.
    pub(super) waiting_for: Option<Span>,
    /// Why the first in line waits.
    pub(super) head: Option<String>,
    pub(super) resident: Option<Resident>,
    /// Finished closes that are remembered and failed.
    pub(super) closes_failed: u64,
    /// Engines where closes failed lately, with how many.
    pub(super) failing: Vec<(String, u64)>,
    pub(super) engines: Vec<EngineFact>,
    pub(super) router: Option<String>,
    pub(super) notices: &'a [Notice],
    pub(super) gap: Option<Gap>,
}

/// All checks, the worst first.
pub(super) fn checks(facts: &Facts<'_>) -> Vec<Check> {
    let mut checks = vec![
        everything_bypasses(facts),
        waiting_remains_high(facts),
        aging_bypasses(facts),
        near_the_ceiling(facts),
        kv_drops_after_closes(facts),
        close_failures(facts),
        engines_stand_still(facts),
        leases_expire(facts),
        clients_fail_open(facts),
        oversized(facts),
        sessions_reused(facts),
        router_keeps_ids(facts),
        age_of_readings(facts),
        gap_in_the_figures(facts),
    ];
    checks.extend(others(facts));
    checks.sort_by_key(|check| std::cmp::Reverse(check.health));
    checks
}

fn ok(name: &str, href: &'static str, evidence: impl Into<String>) -> Check {
    Check {
        name: name.to_owned(),
        health: Health::Ok,
        evidence: evidence.into(),
        advice: String::new(),
        href,
    }
}

impl Check {
    fn but(self, health: Health, evidence: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            health,
            evidence: evidence.into(),
            advice: advice.into(),
            ..self
        }
    }
}

impl Facts<'_> {
    fn bypasses(&self, reason: BypassReason) -> u64 {
        self.sum(|scope| self.counts.scope(scope).bypasses(reason))
    }

    fn sum(&self, count: impl Fn(Scope) -> u64) -> u64 {
        Scope::ALL.into_iter().map(count).sum()
    }

    /// Admits, waits and bypasses where admission applies (CNT1).
    fn decided(&self) -> u64 {
        self.sum(|scope| {
            let tally = self.counts.scope(scope);
            let waits: u64 = WaitReason::ALL.iter().map(|why| tally.waits(*why)).sum();
            let bypasses: u64 = BypassReason::ALL
                .iter()
                .filter(|why| !matches!(why, BypassReason::Disabled | BypassReason::OutOfScope))
                .map(|why| tally.bypasses(*why))
                .sum();
            tally.admit + waits + bypasses
        })
    }

    fn over(&self) -> String {
        if self.over < Span::from_secs(1) {
            "since the start".to_owned()
        } else {
            format!("in {}", about(self.over))
        }
    }

    /// Notices with these codes.
    fn noticed(&self, codes: &[&str]) -> Vec<&Notice> {
        let all = self.notices.iter();
        all.filter(|notice| codes.contains(&notice.code.as_str()))
            .collect()
    }
}

fn severity(count: u64, of: u64) -> Health {
    match count {
        0 => Health::Ok,
        _ if count.saturating_mul(MANY) >= of => Health::Bad,
        _ => Health::Look,
    }
}

fn texts(notices: &[&Notice]) -> String {
    let texts: Vec<&str> = notices.iter().map(|notice| notice.text.as_str()).collect();
    texts.join(" ")
}

/// The first few, and how many more.
fn listed(names: &[String]) -> String {
    let mut text = names
        .iter()
        .take(TOLD_MAX)
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ");
    let more = names.len().saturating_sub(TOLD_MAX);
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

fn everything_bypasses(facts: &Facts<'_>) -> Check {
    let check = ok("Everything bypasses", "decisions?action=bypass", "no");
    let bypassed = facts.bypasses(BypassReason::Degraded);
    let figures = format!("{} without a ceiling {}", grouped(bypassed), facts.over());
    match &facts.degraded {
        _ if !facts.policy.program_admission => Check {
            evidence: "admission is off".to_owned(),
            ..check
        },
        Some(why) => check.but(
            Health::Bad,
            figures,
            format!(
                "There is no usable ceiling: {why}. Check the router's address and that each engine answers /metrics; \
                 `kvgate check` names what is to be mended."
            ),
        ),
        None if facts.policy.paused => check.but(
            Health::Look,
            "the gate is paused",
            "New work goes ahead without a lease until the gate is resumed.",
        ),
        None if bypassed > 0 => check.but(
            Health::Look,
            figures,
            "There was no usable ceiling for a while. Check the router and the engines' readings.",
        ),
        None => check,
    }
}

fn waiting_remains_high(facts: &Facts<'_>) -> Check {
    let waiting = format!("{} waiting", grouped(facts.waiting));
    let check = ok("Waiting remains high", "queue", waiting.clone());
    let full = facts.waiting.saturating_mul(10) >= facts.policy.max_waiting.saturating_mul(9);
    let lasting = facts.waiting_for.filter(|span| *span >= LASTING);
    let advice = |first: &str| {
        let head = facts.head.as_deref().unwrap_or_default();
        format!(
            "{first}{head}{}Check reservation sizes, concurrency, headroom and the engines' KV use.",
            if head.is_empty() { "" } else { " " }
        )
    };
    match lasting {
        _ if facts.waiting == 0 => check,
        _ if full => check.but(
            Health::Bad,
            format!(
                "{waiting}, {} may stand in line",
                grouped(facts.policy.max_waiting)
            ),
            advice("What comes beyond bypasses. "),
        ),
        Some(span) => check.but(
            Health::Look,
            format!("{waiting}, never empty for {}", about(span)),
            advice(""),
        ),
        None => check,
    }
}

fn aging_bypasses(facts: &Facts<'_>) -> Check {
    let aged = facts.bypasses(BypassReason::Aged);
    let name = "Aging bypasses";
    let href = "decisions?action=bypass&reason=aged";
    let none = format!("none {}", facts.over());
    let figures = format!(
        "{} {}, {} of decisions",
        grouped(aged),
        facts.over(),
        percent_of(aged, facts.decided())
    );
    match severity(aged, facts.decided()) {
        Health::Ok => ok(name, href, none),
        health => ok(name, href, none).but(
            health,
            figures,
            format!(
                "Requests wait for as long as they may ({}). Raise headroom, reduce concurrency, or lower the expected \
                 decode cap.",
                set(facts.policy.max_wait)
            ),
        ),
    }
}

fn near_the_ceiling(facts: &Facts<'_>) -> Check {
    let share = percent_of(facts.reserved.get(), facts.ceiling.get());
    let check = ok("Reserved near the ceiling", "leases", share.clone());
    let overdraft = facts.reserved.saturating_sub(facts.ceiling);
    if overdraft > Tokens::ZERO && facts.ceiling > Tokens::ZERO {
        return check.but(
            Health::Bad,
            format!("{} more than the ceiling", grouped(overdraft.get())),
            "The fleet became smaller, or headroom was lowered. Work that runs keeps its leases; nothing is granted \
             until enough of them end.",
        );
    }
    match facts.near_for.filter(|span| *span >= LASTING) {
        Some(span) => check.but(
            Health::Look,
            format!("{share} for {}", about(span)),
            format!(
                "The fleet is full. Raise headroom ({} now) or reduce concurrent sessions.",
                percent(facts.policy.headroom)
            ),
        ),
        None => check,
    }
}

/// Notices that tell what closes come to.
const CLOSE_NOTICES: [&str; 7] = [
    "close_absent",
    "close_session_cache_off",
    "close_radix_cache_off",
    "close_eviction_policy",
    "close_lowers_priority",
    "close_vllm",
    "close_grpc",
];

fn kv_drops_after_closes(facts: &Facts<'_>) -> Check {
    let name = "KV drops after closes";
    if !facts.policy.session_lifecycle {
        return ok(name, "sessions", "session closes are off");
    }
    let delivered = facts.counts.delivered(TargetState::Delivered);
    let closes = format!("{} {}", counted(facts.counts.closes, "close"), facts.over());
    let range = facts.resident.map(|resident| {
        format!(
            "KV {:.0} to {:.0} % of the pools, {closes}",
            resident.low * 100.0,
            resident.high * 100.0
        )
    });
    let evidence = range.unwrap_or_else(|| format!("{closes}; no engine tells its cached KV"));
    let check = ok(name, "engines", evidence.clone());
    let notices = facts.noticed(&CLOSE_NOTICES);
    let serious = |notice: &&Notice| notice.severity != Severity::Info;
    if notices.iter().any(serious) {
        return check.but(Health::Look, evidence, texts(&notices));
    }
    let stays = facts.resident.is_some_and(|resident| {
        resident.low >= 1.0 - FREE_MIN && resident.cached_low >= CACHED_MUCH
    });
    if stays && delivered >= CLOSES_MIN {
        return check.but(
            Health::Look,
            evidence,
            "Closes were delivered, yet the pools stayed full and much of them was cached. Check that the engines run \
             with --enable-session-radix-cache.",
        );
    }
    Check {
        advice: texts(&notices),
        ..check
    }
}

fn close_failures(facts: &Facts<'_>) -> Check {
    let name = "Close failures";
    if !facts.policy.session_lifecycle {
        return ok(name, "sessions", "session closes are off");
    }
    let failed = facts.counts.close_failures;
    let check = ok(name, "closes?failed=true", format!("none {}", facts.over()));
    let notices = facts.noticed(&["close_refused", "abort_refused"]);
    if failed == 0 && facts.closes_failed == 0 && notices.is_empty() {
        return check;
    }
    let at: Vec<String> = facts
        .failing
        .iter()
        .map(|(engine, count)| format!("{engine} ({})", grouped(*count)))
        .collect();
    let told = texts(&notices);
    let mut advice = String::new();
    if !at.is_empty() {
        advice.push_str(&format!("Lately at {}. ", listed(&at)));
    }
    advice.push_str(&told);
    if !told.is_empty() {
        advice.push(' ');
    }
    advice.push_str(
        "Check the router's list of workers, and that /close_session can be reached at each engine directly.",
    );
    check.but(
        severity(failed, facts.counts.closes).max(Health::Look),
        format!(
            "{} {}, {} to look at",
            grouped(failed),
            facts.over(),
            counted(facts.closes_failed, "session")
        ),
        advice,
    )
}

fn engines_stand_still(facts: &Facts<'_>) -> Check {
    let all = u64::try_from(facts.engines.len()).unwrap_or(u64::MAX);
    let check = ok(
        "Engines that stand still",
        "engines",
        format!("{} read", counted(all, "engine")),
    );
    let missing = facts
        .engines
        .iter()
        .filter_map(|engine| Some(format!("{}: {}", engine.name, engine.missing.as_ref()?)));
    let still = facts.engines.iter().filter_map(|engine| {
        let still = engine.still.filter(|still| *still >= STILL_AFTER)?;
        Some(format!(
            "{}: runs work, but no figure of it moved for {}",
            engine.name,
            about(still)
        ))
    });
    let found: Vec<String> = missing.chain(still).collect();
    if found.is_empty() {
        return check;
    }
    let count = u64::try_from(found.len()).unwrap_or(u64::MAX);
    check.but(
        Health::Bad,
        format!("{} of {}", grouped(count), counted(all, "engine")),
        format!(
            "{}. Look at their logs and whether they answer.",
            listed(&found)
        ),
    )
}

fn leases_expire(facts: &Facts<'_>) -> Check {
    let expired = facts.counts.ends(LeaseEnd::Expired);
    let ended = LeaseEnd::ALL
        .iter()
        .map(|how| facts.counts.ends(*how))
        .sum();
    let check = ok(
        "Leases that expire",
        "leases",
        format!("none of {} {}", grouped(ended), facts.over()),
    );
    match severity(expired, ended) {
        Health::Ok => check,
        health => check.but(
            health,
            format!(
                "{} of {} {}",
                grouped(expired),
                counted(ended, "end"),
                facts.over()
            ),
            "Callers end without giving their leases back, or run longer than these live. Renew leases while work \
             runs, or ask for a longer ttl_s.",
        ),
    }
}

fn clients_fail_open(facts: &Facts<'_>) -> Check {
    let count = |why: &LocalBypass| facts.counts.reported(*why);
    let all: u64 = LocalBypass::ALL.iter().map(count).sum();
    let check = ok(
        "Clients that fail open",
        "decisions",
        format!("none {}", facts.over()),
    );
    let health = severity(all, facts.decided());
    if health == Health::Ok {
        return check;
    }
    let most = LocalBypass::ALL.into_iter().max_by_key(|why| count(why));
    let advice = match most {
        Some(LocalBypass::Refused) => {
            "The gate refuses their calls: check their tokens, and that their version fits."
        }
        Some(LocalBypass::Timeout) => {
            "Their own bound on the wait is reached: it should be longer than the longest wait of the gate."
        }
        Some(LocalBypass::Unreachable | LocalBypass::Breaker) => {
            "They get no answer: check the address they have, the network, and the time-outs of proxies between."
        }
        Some(LocalBypass::Other) | None => "Their logs tell why.",
    };
    let parts: Vec<String> = LocalBypass::ALL
        .iter()
        .filter(|why| count(why) > 0)
        .map(|why| format!("{} {}", grouped(count(why)), local_word(*why)))
        .collect();
    check.but(
        health,
        format!(
            "{} by clients without the gate {}",
            grouped(all),
            facts.over()
        ),
        format!("{}. {advice}", parts.join(", ")),
    )
}

const fn local_word(why: LocalBypass) -> &'static str {
    match why {
        LocalBypass::Unreachable => "unreachable",
        LocalBypass::Refused => "refused",
        LocalBypass::Breaker => "breaker",
        LocalBypass::Timeout => "timeout",
        LocalBypass::Other => "other",
    }
}

fn oversized(facts: &Facts<'_>) -> Check {
    let oversize = facts.bypasses(BypassReason::Oversize);
    let notices = facts.noticed(&["larger_than_any_pool"]);
    let check = ok(
        "Oversized reservations",
        "decisions?action=bypass&reason=oversize",
        format!("none {}", facts.over()),
    );
    if oversize == 0 && notices.is_empty() {
        return check;
    }
    let mut advice = texts(&notices);
    if !advice.is_empty() {
        advice.push(' ');
    }
    advice.push_str("Lower the expected decode cap, or the length of contexts.");
    check.but(
        Health::Look,
        format!("{} bypassed {}", grouped(oversize), facts.over()),
        advice,
    )
}

fn sessions_reused(facts: &Facts<'_>) -> Check {
    let reused = facts.counts.sessions_reopened;
    let notices = facts.noticed(&["session_reopened"]);
    let check = ok(
        "Session ids used again",
        "sessions",
        format!("none {}", facts.over()),
    );
    if reused == 0 && notices.is_empty() {
        return check;
    }
    let advice = if notices.is_empty() {
        "Sessions were used again after their close. Give each attempt a fresh session id."
            .to_owned()
    } else {
        texts(&notices)
    };
    check.but(
        Health::Look,
        format!("{} {}", grouped(reused), facts.over()),
        advice,
    )
}

fn router_keeps_ids(facts: &Facts<'_>) -> Check {
    let router = facts.router.as_deref().unwrap_or("no router");
    let check = ok("Router keeps session ids", "engines", router);
    let notices = facts.noticed(&["router_drops_session_id"]);
    if notices.is_empty() {
        check
    } else {
        let advice = format!(
            "{} Use a router that passes it on, or let callers send to engines directly.",
            texts(&notices)
        );
        check.but(Health::Bad, router, advice)
    }
}

fn age_of_readings(facts: &Facts<'_>) -> Check {
    let name = "Age of readings";
    let read = facts
        .engines
        .iter()
        .filter_map(|engine| Some((engine.age?, engine)));
    let Some((age, engine)) = read.max_by_key(|(age, _)| *age) else {
        return ok(name, "engines", "no engine is counted");
    };
    let stale = facts.policy.stale_after;
    let evidence = format!("oldest {}, stale at {}", duration(age), set(stale));
    let check = ok(name, "engines", evidence.clone());
    if age.millis().saturating_mul(2) < stale.millis() {
        return check;
    }
    check.but(
        Health::Look,
        evidence,
        format!(
            "{} answers slowly or not at every round. At {} it is no longer counted.",
            engine.name,
            set(stale)
        ),
    )
}

fn gap_in_the_figures(facts: &Facts<'_>) -> Check {
    let check = ok("Gap in the figures", "./?range=1h", "none in the last hour");
    match facts.gap {
        None => check,
        Some(gap) => check.but(
            Health::Look,
            format!("{}, {} ago", duration(gap.length), about(gap.ago)),
            "The service was down or the machine stood still. Leases, queue and counters were kept; callers went on \
             without leases.",
        ),
    }
}

/// Notices that no check above judges stand for themselves.
fn others<'a>(facts: &'a Facts<'_>) -> impl Iterator<Item = Check> + 'a {
    const JUDGED: [&str; 5] = [
        "close_refused",
        "abort_refused",
        "larger_than_any_pool",
        "session_reopened",
        "router_drops_session_id",
    ];
    let judged = |code: &str| JUDGED.contains(&code) || CLOSE_NOTICES.contains(&code);
    let others = facts.notices.iter();
    others
        .filter(move |notice| !judged(&notice.code))
        .map(|notice| Check {
            name: notice.code.clone(),
            health: match notice.severity {
                Severity::Info => Health::Ok,
                Severity::Warning => Health::Look,
                Severity::Error => Health::Bad,
            },
            evidence: String::new(),
            advice: notice.text.clone(),
            href: "engines",
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> Policy {
        Policy {
            program_admission: true,
            session_lifecycle: true,
            ..Policy::default()
        }
    }

    /// 1,000 admits in 15 minutes and nothing else.
    fn calm(policy: &Policy) -> Facts<'_> {
        let mut counts = Tally::default();
        counts.scopes[0].admit = 1_000;
        counts.leases_ended = [1_000, 0, 0, 0];
        Facts {
            policy,
            counts,
            over: Span::from_secs(900),
            degraded: None,
            reserved: Tokens::new(612).unwrap(),
            ceiling: Tokens::new(1_000).unwrap(),
            near_for: None,
            waiting: 0,
            waiting_for: None,
            head: None,
            resident: None,
            closes_failed: 0,
            failing: Vec::new(),
            engines: vec![EngineFact {
                name: "e1:30000".to_owned(),
                missing: None,
                still: None,
                age: Some(Span::from_millis(900)),
            }],
            router: None,
            notices: &[],
            gap: None,
        }
    }

    fn notice(code: &str, severity: Severity) -> Notice {
        Notice {
            code: code.to_owned(),
            severity,
            text: format!("Text of {code}."),
            since: String::new(),
        }
    }

    fn secs(secs: u64) -> Option<Span> {
        Some(Span::from_secs(secs))
    }

    fn bypassed(facts: &mut Facts<'_>, reason: BypassReason, count: u64) {
        let at = BypassReason::ALL.iter().position(|why| *why == reason);
        facts.counts.scopes[0].bypass[at.unwrap()] = count;
    }

    /// Asserts health and figures, and that what is not well says what to do.
    #[track_caller]
    fn is(check: &Check, health: Health, evidence: &str) {
        assert_eq!((check.health, check.evidence.as_str()), (health, evidence));
        assert_eq!(health == Health::Ok, check.advice.is_empty(), "{check:?}");
    }

    #[test]
    fn a_calm_fleet_needs_no_look() {
        let policy = policy();
        let checks = checks(&calm(&policy));
        assert_eq!(checks.len(), 14);
        let begun = Facts {
            over: Span::ZERO,
            ..calm(&policy)
        };
        is(&aging_bypasses(&begun), Health::Ok, "none since the start");
        for check in &checks {
            assert_eq!(check.health, Health::Ok, "{check:?}");
            assert!(!check.evidence.is_empty(), "{check:?}");
        }
    }

    #[test]
    fn the_worst_comes_first() {
        let policy = policy();
        let notices = [notice("session_reopened", Severity::Warning)];
        let mut facts = calm(&policy);
        facts.notices = &notices;
        facts.degraded = Some("the router takes no connection".to_owned());
        let checks = checks(&facts);
        let health: Vec<Health> = checks.iter().take(3).map(|check| check.health).collect();
        assert_eq!(health, [Health::Bad, Health::Look, Health::Ok]);
    }

    #[test]
    fn everything_bypasses_without_a_ceiling_or_when_paused() {
        let policy = policy();
        let mut facts = calm(&policy);
        is(&everything_bypasses(&facts), Health::Ok, "no");
        bypassed(&mut facts, BypassReason::Degraded, 12);
        let figures = "12 without a ceiling in 15 min";
        is(&everything_bypasses(&facts), Health::Look, figures);
        facts.degraded = Some("the router takes no connection".to_owned());
        let check = everything_bypasses(&facts);
        is(&check, Health::Bad, figures);
        assert!(check.advice.contains("the router takes no connection"));
        let paused = Policy {
            paused: true,
            ..policy.clone()
        };
        let check = everything_bypasses(&calm(&paused));
        is(&check, Health::Look, "the gate is paused");
        let off = Policy::default();
        is(
            &everything_bypasses(&calm(&off)),
            Health::Ok,
            "admission is off",
        );
    }

    #[test]
    fn waiting_is_high_when_it_lasts_or_the_queue_is_full() {
        let policy = policy();
        let mut facts = calm(&policy);
        facts.waiting = 34;
        facts.waiting_for = secs(299);
        is(&waiting_remains_high(&facts), Health::Ok, "34 waiting");
        facts.waiting_for = secs(660);
        facts.head = Some("It needs 98,304 tokens.".to_owned());
        let check = waiting_remains_high(&facts);
        is(&check, Health::Look, "34 waiting, never empty for 11 min");
        assert!(check.advice.starts_with("It needs 98,304 tokens. Check"));
        facts.waiting = policy.max_waiting;
        assert_eq!(waiting_remains_high(&facts).health, Health::Bad);
    }

    #[test]
    fn aging_is_judged_by_its_share() {
        let policy = policy();
        let mut facts = calm(&policy);
        is(&aging_bypasses(&facts), Health::Ok, "none in 15 min");
        bypassed(&mut facts, BypassReason::Aged, 8);
        is(
            &aging_bypasses(&facts),
            Health::Look,
            "8 in 15 min, 0.7 % of decisions",
        );
        bypassed(&mut facts, BypassReason::Aged, 100);
        assert_eq!(aging_bypasses(&facts).health, Health::Bad);
    }

    #[test]
    fn the_ceiling_is_near_when_it_lasts_and_passed_at_once() {
        let policy = policy();
        let mut facts = calm(&policy);
        is(&near_the_ceiling(&facts), Health::Ok, "61.2 %");
        facts.reserved = Tokens::new(977).unwrap();
        facts.near_for = secs(299);
        is(&near_the_ceiling(&facts), Health::Ok, "97.7 %");
        facts.near_for = secs(660);
        let check = near_the_ceiling(&facts);
        is(&check, Health::Look, "97.7 % for 11 min");
        assert!(check.advice.contains("90.0 % now"));
        facts.reserved = Tokens::new(1_034).unwrap();
        is(
            &near_the_ceiling(&facts),
            Health::Bad,
            "34 more than the ceiling",
        );
    }

    #[test]
    fn kv_that_never_drops() {
        let policy = policy();
        let mut facts = calm(&policy);
        facts.counts.closes = 120;
        facts.counts.close_deliveries[0] = 240;
        let none = "120 closes in 15 min; no engine tells its cached KV";
        is(&kv_drops_after_closes(&facts), Health::Ok, none);
        let resident = |low, cached_low| {
            Some(Resident {
                low,
                high: 0.99,
                cached_low,
            })
        };
        facts.resident = resident(0.61, 0.4);
        let moves = "KV 61 to 99 % of the pools, 120 closes in 15 min";
        is(&kv_drops_after_closes(&facts), Health::Ok, moves);
        // Full of running work: nothing to free.
        facts.resident = resident(0.97, 0.1);
        assert_eq!(kv_drops_after_closes(&facts).health, Health::Ok);
        facts.resident = resident(0.97, 0.3);
        let stays = "KV 97 to 99 % of the pools, 120 closes in 15 min";
        is(&kv_drops_after_closes(&facts), Health::Look, stays);
        facts.counts.close_deliveries[0] = 19;
        assert_eq!(kv_drops_after_closes(&facts).health, Health::Ok);
        let notices = [notice("close_session_cache_off", Severity::Warning)];
        facts.notices = &notices;
        let check = kv_drops_after_closes(&facts);
        assert_eq!(check.health, Health::Look);
        assert_eq!(check.advice, "Text of close_session_cache_off.");
        let off = Policy::default();
        let check = kv_drops_after_closes(&calm(&off));
        is(&check, Health::Ok, "session closes are off");
    }

    #[test]
    fn closes_that_fail() {
        let policy = policy();
        let mut facts = calm(&policy);
        facts.counts.closes = 100;
        is(&close_failures(&facts), Health::Ok, "none in 15 min");
        facts.counts.close_failures = 4;
        facts.closes_failed = 2;
        facts.failing = vec![("e1:30000".to_owned(), 2)];
        let check = close_failures(&facts);
        is(&check, Health::Look, "4 in 15 min, 2 sessions to look at");
        assert!(check.advice.starts_with("Lately at e1:30000 (2). "));
        facts.counts.close_failures = 5;
        assert_eq!(close_failures(&facts).health, Health::Bad);
        let notices = [notice("close_refused", Severity::Warning)];
        let mut facts = calm(&policy);
        facts.notices = &notices;
        assert_eq!(close_failures(&facts).health, Health::Look);
    }

    #[test]
    fn engines_that_are_away_or_stand_still() {
        let policy = policy();
        let mut facts = calm(&policy);
        is(&engines_stand_still(&facts), Health::Ok, "1 engine read");
        facts.engines[0].still = secs(59);
        assert_eq!(engines_stand_still(&facts).health, Health::Ok);
        facts.engines[0].still = secs(60);
        let check = engines_stand_still(&facts);
        is(&check, Health::Bad, "1 of 1 engine");
        assert!(check.advice.starts_with("e1:30000: runs work"));
        facts.engines[0].still = None;
        facts.engines[0].missing = Some("no connection".to_owned());
        let check = engines_stand_still(&facts);
        assert!(check.advice.starts_with("e1:30000: no connection."));
    }

    #[test]
    fn leases_that_expire() {
        let policy = policy();
        let mut facts = calm(&policy);
        is(
            &leases_expire(&facts),
            Health::Ok,
            "none of 1,000 in 15 min",
        );
        facts.counts.leases_ended = [999, 1, 0, 0];
        is(
            &leases_expire(&facts),
            Health::Look,
            "1 of 1,000 ends in 15 min",
        );
        facts.counts.leases_ended = [950, 50, 0, 0];
        assert_eq!(leases_expire(&facts).health, Health::Bad);
    }

    #[test]
    fn clients_that_go_on_by_themselves() {
        let policy = policy();
        let mut facts = calm(&policy);
        is(&clients_fail_open(&facts), Health::Ok, "none in 15 min");
        facts.counts.local_bypasses = [3, 4, 0, 0, 0];
        let check = clients_fail_open(&facts);
        is(
            &check,
            Health::Look,
            "7 by clients without the gate in 15 min",
        );
        assert!(
            check
                .advice
                .starts_with("3 unreachable, 4 refused. The gate refuses")
        );
        facts.counts.local_bypasses = [0, 0, 50, 0, 0];
        assert_eq!(clients_fail_open(&facts).health, Health::Bad);
    }

    #[test]
    fn reservations_that_fit_nowhere() {
        let policy = policy();
        let mut facts = calm(&policy);
        is(&oversized(&facts), Health::Ok, "none in 15 min");
        bypassed(&mut facts, BypassReason::Oversize, 2);
        is(&oversized(&facts), Health::Look, "2 bypassed in 15 min");
        let notices = [notice("larger_than_any_pool", Severity::Warning)];
        let mut facts = calm(&policy);
        facts.notices = &notices;
        let check = oversized(&facts);
        assert!(
            check
                .advice
                .starts_with("Text of larger_than_any_pool. Lower")
        );
    }

    #[test]
    fn ids_that_are_used_again_or_lost() {
        let policy = policy();
        let mut facts = calm(&policy);
        is(&sessions_reused(&facts), Health::Ok, "none in 15 min");
        facts.counts.sessions_reopened = 1;
        is(&sessions_reused(&facts), Health::Look, "1 in 15 min");
        is(&router_keeps_ids(&facts), Health::Ok, "no router");
        let notices = [notice("router_drops_session_id", Severity::Warning)];
        facts.notices = &notices;
        facts.router = Some("sgl-router".to_owned());
        is(&router_keeps_ids(&facts), Health::Bad, "sgl-router");
    }

    #[test]
    fn readings_that_grow_old() {
        let policy = policy();
        let mut facts = calm(&policy);
        let half = Span::from_millis(policy.stale_after.millis() / 2);
        assert_eq!(age_of_readings(&facts).health, Health::Ok);
        facts.engines[0].age = Some(half);
        assert_eq!(age_of_readings(&facts).health, Health::Look);
        facts.engines[0].age = None;
        is(&age_of_readings(&facts), Health::Ok, "no engine is counted");
    }

    #[test]
    fn a_time_without_figures() {
        let policy = policy();
        let mut facts = calm(&policy);
        is(
            &gap_in_the_figures(&facts),
            Health::Ok,
            "none in the last hour",
        );
        facts.gap = Some(Gap {
            length: Span::from_secs(252),
            ago: Span::from_secs(600),
        });
        is(
            &gap_in_the_figures(&facts),
            Health::Look,
            "4 m 12 s, 10 min ago",
        );
    }

    /// What no check judges is shown all the same, and what one judges is not shown twice.
    #[test]
    fn every_notice_is_shown_once() {
        let policy = policy();
        let codes = ["store_unavailable", "unknown_label", "close_vllm"];
        let notices = codes.map(|code| notice(code, Severity::Error));
        let mut facts = calm(&policy);
        facts.notices = &notices;
        let checks = checks(&facts);
        for code in codes {
            let text = format!("Text of {code}.");
            let shown = checks.iter().filter(|check| check.advice.contains(&text));
            assert_eq!(shown.count(), 1, "{code}");
        }
        assert_eq!(checks.len(), 16);
    }
}
