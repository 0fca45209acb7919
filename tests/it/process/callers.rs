//! Callers that do everything at once, and write down what they asked and what they were told.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::support::process::{Answer, Kvgate};

/// Tickets of one caller that wait or hold a lease.
const OPEN_MAX: usize = 8;
/// Ended tickets that a caller still asks about.
const ENDED_KEPT: usize = 12;

/// Numbers that are the same for the same seed.
#[derive(Clone, Debug)]
pub struct Draw(pub u64);

impl Draw {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

/// How a ticket stands as far as its caller was told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Told {
    /// Its acquire was never answered.
    Nothing,
    Waiting,
    Held(String),
    Released(String),
    Cancelled,
}

/// A request about a ticket that was sent and not answered: it may have happened or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    Acquire,
    Release,
    Cancel,
}

#[derive(Clone, Debug)]
pub struct Entry {
    pub tokens: u64,
    /// A short life, and nobody renews it.
    pub mortal: bool,
    pub told: Told,
    pub cut: Option<Cut>,
    /// Number of the enqueue, when it was told.
    pub enqueued: Option<u64>,
    /// When a mortal lease ends, as it was told.
    pub ends: Option<String>,
}

/// One thing that an answer says about a ticket, or about everything.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fact {
    Admitted {
        ticket: String,
        lease: String,
    },
    Waits {
        ticket: String,
        position: u64,
        ahead: u64,
    },
    Renewed {
        ticket: String,
    },
    Released {
        ticket: String,
    },
    Withdrawn {
        ticket: String,
    },
    /// A cancel that met a lease.
    TakenBack {
        ticket: String,
    },
    /// Ended before this call.
    Ended {
        ticket: String,
    },
    State {
        reserved: u64,
        held: u64,
        waiting: u64,
    },
}

/// A call that was answered: when, counted in the calls' own steps, and what it said.
#[derive(Clone, Debug)]
pub struct Call {
    pub begun: u64,
    pub ended: u64,
    /// Facts, each with the number of its change.
    pub facts: Vec<(Option<u64>, Fact)>,
}

/// What all callers of a run share.
#[derive(Debug, Default)]
pub struct Run {
    answers: AtomicUsize,
    steps: AtomicU64,
    enough: AtomicUsize,
    reached: Notify,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Load {
    /// Everything.
    Whole,
    /// Only what leaves no doubt about the order: no lease ends by itself, a batch has no acquire
    /// (its number would be that of another operation), and a new ticket is told its enqueue.
    Ordered,
}

/// One caller with tickets of its own; its calls follow each other.
pub struct Caller {
    name: String,
    load: Load,
    draw: Draw,
    next: u64,
    run: Arc<Run>,
    http: reqwest::Client,
    base: String,
    pub entries: BTreeMap<String, Entry>,
    pub calls: Vec<Call>,
    /// Tickets that a batch without an answer would change: all of them or none.
    pub batch: Vec<String>,
}

/// The process is gone.
pub struct Gone;

impl Caller {
    pub fn new(number: u64, load: Load, seed: u64, gate: &Kvgate) -> Self {
        Self {
            name: format!("c{number}"),
            load,
            draw: Draw(seed ^ (number << 32)),
            next: 0,
            run: Arc::default(),
            http: gate.http.clone(),
            base: gate.url("/v1"),
            entries: BTreeMap::new(),
            calls: Vec::new(),
            batch: Vec::new(),
        }
    }

    fn serve(&mut self, gate: &Kvgate, run: &Arc<Run>) {
        self.http = gate.http.clone();
        self.base = gate.url("/v1");
        self.run = Arc::clone(run);
    }

    /// Where an entry is that was told this, drawn among those that are.
    fn some(&mut self, wanted: impl Fn(&Entry) -> bool) -> Option<String> {
        let fit: Vec<&String> = self
            .entries
            .iter()
            .filter(|(_, entry)| wanted(entry) && !entry.mortal && entry.cut.is_none())
            .map(|(ticket, _)| ticket)
            .collect();
        let count = u64::try_from(fit.len()).unwrap();
        if count == 0 {
            return None;
        }
        let index = usize::try_from(self.draw.below(count)).unwrap();
        Some(fit[index].clone())
    }

    fn held(&mut self) -> Option<(String, String)> {
        let ticket = self.some(|entry| matches!(entry.told, Told::Held(_)))?;
        let Told::Held(lease) = self.entries[&ticket].told.clone() else {
            return None;
        };
        Some((ticket, lease))
    }

    fn waiting(&mut self) -> Option<String> {
        self.some(|entry| entry.told == Told::Waiting)
    }

