//! One engine: a KV pool, running and queued requests, and a prefix cache with LRU eviction.
//!
//! The numbers are those that SGLang shows: `used` is what running work locks, idle KV of sessions
//! is *evictable* and not in the usage, and used = total - available - evictable at any time.
//!
//! The prefix tree has two levels: shared prefixes (a system prompt, tool schemas) and below each
//! the private chain of every session. Eviction takes leaves first, the least recently used first,
//! and from a chain only the tail it needs. Simplifications, on purpose: the KV of a prompt is
//! allocated when its request is admitted, a shared prefix can be reused from then on, a page is
//! one token, and decode runs at one rate per request, bounded by a rate of the whole engine.
//!
//! What a session close does depends on the version ([`Family`]). Both tag the KV of a session when a
//! request of it ends; the one frees what only the closed session holds, the other lets go of it, so
//! that it is evicted first. A close while a request runs frees nothing in either.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use kvgate_core::units::{Ppm, Span};

/// Longest time that is modelled as one piece, in milliseconds.
const SLICE_MS: u64 = 50;
/// Share of the completion budget that the engine holds free for a request when it admits, in per
/// cent. The engine bets that most requests stop early, and retracts when the bet is lost.
const NEW_TOKEN_PERCENT: u64 = 40;

/// Closed ids that an engine remembers.
const TOMBSTONES_MAX: usize = 8_192;

/// What a session close means to an engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Family {
    /// SGLang 0.5.15 to 0.5.16: frees the KV that only this session holds. A closed id is not tagged
    /// again until many other closes have pushed it out of the engine's memory.
    #[default]
    Frees,
    /// SGLang 0.5.17 and later: frees nothing. KV that no session holds is evicted first, and a
    /// request that comes after the close opens the id again.
    LetsGo,
}

/// What an engine is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineSpec {
    /// KV slots in tokens.
    pub pool_tokens: u64,
    /// Decode rate of one request in tokens per second.
    pub decode_tokens_per_s: u64,
    /// Decode rate of all requests together in tokens per second.
    pub decode_tokens_per_s_max: u64,
    /// Prefill rate of the engine in tokens per second.
    pub prefill_tokens_per_s: u64,
    /// Most requests that run at once.
    pub running_max: usize,
    /// What a session close does.
    pub family: Family,
}

impl Default for EngineSpec {
    /// About what one accelerator does with a model of 8 billion parameters.
    fn default() -> Self {
        Self {
            pool_tokens: 400_000,
            decode_tokens_per_s: 60,
            decode_tokens_per_s_max: 3_600,
            prefill_tokens_per_s: 40_000,
            running_max: 256,
            family: Family::Frees,
        }
    }
}

/// A prefix that sessions have in common.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedPrefix {
    /// Which prefix.
    pub id: Arc<str>,
    /// Its length in tokens.
    pub tokens: u64,
}

/// One turn as the engine sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Id of the request; aborts match it by prefix.
    pub rid: Arc<str>,
    /// The session its KV belongs to; empty for none.
    pub session: Arc<str>,
    /// The part of the prompt that other sessions have too.
    pub prefix: Option<SharedPrefix>,
    /// Whole prompt in tokens, shared part included.
    pub prompt_tokens: u64,
    /// Completion budget in tokens.
    pub max_new_tokens: u64,
    /// Tokens the model will really write, at most `max_new_tokens` of them.
    pub decode_tokens: u64,
}

/// Why a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// The model stopped by itself.
    Stop,
    /// The completion budget was used up.
    Length,
    /// It was aborted.
    Abort,
}

/// A request that ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finished {
    /// Id of the request.
    pub rid: Arc<str>,
    /// Its session.
    pub session: Arc<str>,
    /// Why it ended.
    pub reason: FinishReason,
    /// Prompt in tokens.
    pub prompt_tokens: u64,
    /// Written tokens.
    pub completion_tokens: u64,
    /// Prompt tokens that were found in the cache when it was first admitted.
    pub cached_tokens: u64,
    /// Time from arrival to the end.
    pub took: Span,
    /// Time from arrival until it first ran.
    pub queued: Span,
    /// How often it was retracted.
    pub retractions: u32,
}

/// A request that the engine cannot serve at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooLong {
    /// Prompt and completion of the request in tokens.
    pub tokens: u64,
    /// What the pool holds in tokens.
    pub pool_tokens: u64,
}

/// The gauges of one engine at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Gauges {
    /// The pool in tokens.
    pub capacity: u64,
    /// Locked by running work, in tokens.
    pub used: u64,
    /// Cached and free to evict, in tokens.
    pub evictable: u64,
    /// Free, in tokens.
    pub available: u64,
    /// Requests running.
    pub running: u64,
    /// Requests queued inside the engine.
    pub queued: u64,
    /// Prompt tokens of the queued requests.
    pub queued_tokens: u64,
}

impl Gauges {
    /// `token_usage`: used / capacity.
    #[must_use]
    pub fn usage(&self) -> Ppm {
        let millionths = u128::from(self.used) * 1_000_000;
        let share = millionths
            .checked_div(u128::from(self.capacity))
            .unwrap_or(0);
        Ppm::clamped(u32::try_from(share).unwrap_or(u32::MAX))
    }
}

/// Counters since the engine started.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Prompt tokens of finished requests.
    pub prompt_tokens: u64,
    /// Written tokens of finished requests.
    pub generation_tokens: u64,
    /// Finished requests.
    pub requests: u64,
    /// Prompt tokens of finished requests that came from the cache.
    pub cached_tokens: u64,
    /// Aborted requests.
    pub aborted: u64,
    /// Tokens freed by eviction.
    pub evicted_tokens: u64,
    /// Retractions.
    pub retracted: u64,
    /// Prompt tokens computed so far, recomputation included.
    pub prefill_compute: u64,
    /// Prompt tokens taken from the cache so far.
    pub prefill_cache: u64,
    /// Tokens decoded so far.
    pub decoded: u64,
}

