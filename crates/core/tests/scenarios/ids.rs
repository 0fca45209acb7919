//! Ids and tokens.

use kvgate_core::decision::WaitReason;
use kvgate_core::effect::{AcquireRefused, LeaseGone, ReleaseOutcome};
use kvgate_core::ids::{ID_BYTES_MAX, IdError, Issue, Label, LeaseId, SessionId, TicketId};
use kvgate_core::ticket::Sent;
use kvgate_core::units::{Ppm, Span, TOKENS_MAX, Timestamp, Tokens};

use crate::common::*;

/// ID1: 1 to 512 bytes, no control characters, not `.` or `..`; each refusal names the broken rule.
#[test]
fn id1_ids_are_checked_and_the_broken_rule_is_named() {
    let long = "x".repeat(ID_BYTES_MAX + 1);
    let long_in_bytes_only = "é".repeat(257);
    let refused = [
        ("", IdError::Empty),
        (long.as_str(), IdError::TooLong),
        (long_in_bytes_only.as_str(), IdError::TooLong),
        ("a\u{0}b", IdError::Control),
        ("\u{1f}", IdError::Control),
        ("line\n", IdError::Control),
        ("\u{7f}", IdError::Control),
        ("a\u{80}", IdError::Control),
        ("\u{9f}b", IdError::Control),
        (".", IdError::Dots),
        ("..", IdError::Dots),
    ];
    for (text, why) in refused {
        assert_eq!(TicketId::new(text).unwrap_err(), why, "{text:?}");
        assert_eq!(SessionId::new(text).unwrap_err(), why, "{text:?}");
        assert_eq!(Label::new(text).unwrap_err(), why, "{text:?}");
        assert!(!why.to_string().is_empty());
    }
    let longest = "x".repeat(ID_BYTES_MAX);
    let kept = [
        longest.as_str(),
        "a",
        "...",
        " ",
        " a ",
        "\u{20}",
        "\u{a0}",
        "step-12/s-7/3#0",
        "%2e",
        "ä",
        "./x",
    ];
    for text in kept {
        assert_eq!(
            TicketId::new(text).unwrap().as_str(),
            text,
            "as it was given"
        );
        assert_eq!(SessionId::new(text).unwrap().as_str(), text);
    }
}

/// ID1: ids are compared byte by byte, never trimmed, folded or cut.
#[test]
fn id1_ids_are_compared_byte_by_byte() {
    let mut gate = Gate::new();
    let long = "x".repeat(ID_BYTES_MAX - 1);
    let names = [
        "t",
        "T",
        " t",
        "t ",
        "\u{e4}",
        "a\u{308}",
        &format!("{long}1"),
        &format!("{long}2"),
    ];
    for name in names {
        gate.hold(name, 10);
    }
    assert_eq!(gate.reserved(), 80, "eight tickets, eight leases");
}

/// ID2, LEA4, TIC6: a lease id carries an issue number and a random part drawn at each start, and
/// never repeats, neither after a restart nor after a restored backup.
#[test]
fn id2_lease_ids_never_repeat() {
    let mut gate = Gate::new();
    let first = gate.hold("t1", 1);
    assert_eq!(
        first,
        LeaseId {
            issue: Issue(1),
            salt: gate.salt
        }
    );
    let backup = gate.store.clone();
    let second = gate.hold("t2", 1);
    assert_eq!(second.issue, Issue(2), "no gaps");
    gate.restart(1_000);
    let third = gate.hold("t3", 1);
    assert_eq!(third.issue, Issue(3));
    assert_ne!(third.salt, second.salt);
    // A restored backup has not seen the issue numbers 2 and 3.
    gate.store = backup;
    gate.restart(1_000);
    let again = gate.hold("t4", 1);
    assert_eq!(again.issue, Issue(2));
    assert_ne!(again, second, "the random part differs");
    assert_eq!(
        gate.release(second),
        Err(LeaseGone::NotFound),
        "nothing of the lost future is touched"
    );
    assert_eq!(gate.release(third), Err(LeaseGone::NotFound));
    assert_eq!(gate.reserved(), 2);
    assert_eq!(
        gate.release(first),
        Ok(ReleaseOutcome::Released),
        "ids of older starts still work"
    );
}

/// ID2: issue numbers go on when the tickets that bore them are forgotten.
#[test]
fn id2_issue_numbers_outlive_their_tickets() {
    let mut gate = Gate::new();
    let lease = gate.hold("t1", 1);
    gate.release(lease).unwrap();
    gate.run(601_000);
    gate.restart(1_000);
    assert!(
        gate.store.image().tickets.is_empty(),
        "nothing is remembered of it"
    );
    assert_eq!(gate.hold("t2", 1).issue, Issue(2));
    assert_eq!(
        gate.release(lease),
        Err(LeaseGone::Expired),
        "issued once, forgotten now"
    );
}