    fn entry(&mut self, ticket: &str) -> &mut Entry {
        self.entries.get_mut(ticket).unwrap()
    }

    fn new_ticket(&mut self, mortal: bool) -> String {
        let ticket = format!("{}-{}", self.name, self.next);
        self.next += 1;
        let tokens = match self.draw.below(10) {
            _ if mortal => 7,
            0 => 0,
            1 | 2 => 1 + self.draw.below(2_000),
            _ => 1 + self.draw.below(150_000),
        };
        let entry = Entry {
            tokens,
            mortal,
            told: Told::Nothing,
            cut: None,
            enqueued: None,
            ends: None,
        };
        self.entries.insert(ticket.clone(), entry);
        ticket
    }

    fn body(&self, ticket: &str, wait_s: f64) -> Value {
        let entry = &self.entries[ticket];
        json!({
            "ticket_id": ticket, "session_id": self.name, "reservation_tokens": entry.tokens,
            "wait_s": wait_s, "ttl_s": if entry.mortal { 1 } else { 3_600 },
        })
    }

    fn post(&self, path: &str, body: &Value) -> reqwest::RequestBuilder {
        self.http.post(format!("{}{path}", self.base)).json(body)
    }

    /// Sends one call; the number that it gets back says when it began.
    async fn send(&self, request: reqwest::RequestBuilder) -> Result<(u64, u64, Answer), Gone> {
        let begun = self.run.steps.fetch_add(1, Ordering::SeqCst);
        let answer = request.send().await.map_err(|_| Gone)?;
        let seq = answer.headers().get("kvgate-seq");
        let seq = seq.map(|seq| seq.to_str().unwrap().parse().unwrap());
        let status = answer.status().as_u16();
        let body = answer.json().await.map_err(|_| Gone)?;
        let ended = self.run.steps.fetch_add(1, Ordering::SeqCst);
        let answers = self.run.answers.fetch_add(1, Ordering::SeqCst) + 1;
        if answers >= self.run.enough.load(Ordering::SeqCst) {
            self.run.reached.notify_one();
        }
        Ok((begun, ended, Answer { status, seq, body }))
    }

    fn log(&mut self, begun: u64, ended: u64, facts: Vec<(Option<u64>, Fact)>) {
        self.calls.push(Call {
            begun,
            ended,
            facts,
        });
    }

    /// One call, drawn.
    pub async fn step(&mut self) -> Result<(), Gone> {
        let open = self
            .entries
            .values()
            .filter(|entry| !entry.mortal && matches!(entry.told, Told::Waiting | Told::Held(_)))
            .count();
        let whole = self.load == Load::Whole;
        match self.draw.below(20) {
            0..=3 if open < OPEN_MAX => {
                let ticket = self.new_ticket(false);
                self.acquire(&ticket, 0.0).await?;
            }
            4 if open < OPEN_MAX && whole => {
                let ticket = self.new_ticket(false);
                self.acquire(&ticket, 0.05).await?;
            }
            5 if whole => {
                let ticket = self.new_ticket(true);
                self.acquire(&ticket, 0.0).await?;
            }
            6 if open < OPEN_MAX => {
                let ticket = self.new_ticket(false);
                self.twice(&ticket).await?;
            }
            7 | 8 => {
                if let Some((ticket, lease)) = self.held() {
                    self.renew(&ticket, &lease).await?;
                }
            }
            9 => {
                let open = |entry: &Entry| matches!(entry.told, Told::Waiting | Told::Held(_));
                if let Some(ticket) = self.some(open) {
                    self.cancel(&ticket).await?;
                }
            }
            10 => {
                if let Some((ticket, _)) = self.held() {
                    self.acquire(&ticket, 0.0).await?;
                }
            }
            11 | 12 => {
                if let Some(ticket) = self.waiting() {
                    self.acquire(&ticket, 0.05).await?;
                }
            }
            13 => self.wait().await?,
            14 | 15 => self.batch().await?,
            16 => self.ended().await?,
            17 => self.read().await?,
            _ => {
                if let Some((ticket, lease)) = self.held() {
                    self.release(&ticket, &lease).await?;
                } else if let Some(ticket) = self.waiting() {
                    self.acquire(&ticket, 0.02).await?;
                }
            }
        }
        Ok(())
    }

