//! What callers do, and how long each call takes them.
//!
//! Every connection is one caller that goes on from one exchange to the next. Their tasks are spread over
//! a few threads with a runtime each: nothing is stolen between those, and what is shared is locked once
//! or twice an exchange.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;

use super::LoadError;
use super::ask::{Acquires, Acts, Batches, Head, Ids, Shape};
use super::wire::{Answer, Connection, Target};

/// Shortest and longest time that is told apart, in nanoseconds.
const NANOS: (u64, u64) = (1_000, 600_000_000_000);
/// Digits of a latency that are kept.
const DIGITS: u8 = 3;
/// What is shown of an answer that nobody expected, in bytes.
const SHOWN_BYTES: usize = 300;

/// What callers do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scenario {
    /// Everything fits: acquire, release, and again.
    Open,
    /// The same while few leases fit: all others wait in the queue.
    Contended,
    /// Each caller renews the lease that it holds.
    Renewals,
    /// Acquire, release and close a session, and again with another session.
    Closes,
    /// Many acquires in one call, then all their releases in another.
    Batch,
    /// Acquire and release at a fixed rate, whatever the answers take.
    Arrivals,
}

impl Scenario {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Open,
        Self::Contended,
        Self::Renewals,
        Self::Closes,
        Self::Batch,
        Self::Arrivals,
    ];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Contended => "contended",
            Self::Renewals => "renewals",
            Self::Closes => "closes",
            Self::Batch => "batch",
            Self::Arrivals => "arrivals",
        }
    }
}

/// A service as callers see it.
#[derive(Clone, Debug)]
pub struct Service {
    /// Where it listens.
    pub target: Target,
    /// What stands above requests to it.
    pub head: Head,
}

/// One measurement.
#[derive(Clone, Debug)]
pub struct Cell {
    /// What callers do.
    pub scenario: Scenario,
    /// How many they are.
    pub connections: usize,
    /// For how long they begin anew.
    pub time: Duration,
    /// Tokens of an acquire.
    pub tokens: u64,
    /// How many acquires fit at a time, where few do.
    pub slots: usize,
    /// Acquires in one batch.
    pub batch: usize,
    /// Beginnings of pairs a second, where their rate is fixed.
    pub rate: f64,
    /// What acquires look like.
    pub shape: Shape,
    /// Threads that make the load.
    pub threads: usize,
}

/// A histogram of nanoseconds.
#[must_use]
pub fn histogram() -> Histogram<u64> {
    #[expect(clippy::expect_used, reason = "the bounds are constants, and fit")]
    Histogram::new_with_bounds(NANOS.0, NANOS.1, DIGITS).expect("bounds of a histogram")
}

/// What one measurement saw.
#[derive(Clone, Debug)]
pub struct Measured {
    /// From the start until the last caller ended what it had begun.
    pub time: Duration,
    /// Whole pairs, or renewals.
    pub pairs: u64,
    /// Operations that had to be made durable: acquires that were admitted, releases, renewals, closes.
    pub operations: u64,
    /// Acquires that were told to ask again.
    pub asked_again: u64,
    /// Acquires that were told to go on without a lease.
    pub bypassed: u64,
    /// Answers that nobody expected, and the first of them.
    pub refused: u64,
    /// The first of them.
    pub first_refusal: Option<String>,
    /// Pairs of a fixed rate that were not begun, since the time was over.
    pub not_begun: u64,
    /// Nanoseconds from an acquire, or from when it was due, to its decision; of a whole batch where
    /// acquires go in batches.
    pub acquire: Histogram<u64>,
    /// The same of releases.
    pub release: Histogram<u64>,
    /// The same of renewals or closes.
    pub act: Histogram<u64>,
    /// From the moment a release is sent until the waiter that gets its place has its grant.
    pub grant: Histogram<u64>,
    /// How late the beginnings of a fixed rate were: what the load itself adds to their latency.
    pub lag: Histogram<u64>,
}

