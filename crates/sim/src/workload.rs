//! Agent sessions drawn from one seed: turns, growing prompts, decode lengths, tool times, and now
//! and then a client that dies without releasing its lease.
//!
//! The shapes follow recorded coding-agent sessions: lengths and times are log-normal with long
//! tails, most of a prompt is the prompt of the turn before, and groups of sessions have a system
//! prompt in common. The sizes are scaled to the pools of the demo. A session depends on the seed
//! and its number only, so that the order in which callers ask for them does not matter.

use std::sync::Arc;

use kvgate_core::units::Span;
use rand_distr::{Bernoulli, Distribution, LogNormal, Uniform};
use rand_pcg::Pcg64Mcg;
use rand_pcg::rand_core::SeedableRng;

use crate::engine::{Request, SharedPrefix};

/// A log-normal spread with bounds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Spread {
    /// Half of the values lie below.
    pub median: f64,
    /// Standard deviation of the logarithm.
    pub sigma: f64,
    /// Least value.
    pub least: u64,
    /// Greatest value.
    pub most: u64,
}

impl Spread {
    /// A spread around `median`.
    #[must_use]
    pub const fn new(median: f64, sigma: f64, least: u64, most: u64) -> Self {
        Self {
            median,
            sigma,
            least,
            most,
        }
    }
}

/// What the sessions look like.
#[derive(Clone, PartialEq, Debug)]
pub struct WorkloadSpec {
    /// Decides everything.
    pub seed: u64,
    /// Turns of a session.
    pub turns: Spread,
    /// Own part of the first prompt in tokens, the shared prefix left out.
    pub first_prompt: Spread,
    /// Tokens that a tool's answer adds to the next prompt.
    pub tool_tokens: Spread,
    /// Written tokens of a turn.
    pub decode: Spread,
    /// Completion budget of every turn in tokens.
    pub max_new_tokens: u64,
    /// Longest prompt in tokens; a session ends when it gets there.
    pub prompt_max: u64,
    /// Time a tool runs between two turns, in milliseconds.
    pub tool_ms: Spread,
    /// How many shared prefixes there are.
    pub prefixes: u64,
    /// Length of a shared prefix in tokens.
    pub prefix_tokens: u64,
    /// One in so many turns belongs to a client that dies before it releases; 0 for none.
    pub dies_one_in: u64,
    /// One in so many sessions is evaluation; 0 for none.
    pub eval_one_in: u64,
    /// One in so many sessions is protected; 0 for none.
    pub protected_one_in: u64,
    /// One in so many slots begins its sessions in step with the others, at every multiple of
    /// `wave`: what fills the queue and lets it drain. 0 for none.
    pub wave_one_in: u64,
    /// Time between two waves.
    pub wave: Span,
}

impl Default for WorkloadSpec {
    /// About 200 of these sessions fill four engines of 400,000 tokens.
    fn default() -> Self {
        Self {
            seed: 1,
            turns: Spread::new(8.0, 0.7, 2, 40),
            first_prompt: Spread::new(6_000.0, 0.6, 500, 24_000),
            tool_tokens: Spread::new(900.0, 1.1, 40, 8_000),
            decode: Spread::new(260.0, 0.9, 20, 1_536),
            max_new_tokens: 1_536,
            prompt_max: 48_000,
            tool_ms: Spread::new(7_000.0, 1.0, 300, 120_000),
            prefixes: 4,
            prefix_tokens: 3_000,
            dies_one_in: 150,
            eval_one_in: 6,
            protected_one_in: 60,
            wave_one_in: 2,
            wave: Span::from_secs(120),
        }
    }
}

/// When the sessions of a slot begin.
#[derive(Clone, Copy, Debug)]
pub struct Pace;

impl Pace {
    /// The earliest start, in milliseconds since the beginning, of a session that takes the place of
    /// one that ended at `free_at_ms` in `slot`. The first sessions begin within 20 s.
    #[must_use]
    pub fn start(spec: &WorkloadSpec, slot: u64, free_at_ms: u64) -> u64 {
        if free_at_ms == 0 {
            return slot.wrapping_mul(7_919) % 20_000;
        }
        let wave = spec.wave.millis();
        if spec.wave_one_in == 0 || wave == 0 || !slot.is_multiple_of(spec.wave_one_in) {
            return free_at_ms;
        }
        free_at_ms.div_ceil(wave).saturating_mul(wave)
    }
}

