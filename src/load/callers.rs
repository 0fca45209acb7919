//! Callers: each is one connection that goes on from one exchange to the next.
//!
//! Their tasks are spread over a few threads with a runtime each: nothing is stolen between those, and what
//! is shared is locked once or twice an exchange.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;

use super::LoadError;
use super::answers::{Decision, leases, released_in};
use super::ask::{Acquires, Acts, Batches, Ids};
use super::scenario::{Cell, Measured, Scenario, Service, record};
use super::wire::{Answer, Connection};

/// Multiples of it, without what stands before the point, are spread evenly however many they are.
const GOLDEN: f64 = 0.618_033_988_749_894_9;

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
        lock(&self.shared.slots).open(self.shared.cell.slots, began);
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
    slots: Mutex<Slots>,
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

/// Places for leases that are free, the longest first: grants come in the order of the releases that make room for them.
#[derive(Debug, Default)]
struct Slots {
    free: VecDeque<Freed>,
    /// Places that were taken so far.
    taken: usize,
}

/// A place, as the caller that gave it back knows it.
#[derive(Clone, Copy, Debug)]
struct Freed {
    /// When its release was sent.
    sent: Instant,
    /// When that was answered, unless it is still to come.
    answered: Option<Instant>,
}

impl Slots {
    /// So many places are free since `began`, of nobody before.
    fn open(&mut self, count: usize, began: Instant) {
        let first = Freed {
            sent: began,
            answered: None,
        };
        self.free.extend(std::iter::repeat_n(first, count));
    }

    /// A release is sent now. Gives the number of its place.
    fn free(&mut self) -> usize {
        self.free.push_back(Freed {
            sent: Instant::now(),
            answered: None,
        });
        self.taken + self.free.len() - 1
    }

    /// The release of a place is answered now. A place that was taken before is not known any more.
    fn answered(&mut self, number: usize) {
        let index = number.checked_sub(self.taken);
        if let Some(freed) = index.and_then(|index| self.free.get_mut(index)) {
            freed.answered = Some(Instant::now());
        }
    }

    fn take(&mut self) -> Option<Freed> {
        let freed = self.free.pop_front()?;
        self.taken += 1;
        Some(freed)
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
                    lock(&self.measured).refuse(answer);
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
            false => lock(&self.measured).refuse(answer),
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
        record(&mut lock(&self.measured).lag, lag);
        self.admitted(due.elapsed(), None).await
    }

    async fn contended_pair(&mut self) -> Result<(), LoadError> {
        let asked = Instant::now();
        if !self.acquire().await? {
            return Ok(());
        }
        let decided = Instant::now();
        let freed = lock(&self.shared.slots).take();
        // A place that was free before the caller asked made nobody wait.
        if let Some(freed) = freed.filter(|freed| freed.sent > asked) {
            let mut measured = lock(&self.measured);
            record(&mut measured.grant, decided - freed.sent);
            // Whoever waits is told first, so the answer to the release may be still to come.
            let answered = freed.answered.unwrap_or(decided);
            record(
                &mut measured.grant_after,
                decided.saturating_duration_since(answered),
            );
        }
        let hold = self.shared.cell.hold;
        if !hold.is_zero() {
            // Evenly spread around it: all that began at once would otherwise end at once for ever.
            let number = self.shared.granted.load(Ordering::Relaxed) as f64;
            tokio::time::sleep(hold.mul_f64(0.5 + (number * GOLDEN).fract())).await;
        }
        let slot = lock(&self.shared.slots).free();
        self.admitted(decided - asked, Some(slot)).await
    }

    /// Gives back the lease that was had after `waited`, and the place that it had, and records both calls.
    async fn admitted(&mut self, waited: Duration, slot: Option<usize>) -> Result<(), LoadError> {
        let asked = Instant::now();
        let done = self.release().await?;
        let released = asked.elapsed();
        if let Some(slot) = slot {
            lock(&self.shared.slots).answered(slot);
        }
        let mut measured = lock(&self.measured);
        record(&mut measured.acquire, waited);
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
            lock(&self.measured).refuse(answer);
            return Ok(());
        };
        let wanted = self.shared.cell.batch;
        let request = self.batches.releases(&leases);
        let sent = Instant::now();
        let answer = self.connection.call(&request).await?;
        let released = sent.elapsed();
        if answer.status != 200 {
            lock(&self.measured).refuse(answer);
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
        lock(measured).refuse(answer);
        return false;
    }
    let mut measured = lock(measured);
    record(&mut measured.act, took);
    measured.operations += 1;
    true
}

#[cfg(test)]
mod tests {
    use super::*;

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