impl Default for Measured {
    fn default() -> Self {
        Self {
            time: Duration::ZERO,
            pairs: 0,
            operations: 0,
            asked_again: 0,
            bypassed: 0,
            refused: 0,
            first_refusal: None,
            not_begun: 0,
            acquire: histogram(),
            release: histogram(),
            act: histogram(),
            grant: histogram(),
            lag: histogram(),
        }
    }
}

impl Measured {
    fn add(&mut self, other: &Self) {
        self.time = self.time.max(other.time);
        self.pairs += other.pairs;
        self.operations += other.operations;
        self.asked_again += other.asked_again;
        self.bypassed += other.bypassed;
        self.refused += other.refused;
        if self.first_refusal.is_none() {
            self.first_refusal.clone_from(&other.first_refusal);
        }
        self.not_begun += other.not_begun;
        for (all, own) in [
            (&mut self.acquire, &other.acquire),
            (&mut self.release, &other.release),
            (&mut self.act, &other.act),
            (&mut self.grant, &other.grant),
            (&mut self.lag, &other.lag),
        ] {
            // All have the same bounds, so that nothing is left out.
            let _ = all.add(own);
        }
    }
}

fn record(histogram: &mut Histogram<u64>, time: Duration) {
    histogram.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
}

/// How far a measurement has come; its threads follow.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Connect,
    Run(Instant),
}

/// Callers with open connections, before the clock starts.
pub struct Ready {
    phase: watch::Sender<Phase>,
    said: mpsc::UnboundedReceiver<Result<Option<Measured>, LoadError>>,
    threads: usize,
    shared: Arc<Shared>,
}

impl Ready {
    /// Opens all connections, and takes the leases that callers hold all the time.
    ///
    /// # Errors
    /// When the service does not take them all.
    pub async fn connect(service: &Service, cell: &Cell, ids: &Ids) -> Result<Self, LoadError> {
        let threads = cell.threads.clamp(1, cell.connections.max(1));
        let (phase, _) = watch::channel(Phase::Connect);
        let (say, said) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared::new(cell));
        for thread in 0..threads {
            let callers = Callers {
                service: service.clone(),
                cell: cell.clone(),
                ids: ids.clone(),
                shared: Arc::clone(&shared),
                count: (thread..cell.connections).step_by(threads).count(),
            };
            let (phase, say) = (phase.subscribe(), say.clone());
            thread::Builder::new()
                .name("load".to_owned())
                .spawn(move || callers.work(phase, &say))
                .map_err(|error| LoadError::io("a thread cannot be started", error))?;
        }
        let mut ready = Self {
            phase,
            said,
            threads,
            shared,
        };
        ready.all_say().await?;
        Ok(ready)
    }

    /// Starts the clock, and waits until every caller has ended. The connections stay open until this
    /// is dropped, so that what the service does with their ends is not measured.
    ///
    /// # Errors
    /// When a connection broke.
    pub async fn run(&mut self) -> Result<Measured, LoadError> {
        let began = Instant::now();
        lock(&self.shared.slots).extend((0..self.shared.cell.slots).map(|_| began));
        if self.shared.cell.scenario == Scenario::Arrivals {
            let shared = Arc::clone(&self.shared);
            thread::Builder::new()
                .name("arrivals".to_owned())
                .spawn(move || shared.arrivals.give_out(began, shared.cell.connections))
                .map_err(|error| LoadError::io("a thread cannot be started", error))?;
        }
        self.phase.send_replace(Phase::Run(began));
        let mut all = self.all_say().await?;
        all.not_begun = self.shared.arrivals.not_begun();
        Ok(all)
    }

    /// Gives back what callers held all the time, and ends the connections. What all of them counted.
    ///
    /// # Errors
    /// When a connection broke.
    pub async fn finish(mut self) -> Result<Counted, LoadError> {
        drop(self.phase);
        while let Some(said) = self.said.recv().await {
            said?;
        }
        Ok(Counted {
            granted: self.shared.granted.load(Ordering::Relaxed),
            released: self.shared.released.load(Ordering::Relaxed),
        })
    }

    /// Waits for a word of every thread.
    async fn all_say(&mut self) -> Result<Measured, LoadError> {
        let mut all = Measured::default();
        for _ in 0..self.threads {
            let said = self.said.recv().await;
            let said = said.unwrap_or_else(|| Err(LoadError::Ended))?;
            all.add(&said.unwrap_or_default());
        }
        Ok(all)
    }
}