/// ID2: an unknown lease id is told apart from a forgotten one by issue number and random part,
/// over several starts, also when a start issued nothing.
#[test]
fn id2_what_was_never_issued_is_not_found() {
    let mut gate = Gate::new();
    let salt_a = gate.salt;
    gate.hold("t1", 1);
    gate.restart(1_000);
    let salt_b = gate.salt;
    gate.restart(1_000);
    let salt_c = gate.salt;
    gate.hold("t2", 1);
    let id = |issue, salt| LeaseId {
        issue: Issue(issue),
        salt,
    };
    let never = [
        id(0, salt_a),
        id(1, salt_b),
        id(1, salt_c),
        id(2, salt_a),
        id(2, salt_b),
        id(3, salt_c),
        id(u64::MAX, salt_c),
    ];
    for lease in never {
        assert_eq!(gate.release(lease), Err(LeaseGone::NotFound), "{lease}");
        assert_eq!(gate.renew(lease).unwrap_err(), LeaseGone::NotFound);
        assert_eq!(gate.read_lease(lease).unwrap_err(), LeaseGone::NotFound);
        assert_eq!(gate.revoke(lease).unwrap_err(), LeaseGone::NotFound);
    }
    assert_eq!(gate.release(id(1, salt_a)), Ok(ReleaseOutcome::Released));
    assert_eq!(gate.release(id(2, salt_c)), Ok(ReleaseOutcome::Released));
}

/// ID2: the text form is opaque, and whatever bytes come are either an id or none.
#[test]
fn id2_lease_ids_read_back_from_their_text_only() {
    for id in [
        LeaseId {
            issue: Issue(1),
            salt: 0,
        },
        LeaseId {
            issue: Issue(u64::MAX),
            salt: u64::MAX,
        },
        LeaseId {
            issue: Issue(42),
            salt: 0xab,
        },
    ] {
        assert_eq!(LeaseId::parse(&id.to_text()), Some(id));
        assert_eq!(id.to_text(), id.to_string());
    }
    for text in [
        "",
        "-",
        "1",
        "1-",
        "-0000000000000000",
        "1-0",
        "01-0000000000000000",
        "+1-0000000000000000",
        "1-00000000000000AB",
        "1-00000000000000000",
        "1-+000000000000001",
        "1-0000000000000000-",
        " 1-0000000000000000",
        "99999999999999999999-0000000000000000",
        "\u{0}",
        "/",
        "ä-ö",
    ] {
        assert_eq!(LeaseId::parse(text), None, "{text:?}");
    }
}

/// TOK1: prompt plus the smaller of completion budget and decode cap; a sum that the caller did
/// itself is not touched by the cap.
#[test]
fn tok1_the_reservation() {
    let mut gate = Gate::new();
    gate.configure(|policy| policy.expected_decode_cap = Some(tokens(100)));
    let parts = |prompt, max_new| Sent::Parts {
        prompt: tokens(prompt),
        max_new: tokens(max_new),
    };
    let cases = [
        ("below", parts(1_000, 99), 1_099),
        ("at", parts(1_000, 100), 1_100),
        ("above", parts(1_000, 101), 1_100),
        ("far above", parts(1_000, 1 << 50), 1_100),
        ("no prompt", parts(0, 500), 100),
        ("nothing", parts(0, 0), 0),
        ("own sum", Sent::Sum(tokens(5_000)), 5_000),
    ];
    let mut reserved = 0;
    for (name, sent, reservation) in cases {
        let mut ask = acquire(name, 0);
        ask.sent = sent;
        let told = gate.ask_as(ask);
        assert_eq!(answer(&told).reservation, tokens(reservation), "{name}");
        admitted(&told);
        reserved += reservation;
        assert_eq!(gate.reserved(), reserved, "{name}");
    }
    gate.configure(|policy| policy.expected_decode_cap = None);
    let mut ask = acquire("uncapped", 0);
    ask.sent = parts(1_000, 101);
    assert_eq!(answer(&gate.ask_as(ask)).reservation, tokens(1_101));
}

/// TOK2: counts up to 2^53-1; a sum above it is refused and changes nothing.
#[test]
fn tok2_sums_above_the_bound_are_refused() {
    assert_eq!(TOKENS_MAX, 9_007_199_254_740_991);
    assert_eq!(Tokens::new(TOKENS_MAX), Some(Tokens::MAX));
    assert_eq!(Tokens::new(TOKENS_MAX + 1), None);
    assert_eq!(Tokens::new(u64::MAX), None);
    let mut gate = Gate::new();
    let before = gate.view();
    let mut ask = acquire("t", 0);
    ask.sent = Sent::Parts {
        prompt: Tokens::MAX,
        max_new: tokens(1),
    };
    assert_eq!(
        refusal(&gate.ask_as(ask.clone())),
        AcquireRefused::TooManyTokens
    );
    assert_eq!(
        gate.view().tally,
        before.tally,
        "refused input counts nothing"
    );
    assert_eq!(gate.read("t"), None, "and leaves nothing");
    ask.sent = Sent::Parts {
        prompt: Tokens::MAX,
        max_new: Tokens::ZERO,
    };
    assert_eq!(
        answer(&gate.ask_as(ask)).reservation,
        Tokens::MAX,
        "the largest sum is taken"
    );
}