    /// Takes in what an acquire of `ticket` was told.
    fn told(&mut self, ticket: &str, seq: Option<u64>, body: &Value) -> Fact {
        let entry = self.entry(ticket);
        entry.cut = None;
        assert_eq!(body["ticket_id"], ticket);
        assert_eq!(body["reservation_tokens"], entry.tokens, "{body}");
        match body["action"].as_str().unwrap() {
            "admit" => {
                let lease = body["lease_id"].as_str().unwrap().to_owned();
                if let Told::Held(known) = &entry.told
                    && !entry.mortal
                {
                    assert_eq!(*known, lease, "{ticket} has a second lease (TIC1)");
                }
                entry.told = Told::Held(lease.clone());
                entry.ends = body["expires_at"].as_str().map(str::to_owned);
                Fact::Admitted {
                    ticket: ticket.to_owned(),
                    lease,
                }
            }
            "wait" => {
                assert!(
                    matches!(entry.told, Told::Nothing | Told::Waiting),
                    "{ticket}: {:?} waits",
                    entry.told
                );
                entry.told = Told::Waiting;
                entry.enqueued = entry.enqueued.or(seq);
                Fact::Waits {
                    ticket: ticket.to_owned(),
                    position: body["position"].as_u64().unwrap(),
                    ahead: body["tokens_ahead"].as_u64().unwrap(),
                }
            }
            other => panic!("{ticket} was told {other}: {body}"),
        }
    }

    /// Asks for a ticket, for the first time or again.
    pub async fn acquire(&mut self, ticket: &str, wait_s: f64) -> Result<Answer, Gone> {
        let request = self.post("/leases", &self.body(ticket, wait_s));
        if self.entries[ticket].told == Told::Nothing {
            self.entry(ticket).cut = Some(Cut::Acquire);
        }
        let (begun, ended, answer) = self.send(request).await?;
        let fact = self.told(ticket, answer.seq, &answer.body);
        self.log(begun, ended, vec![(answer.seq, fact)]);
        Ok(answer)
    }

    /// The same new ticket on two connections at once: charged once (TIC1).
    async fn twice(&mut self, ticket: &str) -> Result<(), Gone> {
        let body = self.body(ticket, 0.0);
        self.entry(ticket).cut = Some(Cut::Acquire);
        let (one, two) = tokio::join!(
            self.send(self.post("/leases", &body)),
            self.send(self.post("/leases", &body))
        );
        let mut both: Vec<_> = [one, two].into_iter().flatten().collect();
        // One of them can be told that it waits, and the other that it was granted since.
        both.sort_by_key(|(_, _, answer)| answer.action() == "admit");
        if both.is_empty() {
            return Err(Gone);
        }
        for (begun, ended, answer) in both {
            let fact = self.told(ticket, answer.seq, &answer.body);
            self.log(begun, ended, vec![(answer.seq, fact)]);
        }
        Ok(())
    }

    async fn renew(&mut self, ticket: &str, lease: &str) -> Result<(), Gone> {
        let request = self.post(&format!("/leases/{lease}/renew"), &json!({"ttl_s": 3_600}));
        let (begun, ended, answer) = self.send(request).await?;
        assert_eq!(answer.status, 200, "{ticket}: {answer:?}");
        assert_eq!(answer.body["ticket_id"], ticket);
        assert_eq!(answer.body["lease_id"], lease);
        let fact = Fact::Renewed {
            ticket: ticket.to_owned(),
        };
        self.log(begun, ended, vec![(None, fact)]);
        Ok(())
    }

    /// Gives the answer's word back.
    pub async fn release(&mut self, ticket: &str, lease: &str) -> Result<String, Gone> {
        let request = self.post(&format!("/leases/{lease}/release"), &json!({}));
        self.entry(ticket).cut = Some(Cut::Release);
        let (begun, ended, answer) = self.send(request).await?;
        let fact = self.ends(ticket, &answer.body);
        self.log(begun, ended, vec![(answer.seq, fact)]);
        Ok(answer.body["outcome"].as_str().unwrap().to_owned())
    }

    /// Gives the answer's word back.
    pub async fn cancel(&mut self, ticket: &str) -> Result<String, Gone> {
        let request = self.http.delete(format!("{}/tickets/{ticket}", self.base));
        self.entry(ticket).cut = Some(Cut::Cancel);
        let (begun, ended, answer) = self.send(request).await?;
        let fact = self.ends(ticket, &answer.body);
        self.log(begun, ended, vec![(answer.seq, fact)]);
        Ok(answer.body["outcome"].as_str().unwrap().to_owned())
    }