/// Leases that callers got and gave back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counted {
    /// Got.
    pub granted: u64,
    /// Given back.
    pub released: u64,
}

/// What all callers of a measurement share.
struct Shared {
    cell: Cell,
    granted: AtomicU64,
    released: AtomicU64,
    /// Since when each place for a lease is free, the longest first: grants come in the order of the
    /// releases that make room for them.
    slots: Mutex<VecDeque<Instant>>,
    arrivals: Arrivals,
}

impl Shared {
    fn new(cell: &Cell) -> Self {
        let time = cell.time.as_secs_f64();
        Self {
            arrivals: Arrivals {
                due: Semaphore::new(0),
                next: AtomicU64::new(0),
                // Bounded by the flags of the command.
                total: match cell.scenario {
                    Scenario::Arrivals => (cell.rate * time).round() as u64,
                    _ => 0,
                },
                every: Duration::from_secs_f64(1.0 / cell.rate),
            },
            slots: Mutex::default(),
            granted: AtomicU64::new(0),
            released: AtomicU64::new(0),
            cell: cell.clone(),
        }
    }
}

/// Beginnings at a fixed rate. A thread of its own lets them go, since timers of the runtime are a
/// millisecond wide.
struct Arrivals {
    due: Semaphore,
    next: AtomicU64,
    total: u64,
    every: Duration,
}

impl Arrivals {
    fn give_out(&self, began: Instant, callers: usize) {
        let mut given = 0;
        while given < self.total {
            let due = began.elapsed().as_nanos() / self.every.as_nanos().max(1);
            let due = u64::try_from(due).unwrap_or(u64::MAX).saturating_add(1);
            let due = due.min(self.total);
            // Never more than all of them.
            self.due.add_permits((due - given) as usize);
            given = due;
            let next = began + self.after(given);
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
        // Each caller finds out that there are no more.
        self.due.add_permits(callers);
    }

    fn after(&self, number: u64) -> Duration {
        Duration::from_secs_f64(self.every.as_secs_f64() * number as f64)
    }

    /// When the next one should have begun, once that time has come.
    async fn next(&self, began: Instant) -> Option<Instant> {
        self.due.acquire().await.ok()?.forget();
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        (number < self.total).then(|| began + self.after(number))
    }

    fn not_begun(&self) -> u64 {
        let begun = self.next.load(Ordering::Relaxed);
        self.total.saturating_sub(begun)
    }
}

/// The callers of one thread.
struct Callers {
    service: Service,
    cell: Cell,
    ids: Ids,
    shared: Arc<Shared>,
    count: usize,
}

impl Callers {
    fn work(
        self,
        phase: watch::Receiver<Phase>,
        say: &mpsc::UnboundedSender<Result<Option<Measured>, LoadError>>,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let ended = match runtime {
            Ok(runtime) => runtime.block_on(self.all(phase, say)),
            Err(error) => Err(LoadError::io("the load cannot be set up", error)),
        };
        if let Err(error) = ended {
            // Nobody listens when the run was given up.
            let _ = say.send(Err(error));
        }
    }