/// One turn of a session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Turn {
    /// Whole prompt in tokens.
    pub prompt_tokens: u64,
    /// Completion budget in tokens.
    pub max_new_tokens: u64,
    /// Tokens the model will write.
    pub decode_tokens: u64,
    /// How long the tool runs after this turn.
    pub tool: Span,
    /// The client dies so long after its grant, without releasing.
    pub dies_after: Option<Span>,
}

impl Turn {
    /// The request of this turn under the id `rid`.
    #[must_use]
    pub fn request(&self, plan: &SessionPlan, rid: &str) -> Request {
        Request {
            rid: Arc::from(rid),
            session: Arc::from(plan.session.as_str()),
            prefix: Some(plan.prefix.clone()),
            prompt_tokens: self.prompt_tokens,
            max_new_tokens: self.max_new_tokens,
            decode_tokens: self.decode_tokens,
        }
    }
}

/// A session from its first turn to its last.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionPlan {
    /// Its id.
    pub session: String,
    /// What it has in common with others.
    pub prefix: SharedPrefix,
    /// Whether it is evaluation, not training.
    pub eval: bool,
    /// Whether it is protected work.
    pub protected: bool,
    /// Its turns, at least one. A death ends it early.
    pub turns: Vec<Turn>,
}

/// A spec whose distributions cannot be drawn from: a median or a spread out of range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadWorkload;

/// The source of sessions.
#[derive(Clone, Debug)]
pub struct Workload {
    spec: WorkloadSpec,
    turns: Draw,
    first_prompt: Draw,
    tool_tokens: Draw,
    decode: Draw,
    tool_ms: Draw,
    dies: Option<Bernoulli>,
    eval: Option<Bernoulli>,
    protected: Option<Bernoulli>,
    prefix: Uniform<u64>,
    death_ms: Uniform<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Draw {
    normal: LogNormal<f64>,
    least: u64,
    most: u64,
}

impl Draw {
    fn new(spread: Spread) -> Result<Self, BadWorkload> {
        if spread.median <= 0.0 || spread.least > spread.most {
            return Err(BadWorkload);
        }
        let normal =
            LogNormal::new(spread.median.ln(), spread.sigma).map_err(|_bad| BadWorkload)?;
        Ok(Self {
            normal,
            least: spread.least,
            most: spread.most,
        })
    }

    fn sample(&self, rng: &mut Pcg64Mcg) -> u64 {
        let value = self.normal.sample(rng).round();
        // A float cast saturates, and the bounds hold the rest.
        (value as u64).clamp(self.least, self.most)
    }
}

impl Workload {
    /// A workload of this spec.
    ///
    /// # Errors
    /// A distribution of the spec makes no sense.
    pub fn new(spec: WorkloadSpec) -> Result<Self, BadWorkload> {
        let one_in = |count: u64| {
            let count = u32::try_from(count).map_err(|_large| BadWorkload)?;
            if count == 0 {
                return Ok(None);
            }
            Bernoulli::from_ratio(1, count)
                .map(Some)
                .map_err(|_bad| BadWorkload)
        };
        Ok(Self {
            turns: Draw::new(spec.turns)?,
            first_prompt: Draw::new(spec.first_prompt)?,
            tool_tokens: Draw::new(spec.tool_tokens)?,
            decode: Draw::new(spec.decode)?,
            tool_ms: Draw::new(spec.tool_ms)?,
            dies: one_in(spec.dies_one_in)?,
            eval: one_in(spec.eval_one_in)?,
            protected: one_in(spec.protected_one_in)?,
            prefix: Uniform::new_inclusive(0, spec.prefixes.max(1) - 1)
                .map_err(|_bad| BadWorkload)?,
            death_ms: Uniform::new_inclusive(500, 4_000).map_err(|_bad| BadWorkload)?,
            spec,
        })
    }

    /// Session number `index`: always the same one.
    #[must_use]
    pub fn session(&self, index: u64) -> SessionPlan {
        let seed = self
            .spec
            .seed
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .wrapping_add(index);
        let rng = &mut Pcg64Mcg::seed_from_u64(seed);
        let prefix = SharedPrefix {
            id: Arc::from(format!("system-{}", self.prefix.sample(rng))),
            tokens: self.spec.prefix_tokens,
        };
        let eval = self.eval.is_some_and(|eval| eval.sample(rng));
        let protected = self
            .protected
            .is_some_and(|protected| protected.sample(rng));
        SessionPlan {
            session: format!("s-{}-{index:06}", self.spec.seed),
            prefix,
            eval,
            protected,
            turns: self.turns(rng),
        }
    }