    /// Takes in the answer to a release or a cancel.
    fn ends(&mut self, ticket: &str, body: &Value) -> Fact {
        let entry = self.entry(ticket);
        let cut = entry.cut.take();
        let held = match &entry.told {
            Told::Held(lease) => Some(lease.clone()),
            _ => None,
        };
        entry.told = match (cut, held) {
            (Some(Cut::Release), Some(lease)) => Told::Released(lease),
            _ => Told::Cancelled,
        };
        let ticket = ticket.to_owned();
        match (cut, body["outcome"].as_str()) {
            (Some(Cut::Release), Some("released")) => Fact::Released { ticket },
            (Some(Cut::Cancel), Some("withdrawn")) => Fact::Withdrawn { ticket },
            (Some(Cut::Cancel), Some("released")) => Fact::TakenBack { ticket },
            (Some(Cut::Release), Some("already_released"))
            | (Some(Cut::Cancel), Some("already_finished")) => Fact::Ended { ticket },
            other => panic!("{ticket}: {other:?}: {body}"),
        }
    }

    /// All waiting tickets on one call.
    async fn wait(&mut self) -> Result<(), Gone> {
        let waiting: Vec<String> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.told == Told::Waiting && !entry.mortal)
            .map(|(ticket, _)| ticket.clone())
            .collect();
        if waiting.is_empty() {
            return Ok(());
        }
        let body = json!({"ticket_ids": waiting, "wait_s": 0.05});
        let (begun, ended, answer) = self.send(self.post("/wait", &body)).await?;
        let mut facts = Vec::new();
        for result in answer.body["results"].as_array().unwrap() {
            assert_eq!(
                result["action"], "admit",
                "a waiter that was told is unknown"
            );
            let ticket = result["ticket_id"].as_str().unwrap().to_owned();
            facts.push((None, self.told(&ticket, None, result)));
        }
        self.log(begun, ended, facts);
        Ok(())
    }

    /// A release, a renewal, a cancel and (where the order need not be told) an acquire at once.
    async fn batch(&mut self) -> Result<(), Gone> {
        let mut operations = Vec::new();
        let mut about = Vec::new();
        if let Some((ticket, lease)) = self.held() {
            self.entry(&ticket).cut = Some(Cut::Release);
            operations.push(json!({"op": "release", "lease_id": lease}));
            about.push(ticket);
        }
        if let Some((ticket, lease)) = self.held() {
            operations.push(json!({"op": "renew", "lease_id": lease, "ttl_s": 3_600}));
            about.push(ticket);
        }
        if self.draw.below(3) == 0
            && let Some(ticket) = self.waiting()
        {
            self.entry(&ticket).cut = Some(Cut::Cancel);
            operations.push(json!({"op": "cancel", "ticket_id": ticket}));
            about.push(ticket);
        }
        if self.load == Load::Whole {
            let ticket = self.new_ticket(false);
            let mut operation = self.body(&ticket, 0.0);
            operation["op"] = json!("acquire");
            self.entry(&ticket).cut = Some(Cut::Acquire);
            operations.push(operation);
            about.push(ticket);
        }
        if operations.is_empty() {
            return Ok(());
        }
        let body = json!({"operations": operations});
        let changed = about
            .iter()
            .filter(|ticket| self.entries[*ticket].cut.is_some());
        self.batch = changed.cloned().collect();
        let (begun, ended, answer) = self.send(self.post("/batch", &body)).await?;
        self.batch.clear();
        let results = answer.body["results"].as_array().unwrap();
        assert_eq!(results.len(), about.len());
        let mut facts = Vec::new();
        for ((operation, ticket), result) in operations.iter().zip(about).zip(results) {
            let body = &result["body"];
            facts.push(match operation["op"].as_str().unwrap() {
                "renew" => {
                    assert_eq!(result["status"], 200, "{ticket}: {body}");
                    Fact::Renewed { ticket }
                }
                "acquire" => self.told(&ticket, None, body),
                _ => self.ends(&ticket, body),
            });
        }
        // The number of a batch is that of its last change; they follow each other.
        let changes = |fact: &Fact| !matches!(fact, Fact::Renewed { .. } | Fact::Ended { .. });
        let mut left = facts.iter().filter(|fact| changes(fact)).count();
        let last = answer.seq.filter(|_| self.load == Load::Ordered);
        let facts = facts
            .into_iter()
            .map(|fact| {
                if !changes(&fact) {
                    return (None, fact);
                }
                left -= 1;
                let before = u64::try_from(left).unwrap();
                (last.map(|last| last - before), fact)
            })
            .collect();
        self.log(begun, ended, facts);
        Ok(())
    }