    async fn all(
        self,
        mut phase: watch::Receiver<Phase>,
        say: &mpsc::UnboundedSender<Result<Option<Measured>, LoadError>>,
    ) -> Result<(), LoadError> {
        let measured = Arc::new(Mutex::new(Measured::default()));
        let mut callers = Vec::with_capacity(self.count);
        for _ in 0..self.count {
            let connection = Connection::open(&self.service.target)
                .await
                .map_err(|error| LoadError::connect(&self.service.target, error))?;
            let mut caller = self.caller(connection, Arc::clone(&measured));
            if self.cell.scenario == Scenario::Renewals {
                caller.hold().await?;
            }
            callers.push(caller);
        }
        let _ = say.send(Ok(None));
        let Ok(phase_now) = phase.wait_for(|phase| matches!(phase, Phase::Run(_))).await else {
            return Ok(());
        };
        let Phase::Run(began) = *phase_now else {
            return Ok(());
        };
        drop(phase_now);
        let mut tasks: JoinSet<Result<Caller, LoadError>> = JoinSet::new();
        for caller in callers {
            tasks.spawn(caller.run(began));
        }
        let mut callers = Vec::with_capacity(self.count);
        while let Some(ended) = tasks.join_next().await {
            callers.push(ended.map_err(|_| LoadError::Ended)??);
        }
        let time = began.elapsed();
        let all = Measured {
            time,
            ..lock(&measured).clone()
        };
        let _ = say.send(Ok(Some(all)));
        // Until the measurement is dropped.
        while phase.changed().await.is_ok() {}
        if self.cell.scenario == Scenario::Renewals {
            for caller in &mut callers {
                caller.release().await?;
            }
        }
        Ok(())
    }

    fn caller(&self, connection: Connection, measured: Arc<Mutex<Measured>>) -> Caller {
        let Self {
            service,
            cell,
            ids,
            shared,
            ..
        } = self;
        let head = &service.head;
        let batch = match cell.scenario {
            Scenario::Batch => cell.batch,
            _ => 0,
        };
        Caller {
            connection,
            acquires: Acquires::new(head, &cell.shape, ids, cell.tokens),
            releases: Acts::releases(head),
            acts: match cell.scenario {
                Scenario::Closes => Acts::closes(head),
                _ => Acts::renewals(head),
            },
            batches: Batches::new(head, &cell.shape, ids, cell.tokens, batch),
            lease: String::new(),
            shared: Arc::clone(shared),
            measured,
        }
    }
}

/// One caller.
struct Caller {
    connection: Connection,
    acquires: Acquires,
    releases: Acts,
    acts: Acts,
    batches: Batches,
    /// The lease that it holds; empty for none.
    lease: String,
    shared: Arc<Shared>,
    measured: Arc<Mutex<Measured>>,
}

impl Caller {
    async fn run(mut self, began: Instant) -> Result<Self, LoadError> {
        let end = began + self.shared.cell.time;
        match self.shared.cell.scenario {
            Scenario::Open => {
                while Instant::now() < end {
                    self.pair().await?;
                }
            }
            Scenario::Contended => {
                while Instant::now() < end {
                    self.contended_pair().await?;
                }
            }
            Scenario::Renewals => {
                while Instant::now() < end {
                    self.renew().await?;
                }
            }
            Scenario::Closes => {
                while Instant::now() < end {
                    self.pair().await?;
                    self.close().await?;
                }
            }
            Scenario::Batch => {
                while Instant::now() < end {
                    self.batch().await?;
                }
            }
            Scenario::Arrivals => {
                let shared = Arc::clone(&self.shared);
                // A service that is too slow for the rate is given up on after twice the time.
                let last = end + shared.cell.time;
                while Instant::now() < last
                    && let Some(due) = shared.arrivals.next(began).await
                {
                    self.due_pair(due).await?;
                }
            }
        }
        Ok(self)
    }

    /// Asks until it is decided. Whether a lease is held now.
    async fn acquire(&mut self) -> Result<bool, LoadError> {
        self.acquires.next_ticket();
        loop {
            let answer = self.connection.call(self.acquires.same_ticket()).await?;
            match Decision::of(answer) {
                Decision::Admit(lease) => {
                    self.lease.clear();
                    self.lease.push_str(lease);
                    self.shared.granted.fetch_add(1, Ordering::Relaxed);
                    return Ok(true);
                }
                Decision::Wait { rest } => {
                    lock(&self.measured).asked_again += 1;
                    if !rest.is_zero() {
                        tokio::time::sleep(rest).await;
                    }
                }
                Decision::Bypass => {
                    lock(&self.measured).bypassed += 1;
                    return Ok(false);
                }
                Decision::Other => {
                    refused(&self.measured, answer);
                    return Ok(false);
                }
            }
        }
    }

