//! What is read of answers: no more than decides how a caller goes on.

use std::time::Duration;

use serde::Deserialize;

use super::wire::Answer;

/// What an acquire came to.
pub(super) enum Decision<'a> {
    Admit(&'a str),
    /// Ask again after this time.
    Wait {
        rest: Duration,
    },
    Bypass,
    Other,
}

/// The part of a decision that is read. The ids of leases have no letters that JSON escapes.
#[derive(Deserialize)]
struct Decided<'a> {
    action: &'a str,
    lease_id: Option<&'a str>,
    poll_after_s: Option<f64>,
}

impl<'a> Decided<'a> {
    fn decision(self) -> Decision<'a> {
        match (self.action, self.lease_id) {
            ("admit", Some(lease)) => Decision::Admit(lease),
            ("wait", _) => {
                let rest = Duration::try_from_secs_f64(self.poll_after_s.unwrap_or_default());
                Decision::Wait {
                    rest: rest.unwrap_or_default(),
                }
            }
            ("bypass", _) => Decision::Bypass,
            _ => Decision::Other,
        }
    }
}

impl<'a> Decision<'a> {
    pub(super) fn of(answer: Answer<'a>) -> Self {
        if !matches!(answer.status, 200 | 202) {
            return Self::Other;
        }
        serde_json::from_slice::<Decided<'a>>(answer.body).map_or(Self::Other, Decided::decision)
    }
}

#[derive(Deserialize)]
struct Results<T> {
    results: Vec<OneResult<T>>,
}

#[derive(Deserialize)]
struct OneResult<T> {
    body: T,
}

/// The leases that a batch of acquires got; `None` when it was refused.
pub(super) fn leases(answer: Answer<'_>) -> Option<Vec<String>> {
    let results: Results<Decided<'_>> = match answer.status {
        200 => serde_json::from_slice(answer.body).ok()?,
        _ => return None,
    };
    let lease = |result: OneResult<Decided<'_>>| match result.body.decision() {
        Decision::Admit(lease) => Some(lease.to_owned()),
        _ => None,
    };
    Some(results.results.into_iter().filter_map(lease).collect())
}

/// How many leases a batch of releases ended.
pub(super) fn released_in(answer: Answer<'_>) -> usize {
    #[derive(Deserialize)]
    struct Released<'a> {
        outcome: Option<&'a str>,
    }
    let results = serde_json::from_slice::<Results<Released<'_>>>(answer.body);
    let is_done = |result: &OneResult<Released<'_>>| result.body.outcome == Some("released");
    results.map_or(0, |results| {
        results
            .results
            .iter()
            .filter(|result| is_done(result))
            .count()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_far_as_they_matter() {
        let admit = r#"{"action":"admit","reason":"x","lease_id":"7-ab","epoch":1}"#;
        assert!(matches!(
            Decision::of(Answer::of(200, admit)),
            Decision::Admit("7-ab")
        ));
        let wait = r#"{"action":"wait","position":3,"poll_after_s":0.25}"#;
        let rest = Duration::from_millis(250);
        assert!(
            matches!(Decision::of(Answer::of(202, wait)), Decision::Wait { rest: told } if told == rest)
        );
        let bypass = r#"{"action":"bypass"}"#;
        assert!(matches!(
            Decision::of(Answer::of(200, bypass)),
            Decision::Bypass
        ));
        assert!(matches!(
            Decision::of(Answer::of(503, admit)),
            Decision::Other
        ));
        assert!(matches!(
            Decision::of(Answer::of(200, "{")),
            Decision::Other
        ));
        let batch = format!(
            r#"{{"results":[{{"status":200,"body":{admit}}},{{"status":202,"body":{wait}}},{{"status":409,"body":{{"action":""}}}}]}}"#
        );
        assert_eq!(
            leases(Answer::of(200, &batch)),
            Some(vec!["7-ab".to_owned()])
        );
        assert_eq!(leases(Answer::of(413, "")), None);
        let released = r#"{"results":[{"status":200,"body":{"outcome":"released"}},{"status":404,"body":{"code":"x"}}]}"#;
        assert_eq!(released_in(Answer::of(200, released)), 1);
    }
}