    /// What ended stays ended (TIC1, TIC6).
    async fn ended(&mut self) -> Result<(), Gone> {
        let ended = |entry: &Entry| matches!(entry.told, Told::Released(_) | Told::Cancelled);
        let Some(ticket) = self.some(ended) else {
            return Ok(());
        };
        if let Told::Released(lease) = self.entries[&ticket].told.clone() {
            let request = self.post(&format!("/leases/{lease}/release"), &json!({}));
            let (_, _, answer) = self.send(request).await?;
            assert_eq!(
                answer.body["outcome"], "already_released",
                "{ticket}: {answer:?}"
            );
            assert_eq!(answer.seq, None);
        }
        let request = self.post("/leases", &self.body(&ticket, 0.0));
        let (begun, ended, answer) = self.send(request).await?;
        assert_eq!(answer.action(), "cancelled", "{ticket}: {answer:?}");
        assert_eq!(answer.body["reason"], "ticket_finished");
        assert_eq!(answer.seq, None);
        self.log(begun, ended, vec![(None, Fact::Ended { ticket })]);
        Ok(())
    }

    /// Reads of a ticket, a lease, and of everything.
    async fn read(&mut self) -> Result<(), Gone> {
        if let Some(ticket) = self.waiting() {
            let request = self.http.get(format!("{}/tickets/{ticket}", self.base));
            let (begun, ended, answer) = self.send(request).await?;
            let fact = self.told(&ticket, None, &answer.body);
            self.log(begun, ended, vec![(None, fact)]);
        }
        if let Some((ticket, lease)) = self.held() {
            let request = self.http.get(format!("{}/leases/{lease}", self.base));
            let (begun, ended, answer) = self.send(request).await?;
            assert_eq!(
                answer.body["ticket_id"],
                ticket.as_str(),
                "{lease}: {answer:?}"
            );
            self.log(begun, ended, vec![(None, Fact::Renewed { ticket })]);
        }
        let (begun, ended, answer) = self
            .send(self.http.get(format!("{}/state", self.base)))
            .await?;
        let state = &answer.body;
        let fact = Fact::State {
            reserved: state["budget"]["reserved"].as_u64().unwrap(),
            held: state["leases"]["count"].as_u64().unwrap(),
            waiting: state["queue"]["waiting"].as_u64().unwrap(),
        };
        self.log(begun, ended, vec![(None, fact)]);
        Ok(())
    }

    /// Forgets most of what ended, since the gate does so too after a while.
    pub fn prune(&mut self) {
        let ended: Vec<String> = self
            .entries
            .iter()
            .filter(|(_, entry)| matches!(entry.told, Told::Released(_) | Told::Cancelled))
            .map(|(ticket, _)| ticket.clone())
            .collect();
        let extra = ended.len().saturating_sub(ENDED_KEPT);
        for ticket in ended.iter().take(extra) {
            self.entries.remove(ticket);
        }
    }
}

/// Lets all callers call until they have `enough` answers together; then `end` is called, which may
/// kill the process, and they end with the call that is under way.
pub async fn run(
    gate: Kvgate,
    callers: &mut Vec<Caller>,
    enough: usize,
    end: impl FnOnce(Kvgate) -> Option<Kvgate>,
) -> Option<Kvgate> {
    let run = Arc::new(Run::default());
    run.enough.store(enough, Ordering::SeqCst);
    let mut working = JoinSet::new();
    for mut caller in std::mem::take(callers) {
        caller.serve(&gate, &run);
        let run = Arc::clone(&run);
        working.spawn(async move {
            let stopped = || run.enough.load(Ordering::SeqCst) == 0;
            while !stopped() && caller.step().await.is_ok() {}
            caller
        });
    }
    // A caller that fails ends the run at once.
    let mut reached = std::pin::pin!(run.reached.notified());
    tokio::select! {
        () = &mut reached => {}
        ended = working.join_next() => {
            // Its own failure is told first.
            let caller = ended.unwrap().unwrap();
            panic!("{} found the process gone, which nobody had killed", caller.name);
        }
    }
    let gate = end(gate);
    run.enough.store(0, Ordering::SeqCst);
    while let Some(ended) = working.join_next().await {
        callers.push(ended.unwrap());
    }
    callers.sort_by(|one, other| one.name.cmp(&other.name));
    gate
}

/// Makes the callers speak to a new process, outside of a run.
pub fn serve_all(gate: &Kvgate, callers: &mut [Caller]) {
    let run = Arc::new(Run::default());
    run.enough.store(usize::MAX, Ordering::SeqCst);
    for caller in callers {
        caller.serve(gate, &run);
    }
}