    /// Gives the lease back. Whether that was done.
    async fn release(&mut self) -> Result<bool, LoadError> {
        let answer = self.connection.call(self.releases.of(&self.lease)).await?;
        let done = answer.status == 200;
        match done {
            true => drop(self.shared.released.fetch_add(1, Ordering::Relaxed)),
            false => refused(&self.measured, answer),
        }
        Ok(done)
    }

    async fn hold(&mut self) -> Result<(), LoadError> {
        match self.acquire().await? {
            true => Ok(()),
            false => Err(LoadError::NoLease(
                lock(&self.measured).first_refusal.take(),
            )),
        }
    }

    async fn pair(&mut self) -> Result<(), LoadError> {
        self.due_pair(Instant::now()).await
    }

    /// A pair that should have begun at `due`.
    async fn due_pair(&mut self, due: Instant) -> Result<(), LoadError> {
        let lag = due.elapsed();
        if !self.acquire().await? {
            return Ok(());
        }
        let decided = Instant::now();
        let done = self.release().await?;
        let released = decided.elapsed();
        let mut measured = lock(&self.measured);
        record(&mut measured.lag, lag);
        record(&mut measured.acquire, decided - due);
        record(&mut measured.release, released);
        measured.pairs += u64::from(done);
        measured.operations += 1 + u64::from(done);
        Ok(())
    }

    async fn contended_pair(&mut self) -> Result<(), LoadError> {
        let asked = Instant::now();
        if !self.acquire().await? {
            return Ok(());
        }
        let decided = Instant::now();
        let free_since = {
            let mut slots = lock(&self.shared.slots);
            let free_since = slots.pop_front();
            slots.push_back(decided);
            free_since
        };
        let done = self.release().await?;
        let released = decided.elapsed();
        let mut measured = lock(&self.measured);
        // A place that was free before the caller asked made nobody wait.
        if let Some(free_since) = free_since.filter(|since| *since > asked) {
            record(&mut measured.grant, decided - free_since);
        }
        record(&mut measured.acquire, decided - asked);
        record(&mut measured.release, released);
        measured.pairs += u64::from(done);
        measured.operations += 1 + u64::from(done);
        Ok(())
    }

    async fn renew(&mut self) -> Result<(), LoadError> {
        let asked = Instant::now();
        let answer = self.connection.call(self.acts.of(&self.lease)).await?;
        if acted(&self.measured, asked, answer) {
            lock(&self.measured).pairs += 1;
        }
        Ok(())
    }

    async fn close(&mut self) -> Result<(), LoadError> {
        let asked = Instant::now();
        let request = self.acts.of(self.acquires.session_id());
        let answer = self.connection.call(request).await?;
        acted(&self.measured, asked, answer);
        self.acquires.next_session();
        Ok(())
    }