    fn turns(&self, rng: &mut Pcg64Mcg) -> Vec<Turn> {
        let count = self.turns.sample(rng).max(1);
        let mut prompt = self.spec.prefix_tokens + self.first_prompt.sample(rng);
        let mut turns = Vec::new();
        for _ in 0..count {
            let decode = self.decode.sample(rng).min(self.spec.max_new_tokens);
            let dies = self.dies.is_some_and(|dies| dies.sample(rng));
            let turn = Turn {
                prompt_tokens: prompt.min(self.spec.prompt_max),
                max_new_tokens: self.spec.max_new_tokens,
                decode_tokens: decode,
                tool: Span::from_millis(self.tool_ms.sample(rng)),
                dies_after: dies.then(|| Span::from_millis(self.death_ms.sample(rng))),
            };
            turns.push(turn);
            prompt += decode + self.tool_tokens.sample(rng);
            if dies || prompt > self.spec.prompt_max {
                break;
            }
        }
        turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sessions(seed: u64, count: u64) -> Vec<SessionPlan> {
        let spec = WorkloadSpec {
            seed,
            ..WorkloadSpec::default()
        };
        let workload = Workload::new(spec).unwrap();
        (0..count).map(|index| workload.session(index)).collect()
    }

    #[test]
    fn the_seed_decides_everything_and_the_order_nothing() {
        assert_eq!(sessions(7, 50), sessions(7, 50));
        assert_ne!(sessions(7, 50), sessions(8, 50));
        let workload = Workload::new(WorkloadSpec {
            seed: 7,
            ..WorkloadSpec::default()
        })
        .unwrap();
        assert_eq!(workload.session(31), sessions(7, 50)[31]);
    }

    #[test]
    fn prompts_grow_by_what_was_written_and_stay_bounded() {
        let spec = WorkloadSpec::default();
        for plan in sessions(3, 300) {
            assert!(!plan.turns.is_empty());
            for turn in &plan.turns {
                assert!(turn.prompt_tokens <= spec.prompt_max);
                assert!(turn.decode_tokens <= turn.max_new_tokens);
                assert!(turn.prompt_tokens > plan.prefix.tokens);
            }
            for pair in plan.turns.windows(2) {
                assert!(
                    pair[1].prompt_tokens > pair[0].prompt_tokens + pair[0].decode_tokens
                        || pair[1].prompt_tokens == spec.prompt_max
                );
            }
            let deaths = plan.turns.iter().filter(|turn| turn.dies_after.is_some());
            assert!(deaths.count() <= 1, "nobody dies twice");
        }
    }

    #[test]
    fn the_draws_look_like_the_spec() {
        let plans = sessions(1, 2_000);
        let mut tools: Vec<u64> = plans
            .iter()
            .flat_map(|plan| plan.turns.iter().map(|turn| turn.tool.millis()))
            .collect();
        tools.sort_unstable();
        let median = tools[tools.len() / 2];
        assert!((6_300..7_700).contains(&median), "{median}");
        assert!(tools[tools.len() * 99 / 100] > 30_000, "the tail is long");
        let evals = plans.iter().filter(|plan| plan.eval).count();
        assert!((250..420).contains(&evals), "{evals}");
        let deaths = plans
            .iter()
            .filter(|plan| plan.turns.iter().any(|turn| turn.dies_after.is_some()))
            .count();
        assert!((20..160).contains(&deaths), "{deaths}");
    }

    #[test]
    fn a_spec_without_sense_is_refused() {
        let bad = WorkloadSpec {
            decode: Spread::new(-1.0, 1.0, 1, 2),
            ..WorkloadSpec::default()
        };
        assert_eq!(Workload::new(bad).err(), Some(BadWorkload));
    }

    #[test]
    fn waves_begin_together() {
        let spec = WorkloadSpec::default();
        assert_eq!(Pace::start(&spec, 2, 121_000), 240_000);
        assert_eq!(Pace::start(&spec, 3, 121_000), 121_000);
        assert!((0..200).all(|slot| Pace::start(&spec, slot, 0) < 20_000));
    }
}