/// TOK2: no sum wraps: reserved, tokens ahead, waiting tokens, capacity and ceiling stop at the bound.
#[test]
fn tok2_no_sum_wraps() {
    let mut gate = Gate::new();
    for name in ["b", "c", "d"] {
        gate.engines.insert(name, Engine::of(TOKENS_MAX));
    }
    gate.configure(|policy| policy.headroom = Ppm::ONE);
    gate.round();
    assert_eq!(gate.view().measure.capacity, Tokens::MAX);
    assert_eq!(gate.ceiling(), TOKENS_MAX);
    gate.hold("t1", TOKENS_MAX);
    gate.park("t2", TOKENS_MAX);
    gate.park("t3", TOKENS_MAX);
    gate.park("t4", TOKENS_MAX);
    assert_eq!(gate.reserved(), TOKENS_MAX);
    assert_eq!(gate.view().waiting_tokens, Tokens::MAX);
    let last = place(&mut gate, "t4");
    assert_eq!(last.position, 3);
    assert_eq!(last.tokens_ahead, Tokens::MAX);
    assert_eq!(last.short, Tokens::MAX);
    assert_eq!(gate.view().available(), Tokens::ZERO);
    gate.restart(1_000);
    assert_eq!(gate.reserved(), TOKENS_MAX);
}

/// TOK2: a reservation of 0 stands in line like any other, holds a lease and charges nothing.
#[test]
fn tok2_a_reservation_of_zero() {
    let mut gate = Gate::new();
    let nothing = gate.hold("zero", 0);
    assert_eq!((gate.reserved(), gate.view().leases), (0, 1));
    let full = gate.hold("full", 900_000);
    gate.hold("zero fits a full ledger", 0);
    gate.park("waits", 10);
    gate.park("zero in line", 0);
    assert_eq!(
        reason_of(&mut gate, "zero in line"),
        WaitReason::BehindOlder
    );
    assert_eq!(gate.grants(), [], "it overtakes nobody");
    gate.release(full).unwrap();
    let granted: Vec<String> = gate.grants().into_iter().map(|(name, _)| name).collect();
    assert_eq!(granted, ["waits", "zero in line"]);
    assert_eq!(gate.reserved(), 10);
    gate.release(nothing).unwrap();
    assert_eq!((gate.reserved(), gate.view().leases), (10, 3));
}

/// TOK2, TIM2: the arithmetic of tokens, shares and times stops at its bounds.
#[test]
fn tok2_arithmetic_stops_at_its_bounds() {
    assert_eq!(Tokens::MAX.checked_add(tokens(1)), None);
    assert_eq!(tokens(2).checked_add(tokens(3)), Some(tokens(5)));
    assert_eq!(Tokens::MAX.saturating_add(Tokens::MAX), Tokens::MAX);
    assert_eq!(tokens(2).saturating_sub(tokens(3)), Tokens::ZERO);
    assert_eq!(Tokens::clamped(u128::MAX), Tokens::MAX);
    assert_eq!(Tokens::clamped(u128::from(TOKENS_MAX) + 1), Tokens::MAX);
    assert_eq!(Tokens::clamped(7), tokens(7));
    assert_eq!(Tokens::MAX.share(Ppm::ONE), Tokens::MAX);
    assert_eq!(
        tokens(19).share(Ppm::TENTH),
        tokens(1),
        "shares are rounded down"
    );
    assert_eq!(Ppm::new(1_000_001), None);
    assert_eq!(Ppm::new(1_000_000), Some(Ppm::ONE));
    assert_eq!(Ppm::clamped(u32::MAX), Ppm::ONE);
    assert_eq!(Ppm::clamped(5).get(), 5);
    let end = Timestamp::from_millis(u64::MAX);
    assert_eq!(end.after(Span::from_secs(u64::MAX)), end);
    assert_eq!(
        Timestamp::from_millis(5)
            .before(Span::from_millis(6))
            .millis(),
        0
    );
    assert_eq!(
        Timestamp::from_millis(5).since(Timestamp::from_millis(9)),
        Span::ZERO
    );
    assert_eq!(
        Timestamp::from_millis(9)
            .since(Timestamp::from_millis(5))
            .millis(),
        4
    );
}