/// A shared prefix in the cache.
#[derive(Clone, Debug)]
struct PrefixNode {
    tokens: u64,
    /// Running requests that need it.
    locks: u32,
    last_use: u64,
    /// Sessions that hold it.
    tags: BTreeSet<Arc<str>>,
}

/// A session's chain: its KV below one shared prefix, or below the root.
#[derive(Clone, Debug, Default)]
struct Chain {
    tokens: u64,
    /// Length that a running request reuses, and how many requests reuse that much.
    locks: BTreeMap<u64, u32>,
    last_use: u64,
    /// Its session holds it.
    tagged: bool,
}

impl Chain {
    fn locked(&self) -> u64 {
        self.locks.last_key_value().map_or(0, |(len, _)| *len)
    }

    fn evictable(&self) -> u64 {
        self.tokens - self.locked()
    }

    fn lock(&mut self, len: u64) {
        *self.locks.entry(len).or_insert(0) += 1;
    }

    fn unlock(&mut self, len: u64) {
        if let Some(count) = self.locks.get_mut(&len) {
            *count -= 1;
            if *count == 0 {
                self.locks.remove(&len);
            }
        }
    }
}

/// A shared prefix: its name and its length, since another length is another prefix.
type PrefixKey = (Arc<str>, u64);
/// Session, then shared prefix: all chains of a session stand side by side.
type ChainKey = (Arc<str>, Option<PrefixKey>);

#[derive(Clone, Debug)]
struct Queued {
    request: Request,
    arrived_ms: u64,
    /// Written before a retraction; computed again with the prompt.
    decoded: u64,
    retractions: u32,
    first_run: Option<FirstRun>,
    /// Closes that the engine had seen when the request arrived.
    closes_before: u64,
}

#[derive(Clone, Copy, Debug)]
struct FirstRun {
    at_ms: u64,
    cached: u64,
}

#[derive(Clone, Debug)]
struct Running {
    from: Queued,
    first_run: FirstRun,
    /// Private tokens reused from the chain.
    hit: u64,
    /// Private tokens this request allocated itself: the rest of the prompt and what it wrote.
    own: u64,
    /// Tokens still to be computed before it decodes.
    to_prefill: u64,
    decoded: u64,
    /// Part of a token that the last slice left over, in thousandths.
    decode_rest: u64,
    aborting: bool,
}

impl Running {
    fn key(&self) -> ChainKey {
        chain_key(&self.from.request)
    }

    fn decode_goal(&self) -> u64 {
        let request = &self.from.request;
        request.decode_tokens.min(request.max_new_tokens)
    }
}

fn chain_key(request: &Request) -> ChainKey {
    (
        // Without a session a request has a chain of its own, which nobody finds again.
        if request.session.is_empty() {
            request.rid.clone()
        } else {
            request.session.clone()
        },
        request
            .prefix
            .as_ref()
            .map(|prefix| (prefix.id.clone(), shared_tokens(request))),
    )
}

fn shared_tokens(request: &Request) -> u64 {
    request
        .prefix
        .as_ref()
        .map_or(0, |prefix| prefix.tokens.min(request.prompt_tokens))
}

/// The engine. Time moves with [`Engine::step`] only.
#[derive(Clone, Debug)]
pub struct Engine {
    spec: EngineSpec,
    now_ms: u64,
    /// Counts uses of the cache, to order them.
    uses: u64,
    available: u64,
    prefixes: BTreeMap<PrefixKey, PrefixNode>,
    chains: BTreeMap<ChainKey, Chain>,
    /// In the order of admission.
    running: Vec<Running>,
    queue: VecDeque<Queued>,
    finished: Vec<Finished>,
    prefill_rest: u64,
    counters: Counters,
    /// Closes so far.
    closes: u64,
    /// Which close was the last of a session, and the sessions in that order.
    closed: BTreeMap<Arc<str>, u64>,
    tombstones: BTreeMap<u64, Arc<str>>,
}

impl Engine {
    /// An empty engine.
    #[must_use]
    pub fn new(spec: EngineSpec) -> Self {
        Self {
            spec,
            now_ms: 0,
            uses: 0,
            available: spec.pool_tokens,
            prefixes: BTreeMap::new(),
            chains: BTreeMap::new(),
            running: Vec::new(),
            queue: VecDeque::new(),
            finished: Vec::new(),
            prefill_rest: 0,
            counters: Counters::default(),
            closes: 0,
            closed: BTreeMap::new(),
            tombstones: BTreeMap::new(),
        }
    }

    /// What it is made of.
    #[must_use]
    pub const fn spec(&self) -> &EngineSpec {
        &self.spec
    }