    async fn batch(&mut self) -> Result<(), LoadError> {
        let asked = Instant::now();
        let answer = self.connection.call(self.batches.next_acquires()).await?;
        let decided = Instant::now();
        let Some(leases) = leases(answer) else {
            refused(&self.measured, answer);
            return Ok(());
        };
        let wanted = self.shared.cell.batch;
        let request = self.batches.releases(&leases);
        let sent = Instant::now();
        let answer = self.connection.call(&request).await?;
        let released = sent.elapsed();
        if answer.status != 200 {
            refused(&self.measured, answer);
            return Ok(());
        }
        let done = released_in(answer);
        let (got, given) = (leases.len() as u64, done as u64);
        self.shared.granted.fetch_add(got, Ordering::Relaxed);
        self.shared.released.fetch_add(given, Ordering::Relaxed);
        let mut measured = lock(&self.measured);
        record(&mut measured.acquire, decided - asked);
        record(&mut measured.release, released);
        measured.bypassed += wanted.saturating_sub(leases.len()) as u64;
        measured.pairs += given;
        measured.operations += got + given;
        Ok(())
    }
}

/// Locks what is left whole at every moment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A renewal or a close was answered. Whether it was done.
fn acted(measured: &Mutex<Measured>, asked: Instant, answer: Answer<'_>) -> bool {
    let took = asked.elapsed();
    let done = matches!(answer.status, 200 | 202);
    if !done {
        refused(measured, answer);
        return false;
    }
    let mut measured = lock(measured);
    record(&mut measured.act, took);
    measured.operations += 1;
    true
}

fn refused(measured: &Mutex<Measured>, answer: Answer<'_>) {
    let mut measured = lock(measured);
    measured.refused += 1;
    if measured.first_refusal.is_none() {
        let shown = answer.body.get(..SHOWN_BYTES).unwrap_or(answer.body);
        let shown = String::from_utf8_lossy(shown);
        measured.first_refusal = Some(format!("status {}: {shown}", answer.status));
    }
}

/// What an acquire came to.
enum Decision<'a> {
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
    fn of(answer: Answer<'a>) -> Self {
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
fn leases(answer: Answer<'_>) -> Option<Vec<String>> {
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
fn released_in(answer: Answer<'_>) -> usize {
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

    const fn answer(status: u16, body: &str) -> Answer<'_> {
        Answer {
            status,
            body: body.as_bytes(),
        }
    }

    #[test]
    fn answers_are_read_as_far_as_they_matter() {
        let admit = r#"{"action":"admit","reason":"x","lease_id":"7-ab","epoch":1}"#;
        assert!(matches!(
            Decision::of(answer(200, admit)),
            Decision::Admit("7-ab")
        ));
        let wait = r#"{"action":"wait","position":3,"poll_after_s":0.25}"#;
        let rest = Duration::from_millis(250);
        assert!(
            matches!(Decision::of(answer(202, wait)), Decision::Wait { rest: told } if told == rest)
        );
        let bypass = r#"{"action":"bypass"}"#;
        assert!(matches!(
            Decision::of(answer(200, bypass)),
            Decision::Bypass
        ));
        assert!(matches!(Decision::of(answer(503, admit)), Decision::Other));
        assert!(matches!(Decision::of(answer(200, "{")), Decision::Other));
        let batch = format!(
            r#"{{"results":[{{"status":200,"body":{admit}}},{{"status":202,"body":{wait}}},{{"status":409,"body":{{"action":""}}}}]}}"#
        );
        assert_eq!(leases(answer(200, &batch)), Some(vec!["7-ab".to_owned()]));
        assert_eq!(leases(answer(413, "")), None);
        let released = r#"{"results":[{"status":200,"body":{"outcome":"released"}},{"status":404,"body":{"code":"x"}}]}"#;
        assert_eq!(released_in(answer(200, released)), 1);
    }

    #[test]
    fn a_refusal_is_counted_and_the_first_is_kept() {
        let measured = Mutex::new(Measured::default());
        refused(&measured, answer(503, "one"));
        refused(&measured, answer(503, &"x".repeat(1_000)));
        let measured = measured.into_inner().unwrap();
        assert_eq!(measured.refused, 2);
        assert_eq!(measured.first_refusal.unwrap(), "status 503: one");
    }

    /// A fixed rate is kept, from the start to the last of its beginnings, however late they are taken.
    #[tokio::test]
    async fn arrivals_are_due_one_by_one() {
        let arrivals = Arrivals {
            due: Semaphore::new(0),
            next: AtomicU64::new(0),
            total: 5,
            every: Duration::from_millis(1),
        };
        let began = Instant::now();
        arrivals.give_out(began, 2);
        for number in 0..4 {
            let due = arrivals.next(began).await.unwrap();
            assert_eq!(due - began, Duration::from_millis(number));
        }
        assert_eq!(arrivals.not_begun(), 1);
        assert!(arrivals.next(began).await.is_some());
        for _ in 0..2 {
            assert!(arrivals.next(began).await.is_none());
        }
        assert_eq!(arrivals.not_begun(), 0);
    }
}