    /// Counters since the start.
    #[must_use]
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// The gauges now.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        Gauges {
            capacity: self.spec.pool_tokens,
            used: self.used(),
            evictable: self.evictable(),
            available: self.available,
            running: count(self.running.len()),
            queued: count(self.queue.len()),
            queued_tokens: self
                .queue
                .iter()
                .map(|queued| queued.request.prompt_tokens)
                .sum(),
        }
    }

    /// KV of `session` that lies in the cache, in tokens, its shared prefix left out.
    #[must_use]
    pub fn cached(&self, session: &str) -> u64 {
        self.chains_of(session)
            .filter_map(|key| self.chains.get(&key))
            .map(|chain| chain.tokens)
            .sum()
    }

    /// The part of that KV which the session holds: a close frees it or lets go of it.
    #[must_use]
    pub fn held(&self, session: &str) -> u64 {
        self.chains_of(session)
            .filter_map(|key| self.chains.get(&key))
            .filter(|chain| chain.tagged)
            .map(|chain| chain.tokens)
            .sum()
    }

    /// Takes a request into the engine's own queue.
    ///
    /// # Errors
    /// The request alone is larger than the pool.
    pub fn submit(&mut self, request: Request) -> Result<(), TooLong> {
        let tokens = request
            .prompt_tokens
            .saturating_add(request.decode_tokens.min(request.max_new_tokens));
        if tokens > self.spec.pool_tokens {
            return Err(TooLong {
                tokens,
                pool_tokens: self.spec.pool_tokens,
            });
        }
        self.queue.push_back(Queued {
            request,
            arrived_ms: self.now_ms,
            decoded: 0,
            retractions: 0,
            first_run: None,
            closes_before: self.closes,
        });
        Ok(())
    }

    /// Aborts every request whose id begins with `rid_prefix`: a queued one at once, a running one
    /// with the next slice. Says how many. What was computed stays in the cache.
    pub fn abort(&mut self, rid_prefix: &str) -> usize {
        let mut aborted = 0;
        let mut kept = VecDeque::with_capacity(self.queue.len());
        while let Some(queued) = self.queue.pop_front() {
            if queued.request.rid.starts_with(rid_prefix) {
                aborted += 1;
                self.report(queued, FinishReason::Abort, None);
            } else {
                kept.push_back(queued);
            }
        }
        self.queue = kept;
        for running in &mut self.running {
            if running.from.request.rid.starts_with(rid_prefix) {
                running.aborting = true;
                aborted += 1;
            }
        }
        aborted
    }

    /// Closes a session, with the meaning of the engine's [`Family`]. Says how many tokens became
    /// available. KV that a running request locks stays, and is not held by the session afterwards.
    pub fn close_session(&mut self, session: &str) -> u64 {
        let name: Arc<str> = Arc::from(session);
        self.entomb(&name);
        let before = self.available;
        let keys: Vec<ChainKey> = self.chains_of(session).collect();
        for key in keys {
            let frees = self.spec.family == Family::Frees;
            let Some(chain) = self.chains.get_mut(&key) else {
                continue;
            };
            let was_tagged = std::mem::take(&mut chain.tagged);
            if frees && was_tagged {
                let freed = chain.evictable();
                chain.tokens -= freed;
                self.available += freed;
            }
            if chain.tokens == 0 && chain.locks.is_empty() {
                self.chains.remove(&key);
            }
        }
        let held: Vec<PrefixKey> = self
            .prefixes
            .iter_mut()
            .filter_map(|(key, node)| node.tags.remove(&name).then(|| key.clone()))
            .collect();
        for key in held {
            let goes = self.spec.family == Family::Frees
                && !self.has_children(&key)
                && self
                    .prefixes
                    .get(&key)
                    .is_some_and(|node| node.locks == 0 && node.tags.is_empty());
            if goes && let Some(node) = self.prefixes.remove(&key) {
                self.available += node.tokens;
            }
        }
        self.available - before
    }

    /// Remembers that a session was closed, and forgets the oldest one too many.
    fn entomb(&mut self, session: &Arc<str>) {
        self.closes += 1;
        if let Some(before) = self.closed.insert(session.clone(), self.closes) {
            self.tombstones.remove(&before);
        }
        self.tombstones.insert(self.closes, session.clone());
        if self.tombstones.len() > TOMBSTONES_MAX
            && let Some((_, oldest)) = self.tombstones.pop_first()
        {
            self.closed.remove(&oldest);
        }
    }

    /// Whether the KV of a request that ends now is held by its session.
    fn tags(&self, of: &Queued) -> bool {
        if of.request.session.is_empty() {
            return false;
        }
        match (self.spec.family, self.closed.get(&of.request.session)) {
            (_, None) => true,
            (Family::Frees, Some(_)) => false,
            (Family::LetsGo, Some(closed)) => *closed <= of.closes_before,
        }
    }

    /// Moves time on by `span` and returns what ended, in order.
    pub fn step(&mut self, span: Span) -> Vec<Finished> {
        let mut left = span.millis();
        while left > 0 {
            let slice = left.min(SLICE_MS);
            left -= slice;
            self.now_ms += slice;
            self.admit();
            self.prefill(slice);
            self.decode(slice);
            self.settle();
        }
        std::mem::take(&mut self.finished)
    }

    /// Checks that no token is lost or counted twice.
    ///
    /// # Errors
    /// The sums that do not agree.
    pub fn check(&self) -> Result<(), String> {
        let gauges = self.gauges();
        let sum = gauges.available + gauges.evictable + gauges.used;
        if sum != gauges.capacity {
            return Err(format!(
                "tokens do not add up: {gauges:?} gives {sum} of {}",
                gauges.capacity
            ));
        }
        for (key, chain) in &self.chains {
            if chain.locked() > chain.tokens {
                return Err(format!("chain {key:?} locks more than it has: {chain:?}"));
            }
        }
        let locks: u32 = self.prefixes.values().map(|node| node.locks).sum();
        let users = self
            .running
            .iter()
            .filter(|running| running.from.request.prefix.is_some())
            .count();
        if count(users) != u64::from(locks) {
            return Err(format!("{users} requests hold {locks} prefix locks"));
        }
        Ok(())
    }

    fn used(&self) -> u64 {
        let prefixes: u64 = self
            .prefixes
            .values()
            .filter(|node| node.locks > 0)
            .map(|node| node.tokens)
            .sum();
        let chains: u64 = self.chains.values().map(Chain::locked).sum();
        let own: u64 = self.running.iter().map(|running| running.own).sum();
        prefixes + chains + own
    }

    fn evictable(&self) -> u64 {
        let prefixes: u64 = self
            .prefixes
            .values()
            .filter(|node| node.locks == 0)
            .map(|node| node.tokens)
            .sum();
        let chains: u64 = self.chains.values().map(Chain::evictable).sum();
        prefixes + chains
    }

    fn chains_of(&self, session: &str) -> impl Iterator<Item = ChainKey> {
        let session: Arc<str> = Arc::from(session);
        self.chains
            .range((session.clone(), None)..)
            .map(|(key, _)| key.clone())
            .take_while(move |key| key.0 == session)
    }

    fn has_children(&self, prefix: &PrefixKey) -> bool {
        self.chains
            .iter()
            .any(|(key, chain)| key.1.as_ref() == Some(prefix) && chain.tokens > 0)
    }

    /// Lets queued requests run, the oldest first, while there is room.
    fn admit(&mut self) {
        while self.running.len() < self.spec.running_max {
            let Some(queued) = self.queue.front() else {
                return;
            };
            let request = &queued.request;
            let shared = shared_tokens(request);
            let private = request.prompt_tokens - shared + queued.decoded;
            let key = chain_key(request);
            let node = key.1.as_ref().and_then(|prefix| self.prefixes.get(prefix));
            let shared_cached = node.map_or(0, |node| node.tokens.min(shared));
            let node_unlocked =
                node.map_or(0, |node| if node.locks == 0 { node.tokens } else { 0 });
            let chain = self.chains.get(&key);
            // Without the whole shared prefix the chain below it is not found.
            let hit = if shared_cached == shared {
                chain.map_or(0, |chain| chain.tokens.min(private))
            } else {
                0
            };
            let chain_unlocked = hit.saturating_sub(chain.map_or(0, Chain::locked));
            let need = (shared - shared_cached) + (private - hit);
            let room = self.available + self.evictable() - node_unlocked - chain_unlocked;
            let promised: u64 = self
                .running
                .iter()
                .map(|running| {
                    let left = running
                        .from
                        .request
                        .max_new_tokens
                        .saturating_sub(running.decoded);
                    left * NEW_TOKEN_PERCENT / 100
                })
                .sum();
            let hold =
                request.max_new_tokens.saturating_sub(queued.decoded) * NEW_TOKEN_PERCENT / 100;
            if !self.running.is_empty() && need + promised + hold > room {
                return;
            }
            if need > room {
                return;
            }
            let Some(queued) = self.queue.pop_front() else {
                return;
            };
            self.start(queued, shared, shared_cached, private, hit);
        }
    }

    fn start(&mut self, queued: Queued, shared: u64, shared_cached: u64, private: u64, hit: u64) {
        let key = chain_key(&queued.request);
        self.uses += 1;
        let uses = self.uses;
        if let Some(prefix) = &key.1 {
            let node = self.prefixes.entry(prefix.clone()).or_insert(PrefixNode {
                tokens: 0,
                locks: 0,
                last_use: uses,
                tags: BTreeSet::new(),
            });
            node.locks += 1;
            node.last_use = uses;
        }
        let chain = self.chains.entry(key.clone()).or_default();
        chain.lock(hit);
        chain.last_use = uses;
        let computed = (shared - shared_cached) + (private - hit);
        self.take(computed);
        if let Some(node) = key.1.as_ref().and_then(|id| self.prefixes.get_mut(id)) {
            node.tokens += shared - shared_cached;
        }
        let cached = shared_cached + hit;
        self.counters.prefill_cache += cached;
        let first_run = queued.first_run.unwrap_or(FirstRun {
            at_ms: self.now_ms,
            cached: cached.min(queued.request.prompt_tokens),
        });
        let decoded = queued.decoded;
        self.running.push(Running {
            from: queued,
            first_run,
            hit,
            own: private - hit,
            to_prefill: computed,
            decoded,
            decode_rest: 0,
            aborting: false,
        });
    }

    fn prefill(&mut self, slice_ms: u64) {
        let budget = self.spec.prefill_tokens_per_s * slice_ms + self.prefill_rest;
        let mut tokens = budget / 1_000;
        self.prefill_rest = budget % 1_000;
        for running in &mut self.running {
            let done = running.to_prefill.min(tokens);
            running.to_prefill -= done;
            tokens -= done;
            self.counters.prefill_compute += done;
        }
    }

    fn decode(&mut self, slice_ms: u64) {
        let grants = loop {
            let grants = self.decode_grants(slice_ms);
            let need: u64 = grants.iter().map(|(tokens, _)| tokens).sum();
            if need <= self.available + self.evictable() || self.running.len() <= 1 {
                self.take(need);
                break grants;
            }
            self.retract_newest();
        };
        for (running, (tokens, rest)) in self.running.iter_mut().zip(grants) {
            running.own += tokens;
            running.decoded += tokens;
            running.decode_rest = rest;
            self.counters.decoded += tokens;
        }
    }

    /// Tokens that each running request writes in a slice, and the rest in thousandths.
    fn decode_grants(&self, slice_ms: u64) -> Vec<(u64, u64)> {
        let decoding = self
            .running
            .iter()
            .filter(|running| running.to_prefill == 0)
            .count();
        let rate = self
            .spec
            .decode_tokens_per_s_max
            .checked_div(count(decoding))
            .unwrap_or(0)
            .min(self.spec.decode_tokens_per_s);
        self.running
            .iter()
            .map(|running| {
                if running.to_prefill > 0 || running.aborting {
                    return (0, running.decode_rest);
                }
                let thousandths = rate * slice_ms + running.decode_rest;
                let left = running.decode_goal().saturating_sub(running.decoded);
                ((thousandths / 1_000).min(left), thousandths % 1_000)
            })
            .collect()
    }

    /// Puts the newest running request back to the head of the queue; its own KV is lost.
    fn retract_newest(&mut self) {
        let Some(running) = self.running.pop() else {
            return;
        };
        self.unlock(&running);
        self.available += running.own;
        self.counters.retracted += 1;
        let mut queued = running.from;
        queued.decoded = running.decoded;
        queued.retractions += 1;
        queued.first_run = Some(running.first_run);
        self.queue.push_front(queued);
    }

    /// Ends what has written all it will write, and what was aborted.
    fn settle(&mut self) {
        let mut still = Vec::with_capacity(self.running.len());
        for running in std::mem::take(&mut self.running) {
            let done = running.to_prefill == 0 && running.decoded >= running.decode_goal();
            if done || running.aborting {
                self.end(running);
            } else {
                still.push(running);
            }
        }
        self.running = still;
    }

    fn end(&mut self, running: Running) {
        self.unlock(&running);
        // Of an aborted prompt only what was computed is kept.
        let lost = running.to_prefill.min(running.own);
        let kept = running.own - lost;
        self.uses += 1;
        let uses = self.uses;
        let tagged = self.tags(&running.from);
        let chain = self.chains.entry(running.key()).or_default();
        chain.tagged |= tagged;
        // Another request of the session may have grown the chain meanwhile: the same KV is kept once.
        let before = chain.tokens;
        chain.tokens = before.max(running.hit + kept);
        chain.last_use = uses;
        let grown = chain.tokens - before;
        self.available += running.own - grown;
        if let Some(node) = running.key().1.and_then(|id| self.prefixes.get_mut(&id)) {
            node.last_use = uses;
            if tagged {
                node.tags.insert(running.from.request.session.clone());
            }
        }
        if self
            .chains
            .get(&running.key())
            .is_some_and(|chain| chain.tokens == 0 && chain.locks.is_empty())
        {
            self.chains.remove(&running.key());
        }
        let request = &running.from.request;
        let reason = if running.aborting {
            FinishReason::Abort
        } else if request.decode_tokens < request.max_new_tokens {
            FinishReason::Stop
        } else {
            FinishReason::Length
        };
        let mut from = running.from;
        from.decoded = running.decoded;
        self.report(from, reason, Some(running.first_run));
    }

    fn unlock(&mut self, running: &Running) {
        let key = running.key();
        if let Some(chain) = self.chains.get_mut(&key) {
            chain.unlock(running.hit);
            if chain.tokens == 0 && chain.locks.is_empty() {
                self.chains.remove(&key);
            }
        }
        if let Some(node) = key.1.and_then(|id| self.prefixes.get_mut(&id)) {
            node.locks = node.locks.saturating_sub(1);
        }
    }

    fn report(&mut self, from: Queued, reason: FinishReason, first_run: Option<FirstRun>) {
        let first_run = first_run.or(from.first_run);
        let cached = first_run.map_or(0, |first| first.cached);
        if reason == FinishReason::Abort {
            self.counters.aborted += 1;
        } else {
            self.counters.requests += 1;
            self.counters.prompt_tokens += from.request.prompt_tokens;
            self.counters.generation_tokens += from.decoded;
            self.counters.cached_tokens += cached;
        }
        let ran_at = first_run.map_or(self.now_ms, |first| first.at_ms);
        self.finished.push(Finished {
            rid: from.request.rid,
            session: from.request.session,
            reason,
            prompt_tokens: from.request.prompt_tokens,
            completion_tokens: from.decoded,
            cached_tokens: cached,
            took: Span::from_millis(self.now_ms.saturating_sub(from.arrived_ms)),
            queued: Span::from_millis(ran_at.saturating_sub(from.arrived_ms)),
            retractions: from.retractions,
        });
    }

    /// Takes free tokens, evicting the least recently used cache when there are too few; what no
    /// session holds goes first where a close lets go. The caller has checked that there is room.
    fn take(&mut self, tokens: u64) {
        while self.available < tokens {
            if !self.evict_one(tokens - self.available) {
                break;
            }
        }
        self.available = self.available.saturating_sub(tokens);
    }

    fn evict_one(&mut self, wanted: u64) -> bool {
        let lets_go = self.spec.family == Family::LetsGo;
        let chain = self
            .chains
            .iter()
            .filter(|(_, chain)| chain.evictable() > 0)
            .map(|(key, chain)| ((lets_go && chain.tagged, chain.last_use), key))
            .min_by_key(|(order, _)| *order)
            .map(|(order, key)| (order, key.clone()));
        let prefix = self
            .prefixes
            .iter()
            .filter(|(id, node)| node.locks == 0 && node.tokens > 0 && !self.has_children(id))
            .map(|(id, node)| ((lets_go && !node.tags.is_empty(), node.last_use), id))
            .min_by_key(|(order, _)| *order)
            .map(|(order, id)| (order, id.clone()));
        let freed = match (chain, prefix) {
            (Some((chain_order, _)), Some((prefix_order, id))) if prefix_order < chain_order => {
                self.prefixes.remove(&id).map_or(0, |node| node.tokens)
            }
            (None, Some((_, id))) => self.prefixes.remove(&id).map_or(0, |node| node.tokens),
            (Some((_, key)), _) => self.cut_tail(&key, wanted),
            (None, None) => 0,
        };
        self.available += freed;
        self.counters.evicted_tokens += freed;
        freed > 0
    }

    fn cut_tail(&mut self, key: &ChainKey, wanted: u64) -> u64 {
        let Some(chain) = self.chains.get_mut(key) else {
            return 0;
        };
        let cut = chain.evictable().min(wanted);
        chain.tokens -= cut;
        if chain.tokens == 0 && chain.locks.is_empty() {
            self.chains.remove(key);
        }
        cut
    }
}

fn count(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(pool_tokens: u64) -> Engine {
        Engine::new(EngineSpec {
            pool_tokens,
            decode_tokens_per_s: 100,
            decode_tokens_per_s_max: 100_000,
            prefill_tokens_per_s: 100_000,
            running_max: 64,
            family: Family::Frees,
        })
    }

    fn later_engine(pool_tokens: u64) -> Engine {
        let spec = EngineSpec {
            family: Family::LetsGo,
            ..*engine(pool_tokens).spec()
        };
        Engine::new(spec)
    }

    fn request(rid: &str, session: &str, prompt: u64, decode: u64) -> Request {
        Request {
            rid: rid.into(),
            session: session.into(),
            prefix: None,
            prompt_tokens: prompt,
            max_new_tokens: 1_000,
            decode_tokens: decode,
        }
    }

    fn shared(mut request: Request, id: &str, tokens: u64) -> Request {
        request.prefix = Some(SharedPrefix {
            id: id.into(),
            tokens,
        });
        request
    }

    /// Runs until everything ended, checking the sums after each slice.
    fn run(engine: &mut Engine) -> Vec<Finished> {
        let mut finished = Vec::new();
        for _ in 0..100_000 {
            finished.extend(engine.step(Span::from_millis(SLICE_MS)));
            engine.check().unwrap();
            let gauges = engine.gauges();
            if gauges.running == 0 && gauges.queued == 0 {
                return finished;
            }
        }
        panic!("the engine never drained: {:?}", engine.gauges());
    }

    #[test]
    fn running_work_is_used_and_idle_sessions_are_evictable() {
        let mut engine = engine(10_000);
        engine.submit(request("r1", "s1", 3_000, 500)).unwrap();
        engine.step(Span::from_secs(1));
        engine.check().unwrap();
        let busy = engine.gauges();
        assert_eq!(busy.running, 1);
        assert!(busy.used > 3_000 && busy.used < 3_500, "{busy:?}");
        assert_eq!(busy.evictable, 0);
        assert!(busy.usage() > Ppm::clamped(300_000));

        let finished = run(&mut engine);
        assert_eq!(finished.len(), 1);
        assert_eq!(finished[0].completion_tokens, 500);
        assert_eq!(finished[0].reason, FinishReason::Stop);
        let idle = engine.gauges();
        assert_eq!(idle.used, 0);
        assert_eq!(idle.usage(), Ppm::clamped(0), "idle KV is not in the usage");
        assert_eq!(idle.evictable, 3_500);
        assert_eq!(idle.available, 6_500);
    }

    #[test]
    fn the_next_turn_finds_its_prefix_and_an_evicted_one_is_computed_again() {
        let mut engine = engine(10_000);
        engine.submit(request("r1", "s1", 3_000, 500)).unwrap();
        run(&mut engine);
        engine.submit(request("r2", "s1", 4_000, 100)).unwrap();
        let second = run(&mut engine);
        assert_eq!(second[0].cached_tokens, 3_500);
        assert_eq!(engine.counters().prefill_compute, 3_000 + 500);

        engine.submit(request("r3", "s2", 9_000, 500)).unwrap();
        run(&mut engine);
        assert!(engine.counters().evicted_tokens > 0);
        engine.submit(request("r4", "s1", 4_200, 100)).unwrap();
        let fourth = run(&mut engine);
        assert!(
            fourth[0].cached_tokens < 1_000,
            "most of the chain was evicted: {:?}",
            fourth[0]
        );
    }

    #[test]
    fn eviction_takes_the_least_recently_used_session_first() {
        let mut engine = engine(10_000);
        for session in ["s1", "s2", "s3"] {
            engine
                .submit(request(session, session, 2_900, 100))
                .unwrap();
            run(&mut engine);
        }
        engine.submit(request("again", "s1", 3_100, 0)).unwrap();
        run(&mut engine);
        engine.submit(request("big", "s4", 3_000, 100)).unwrap();
        run(&mut engine);
        assert_eq!(engine.cached("s1"), 3_100);
        assert!(engine.cached("s2") < 3_000, "s2 was used longest ago");
        assert_eq!(engine.cached("s3"), 3_000);
    }

    #[test]
    fn a_shared_prefix_is_kept_once_and_goes_with_its_last_session() {
        let mut engine = engine(10_000);
        for session in ["s1", "s2"] {
            let turn = shared(request(session, session, 2_000, 100), "tools", 1_000);
            engine.submit(turn).unwrap();
        }
        let finished = run(&mut engine);
        assert_eq!(finished.len(), 2);
        assert_eq!(engine.gauges().evictable, 1_000 + 2 * 1_100);
        assert_eq!(engine.close_session("s1"), 1_100);
        engine.check().unwrap();
        assert_eq!(
            engine.close_session("s1"),
            0,
            "a second close finds nothing"
        );
        assert_eq!(engine.close_session("s2"), 2_100, "the prefix went too");
        engine.check().unwrap();
        assert_eq!(engine.gauges().available, 10_000);
        assert_eq!(engine.close_session("nobody"), 0);
    }

    /// Serves one turn of a session, and checks the sums.
    fn serve(engine: &mut Engine, session: &str, prompt: u64, decode: u64) -> Finished {
        engine
            .submit(request("turn", session, prompt, decode))
            .unwrap();
        run(engine).pop().unwrap()
    }

    #[test]
    fn close_frees_nothing_that_runs_and_spoils_the_id() {
        let mut engine = engine(10_000);
        let turn = shared(request("r1", "s1", 4_000, 500), "tools", 1_000);
        engine.submit(turn).unwrap();
        engine.step(Span::from_secs(1));
        assert_eq!(engine.close_session("s1"), 0);
        engine.check().unwrap();
        run(&mut engine);
        assert_eq!(engine.gauges().evictable, 4_500);
        assert_eq!(engine.held("s1"), 0, "not tagged any more");
        assert_eq!(engine.close_session("s1"), 0, "the second close finds none");
        let turn = shared(request("r2", "s1", 5_000, 100), "tools", 1_000);
        engine.submit(turn).unwrap();
        run(&mut engine);
        assert_eq!(
            engine.close_session("s1"),
            0,
            "an id that was closed is spoilt"
        );
        assert_eq!(engine.gauges().evictable, 5_100);
    }

    /// The trace of the real cache of SGLang 0.5.15.post1, line by line: whatever it does here must
    /// give the gauges that stand there.
    #[test]
    fn the_recorded_trace_of_a_close_is_replayed() {
        let trace = include_str!("../tests/fixtures/session-close-trace-0.5.15.post1.txt");
        let mut model = engine(10_000);
        let mut compared = 0;
        let mut freed = 0;
        for line in trace.lines() {
            let turn = |session: &str, prompt, decode| {
                shared(request("turn", session, prompt, decode), "tools", 1_000)
            };
            let serve = |model: &mut Engine, turn: Request| {
                model.submit(turn).unwrap();
                run(model);
            };
            let does = |begin: &str| line.starts_with(begin);
            if does("A (3500 tok)") {
                serve(&mut model, turn("A", 3_000, 500));
                serve(&mut model, turn("B", 1_900, 100));
            } else if does("close(A)") {
                freed = model.close_session("A");
            } else if does("close(unknown)") {
                freed = model.close_session("unknown");
            } else if does("id A reused") {
                serve(&mut model, turn("A", 1_900, 100));
            } else if does("close(B)") {
                freed = model.close_session("B");
            } else if does("C running") {
                model = engine(10_000);
                model.submit(request("c", "C", 4_000, 500)).unwrap();
                model.step(Span::from_millis(50));
                model.check().unwrap();
                assert_eq!(model.gauges().running, 1);
            } else if does("close(C)") || does("second close(C)") {
                freed = model.close_session("C");
            } else if does("C finished") {
                run(&mut model);
            } else if does("after 8192 other closes") {
                for other in 0..TOMBSTONES_MAX {
                    model.close_session(&format!("other-{other}"));
                }
                serve(&mut model, request("c2", "C", 4_500, 0));
                freed = model.close_session("C");
            }
            if let Some((_, nodes)) = line.split_once("freed") {
                let nodes: u64 = nodes.rsplit(' ').next().unwrap().parse().unwrap();
                assert_eq!(freed > 0, nodes > 0, "{line}");
            }
            let Some((_, gauges)) = line.split_once("available=") else {
                continue;
            };
            let numbers: Vec<u64> = gauges
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|number| number.parse().ok())
                .collect();
            let own = model.gauges();
            // A running request writes while time moves: its first slice stands for the moment.
            let written = if own.running > 0 { own.used - 4_000 } else { 0 };
            assert!(written < 10, "{own:?}");
            assert_eq!(
                numbers,
                [own.available + written, own.evictable, own.used - written],
                "{line}"
            );
            compared += 1;
        }
        assert_eq!(compared, 11, "every line with gauges");
    }

    /// What the real engines answered and showed (`calls.json`, `summary.json` of the captures):
    /// two sessions with 300 + 8 tokens, close of the first, both prompts again.
    #[test]
    fn the_real_engines_of_both_families_are_matched() {
        // Family, evictable tokens before and after the close as shown, tokens found by A and by B.
        let captures = [
            (Family::Frees, 640, 333, 0, 299),
            (Family::LetsGo, 640, 640, 299, 299),
        ];
        for (family, before, after, found_a, found_b) in captures {
            let mut engine = Engine::new(EngineSpec {
                family,
                ..*engine(8_192).spec()
            });
            serve(&mut engine, "sess-A", 300, 8);
            serve(&mut engine, "sess-B", 300, 8);
            let shown = engine.gauges().evictable;
            let freed = engine.close_session("sess-A");
            assert_eq!(engine.close_session("sess-A"), 0, "again");
            assert_eq!(engine.close_session("never-seen"), 0);
            assert_eq!(engine.gauges().evictable, shown - freed);
            // The real cache keeps no KV of the last token, and recomputes the last of a prompt.
            assert_eq!(freed.saturating_sub(1), before - after, "{family:?}");
            let a = serve(&mut engine, "sess-A", 300, 1).cached_tokens;
            let b = serve(&mut engine, "sess-B", 300, 1).cached_tokens;
            assert_eq!(
                (a.saturating_sub(1), b.saturating_sub(1)),
                (found_a, found_b),
                "{family:?}"
            );
            // The second life of A: spoilt in the one, let go once more in the other.
            assert_eq!(engine.held("sess-A") > 0, family == Family::LetsGo);
            assert_eq!(engine.close_session("sess-A"), 0);
            // A close while it decodes frees nothing, and the KV is found afterwards.
            engine.submit(request("c", "sess-C", 300, 400)).unwrap();
            engine.step(Span::from_secs(1));
            assert_eq!(engine.close_session("sess-C"), 0);
            run(&mut engine);
            assert_eq!(engine.held("sess-C"), 0, "{family:?}");
            assert_eq!(serve(&mut engine, "sess-C", 300, 1).cached_tokens, 300);
        }
    }

    #[test]
    fn a_later_engine_lets_go_and_evicts_that_first() {
        let mut engine = later_engine(10_000);
        for session in ["s1", "s2", "s3"] {
            serve(&mut engine, session, 2_900, 100);
        }
        let before = engine.gauges();
        assert_eq!(engine.close_session("s3"), 0);
        assert_eq!(engine.gauges(), before, "no gauge moves by a close");
        assert_eq!((engine.held("s3"), engine.cached("s3")), (0, 3_000));
        serve(&mut engine, "s4", 2_900, 100);
        assert_eq!(
            engine.cached("s3"),
            1_000,
            "the newest, but nobody holds it"
        );
        assert_eq!((engine.cached("s1"), engine.cached("s2")), (3_000, 3_000));
        serve(&mut engine, "s5", 1_900, 100);
        assert_eq!(engine.cached("s3"), 0);
        assert_eq!(engine.cached("s1"), 2_000, "then the one used longest ago");
    }

    #[test]
    fn a_later_engine_opens_an_id_again_by_a_request_that_comes_after_the_close() {
        let mut engine = later_engine(10_000);
        engine.submit(request("r1", "s1", 2_000, 500)).unwrap();
        engine.step(Span::from_secs(1));
        engine.close_session("s1");
        run(&mut engine);
        assert_eq!(engine.held("s1"), 0, "it arrived before the close");
        serve(&mut engine, "s1", 2_600, 100);
        assert_eq!(engine.held("s1"), 2_700, "held until another close");
        engine.close_session("s1");
        assert_eq!((engine.held("s1"), engine.cached("s1")), (0, 2_700));
    }

    #[test]
    fn a_later_engine_keeps_a_shared_prefix_while_a_session_holds_it() {
        let mut engine = later_engine(5_000);
        for session in ["s1", "s2"] {
            let turn = shared(request(session, session, 1_900, 100), "tools", 1_000);
            engine.submit(turn).unwrap();
            run(&mut engine);
        }
        engine.close_session("s1");
        serve(&mut engine, "s3", 2_900, 100);
        assert_eq!((engine.cached("s1"), engine.cached("s2")), (0, 1_000));
        engine.close_session("s2");
        serve(&mut engine, "s4", 1_900, 100);
        assert_eq!(engine.cached("s2"), 0, "its chain and the prefix went");
        assert_eq!(engine.cached("s3"), 3_000);
        assert_eq!(engine.gauges().evictable, 5_000);
    }

    /// A request without a session is held by nobody.
    #[test]
    fn a_close_leaves_what_has_no_session() {
        let mut engine = engine(5_000);
        let turn = shared(request("r1", "", 1_900, 100), "tools", 1_000);
        engine.submit(turn).unwrap();
        run(&mut engine);
        let turn = shared(request("r2", "s1", 1_900, 100), "tools", 1_000);
        engine.submit(turn).unwrap();
        run(&mut engine);
        assert_eq!(engine.close_session(""), 0);
        assert_eq!(engine.close_session("r1"), 0);
        assert_eq!(engine.close_session("s1"), 1_000);
        assert_eq!(engine.gauges().evictable, 2_000);
    }

    #[test]
    fn abort_matches_by_prefix_and_keeps_what_was_computed() {
        let mut engine = engine(3_000);
        engine.submit(request("r1", "s1", 2_000, 900)).unwrap();
        engine.submit(request("r10", "s2", 2_000, 900)).unwrap();
        engine.submit(request("q1", "s3", 500, 100)).unwrap();
        engine.step(Span::from_secs(1));
        assert_eq!(engine.gauges().running, 1);
        assert_eq!(engine.abort("r1"), 2, "r1 and r10");
        let finished = run(&mut engine);
        let aborted: Vec<&str> = finished
            .iter()
            .filter(|one| one.reason == FinishReason::Abort)
            .map(|one| &*one.rid)
            .collect();
        assert_eq!(aborted, ["r10", "r1"], "the queued one ends at once");
        assert!(
            engine.cached("s1") >= 2_000 - 600,
            "{}",
            engine.cached("s1")
        );
        assert_eq!(engine.counters().aborted, 2);
        assert_eq!(engine.counters().requests, 1);
    }

    #[test]
    fn a_lost_bet_is_retracted_and_still_ends() {
        let mut engine = engine(2_000);
        for rid in ["r1", "r2"] {
            engine.submit(request(rid, rid, 500, 1_000)).unwrap();
        }
        let finished = run(&mut engine);
        assert_eq!(finished.len(), 2);
        assert!(engine.counters().retracted > 0);
        assert!(finished.iter().all(|one| one.completion_tokens == 1_000));
        assert!(
            finished
                .iter()
                .all(|one| one.reason == FinishReason::Length)
        );
        assert!(finished.iter().any(|one| one.retractions > 0));
    }

    #[test]
    fn branches_of_a_session_may_run_at_once() {
        let mut engine = engine(20_000);
        engine.submit(request("a", "s1", 2_000, 100)).unwrap();
        run(&mut engine);
        engine.submit(request("b", "s1", 3_000, 50)).unwrap();
        engine.submit(request("c", "s1", 2_500, 900)).unwrap();
        run(&mut engine);
        assert_eq!(engine.cached("s1"), 3_400, "the longest branch is kept");
    }

    #[test]
    fn a_request_above_the_pool_is_refused() {
        let mut engine = engine(2_000);
        assert_eq!(
            engine.submit(request("r", "s", 1_900, 200)),
            Err(TooLong {
                tokens: 2_100,
                pool_tokens: 2_000
            })
        );
    }
}
