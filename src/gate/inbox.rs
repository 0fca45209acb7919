//! The writer's inbox.
//!
//! All senders put into one list, in one order, and whoever does the next turn takes the whole list at once. The
//! writer's thread is woken only when it sleeps, and not for what can ride along with the next turn: that every answer is
//! followed by the word that it arrived would otherwise cost a wake-up and a turn for each.
//!
//! A sender that has been alone for a while need not wake it either: it is lent the next turn and does it by itself,
//! which spares the way to another thread and back.

use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// After a turn that handed something out, the writer's thread looks once more after this time for what did not wake it:
/// the word that the answers have arrived. What comes in even later, or after a sender's turn, waits for its next tick.
const QUIET_FOR: Duration = Duration::from_millis(10);

/// A turn is lent after so many in a row that one sender had for itself. Among several senders turns of one are the
/// beginning of a larger one, and the threads that read the others are not to be held.
const ALONE_FOR: u32 = 8;

/// The ends of a new inbox: that of the senders, that of the writer, and that of its thread.
pub(super) fn inbox<T>() -> (Inbox<T>, Messages<T>, Bed<T>) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            list: Vec::new(),
            urgent: 0,
            urgent_taken: 0,
            alone_for: 0,
            is_lively: false,
            sleep: None,
            is_lent: false,
            is_closed: false,
        }),
        arrived: Condvar::new(),
    });
    let messages = Messages {
        shared: Arc::clone(&shared),
        taken: Vec::new().into_iter(),
    };
    let bed = Bed {
        shared: Arc::clone(&shared),
    };
    (Inbox { shared }, messages, bed)
}

/// The writer is gone.
#[derive(Debug)]
pub(super) struct Closed;

#[derive(Debug)]
struct Shared<T> {
    state: Mutex<State<T>>,
    arrived: Condvar,
}

#[derive(Debug)]
struct State<T> {
    list: Vec<T>,
    /// So many in the list are not to wait.
    urgent: u32,
    /// So many of them were taken for the turn under way.
    urgent_taken: u32,
    /// Turns in a row that had one of them, and none came in meanwhile.
    alone_for: u32,
    /// Something was taken since the last sleep.
    is_lively: bool,
    /// Set while the writer's thread sleeps and nobody has called it.
    sleep: Option<Sleep>,
    /// A sender does the turn.
    is_lent: bool,
    /// One end is gone.
    is_closed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Sleep {
    /// It goes on until then, unless somebody calls or it finds something when it looks before.
    until: Instant,
    /// Senders may do the next turn.
    lends: bool,
}

impl<T> State<T> {
    /// A turn is over. Whoever comes in while another's turn is done is not alone.
    fn end_turn(&mut self) {
        match (std::mem::take(&mut self.urgent_taken), self.urgent) {
            (0, _) => {}
            (1, 0) => self.alone_for = self.alone_for.saturating_add(1),
            _ => self.alone_for = 0,
        }
    }

    fn take_all(&mut self) -> std::vec::IntoIter<T> {
        self.urgent_taken = self
            .urgent_taken
            .saturating_add(std::mem::take(&mut self.urgent));
        self.is_lively |= !self.list.is_empty();
        // The next list is as long as this one, in all likelihood.
        let next = Vec::with_capacity(self.list.len());
        std::mem::replace(&mut self.list, next).into_iter()
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the writer's thread, if it sleeps and was not called yet.
    fn call(&self, mut state: MutexGuard<'_, State<T>>) {
        let sleeps = state.sleep.take().is_some();
        drop(state);
        if sleeps {
            self.arrived.notify_one();
        }
    }

    /// Sleeps until something urgent is there or somebody calls; false when it was `look_at` before.
    fn sleep<'s>(
        &'s self,
        mut state: MutexGuard<'s, State<T>>,
        look_at: Instant,
        sleep: Sleep,
    ) -> (MutexGuard<'s, State<T>>, bool) {
        while state.urgent == 0 && !state.is_closed {
            let left = look_at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return (state, false);
            }
            state.sleep = Some(sleep);
            state = self
                .arrived
                .wait_timeout(state, left)
                .map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
            if state.sleep.take().is_none() {
                break;
            }
        }
        (state, true)
    }
}

/// The senders' end.
#[derive(Debug)]
pub(super) struct Inbox<T> {
    shared: Arc<Shared<T>>,
}

impl<T> Inbox<T> {
    /// Puts something in and sees to it that the writer takes it at once.
    pub(super) fn put(&self, message: T) -> Result<(), Closed> {
        self.put_or_borrow(message, || false).map(drop)
    }

    /// The same, but a sender that was alone for a while, and `can` do a turn, is lent the next one.
    pub(super) fn put_or_borrow(
        &self,
        message: T,
        can: impl FnOnce() -> bool,
    ) -> Result<Option<Loan<'_, T>>, Closed> {
        let mut state = self.shared.lock();
        if state.is_closed {
            return Err(Closed);
        }
        state.list.push(message);
        state.urgent += 1;
        if state.is_lent {
            return Ok(None);
        }
        let lends = state.sleep.is_some_and(|sleep| sleep.lends);
        if lends && state.urgent == 1 && state.alone_for >= ALONE_FOR && can() {
            state.is_lent = true;
            return Ok(Some(Loan {
                shared: &self.shared,
                look_in: Duration::ZERO,
            }));
        }
        self.shared.call(state);
        Ok(None)
    }

    /// Puts in what does not wake the writer: it is taken with whatever does, or when the writer looks by itself.
    pub(super) fn put_quietly(&self, messages: impl IntoIterator<Item = T>) {
        let mut state = self.shared.lock();
        if !state.is_closed {
            state.list.extend(messages);
        }
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.arrived.notify_one();
    }
}

/// The right to do the next turn in the writer's place; it is given back when it is dropped.
#[derive(Debug)]
pub(super) struct Loan<'a, T> {
    shared: &'a Shared<T>,
    look_in: Duration,
}

impl<T> Loan<'_, T> {
    /// Gives it back after a turn; the writer has something to do after this time. Dropped without a turn, it is to do
    /// the turn now.
    pub(super) fn give_back(mut self, look_in: Duration) {
        self.look_in = look_in;
    }
}

impl<T> Drop for Loan<'_, T> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_lent = false;
        state.end_turn();
        let too_long = |sleep: Sleep| Instant::now() + self.look_in < sleep.until;
        if state.urgent > 0 || state.sleep.is_some_and(too_long) {
            self.shared.call(state);
        }
    }
}

/// Where the writer's thread sleeps between two turns.
#[derive(Debug)]
pub(super) struct Bed<T> {
    shared: Arc<Shared<T>>,
}

impl<T> Bed<T> {
    /// Sleeps until something urgent is there or somebody calls, at most `wait`. Senders may do turns meanwhile.
    pub(super) fn rest(&self, wait: Duration) {
        let now = Instant::now();
        let sleep = Sleep {
            until: now + wait,
            lends: true,
        };
        let mut state = self.shared.lock();
        state.end_turn();
        if std::mem::take(&mut state.is_lively) && QUIET_FOR < wait {
            let was_called;
            (state, was_called) = self.shared.sleep(state, now + QUIET_FOR, sleep);
            if was_called || !state.list.is_empty() {
                return;
            }
        }
        drop(self.shared.sleep(state, sleep.until, sleep));
    }
}

/// The writer's end.
#[derive(Debug)]
pub(super) struct Messages<T> {
    shared: Arc<Shared<T>>,
    /// Taken out of the list and not handed out yet.
    taken: std::vec::IntoIter<T>,
}

impl<T> Messages<T> {
    /// The next message, without waiting.
    pub(super) fn try_recv(&mut self) -> Option<T> {
        if self.taken.as_slice().is_empty() {
            self.taken = self.shared.lock().take_all();
        }
        self.taken.next()
    }

    /// Whether the next message is at hand already.
    pub(super) fn has_taken(&self) -> bool {
        !self.taken.as_slice().is_empty()
    }

    /// The next message, as soon as there is an urgent one; the first of whatever is there after `wait`.
    ///
    /// # Errors
    /// Nothing is there after that time, or the senders are gone.
    pub(super) fn recv_timeout(&mut self, wait: Duration) -> Result<T, RecvTimeoutError> {
        if !self.has_taken() {
            let until = Instant::now() + wait;
            let sleep = Sleep {
                until,
                lends: false,
            };
            let state = self.shared.lock();
            self.taken = self.shared.sleep(state, until, sleep).0.take_all();
        }
        match self.taken.next() {
            Some(message) => Ok(message),
            None if self.shared.lock().is_closed => Err(RecvTimeoutError::Disconnected),
            None => Err(RecvTimeoutError::Timeout),
        }
    }
}

impl<T> Drop for Messages<T> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_closed = true;
        let rest = state.take_all();
        drop(state);
        // Whoever waits for an answer hears now that there will be none.
        drop(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing is ever told by its end: a message that wakes nobody makes the test hang.
    const LONG: Duration = Duration::from_secs(86_400);

    /// What does not wake the writer keeps its place in the order, and comes by itself when nothing else does.
    #[test]
    fn messages_keep_their_order_and_quiet_ones_wait() {
        let (inbox, mut messages, bed) = inbox();
        assert_eq!(
            messages.recv_timeout(Duration::ZERO),
            Err(RecvTimeoutError::Timeout)
        );
        inbox.put_quietly([1, 2]);
        let sender = std::thread::spawn(move || {
            inbox.put(3).unwrap();
            inbox.put_quietly([4]);
            inbox
        });
        let got: Vec<i32> = (0..3)
            .map(|_| messages.recv_timeout(LONG).unwrap())
            .collect();
        assert_eq!(got, [1, 2, 3]);
        let inbox = sender.join().unwrap();
        if !messages.has_taken() {
            bed.rest(LONG);
        }
        assert_eq!(messages.try_recv(), Some(4), "without being woken");
        assert_eq!(messages.try_recv(), None);
        drop(inbox);
        bed.rest(LONG);
        assert_eq!(
            messages.recv_timeout(LONG),
            Err(RecvTimeoutError::Disconnected)
        );
    }

    /// An inbox whose writer's thread has gone to sleep, after so many turns of one sender each.
    fn asleep_after(turns: u32) -> (Inbox<u32>, Messages<u32>) {
        let (inbox, mut messages, _bed) = inbox();
        for turn in 0..turns {
            inbox.put(turn).unwrap();
            assert_eq!(messages.try_recv(), Some(turn));
            inbox.shared.lock().end_turn();
        }
        let mut state = inbox.shared.lock();
        state.sleep = Some(Sleep {
            until: Instant::now() + LONG,
            lends: true,
        });
        drop(state);
        (inbox, messages)
    }

    fn was_called(inbox: &Inbox<u32>) -> bool {
        inbox.shared.lock().sleep.is_none()
    }

    #[test]
    fn who_was_alone_for_a_while_is_lent_the_turn() {
        let (inbox, _messages) = asleep_after(ALONE_FOR - 1);
        assert!(inbox.put_or_borrow(9, || true).unwrap().is_none());
        assert!(was_called(&inbox), "not for so long");

        let (inbox, _messages) = asleep_after(ALONE_FOR);
        assert!(inbox.put_or_borrow(9, || false).unwrap().is_none());
        assert!(was_called(&inbox), "it cannot");

        let (inbox, mut messages) = asleep_after(ALONE_FOR);
        for number in 0..3 {
            let loan = inbox.put_or_borrow(number, || true).unwrap().unwrap();
            assert_eq!(messages.try_recv(), Some(number));
            loan.give_back(LONG * 2);
            assert!(!was_called(&inbox));
        }
        inbox.put(9).unwrap();
        assert!(was_called(&inbox), "what is only to be put in is not lent");
    }

    /// Two that take turns have turns of their own each, but come in while the other's is done.
    #[test]
    fn among_several_nobody_is_lent_the_turn() {
        let (inbox, mut messages) = asleep_after(ALONE_FOR);
        let loan = inbox.put_or_borrow(1, || true).unwrap().unwrap();
        assert_eq!(messages.try_recv(), Some(1));
        assert!(inbox.put_or_borrow(2, || true).unwrap().is_none());
        assert!(!was_called(&inbox), "before the turn is over");
        loan.give_back(LONG * 2);
        assert!(was_called(&inbox));
        assert_eq!(inbox.shared.lock().alone_for, 0);

        let (inbox, mut messages) = asleep_after(ALONE_FOR);
        inbox.put_quietly([1]);
        let loan = inbox.put_or_borrow(2, || true).unwrap().unwrap();
        assert_eq!(messages.try_recv(), Some(1));
        assert_eq!(messages.try_recv(), Some(2));
        inbox.put_quietly([3]);
        loan.give_back(LONG * 2);
        assert!(!was_called(&inbox), "quiet messages are nobody's");
        assert!(inbox.put_or_borrow(4, || true).unwrap().is_some());
    }

    /// While the writer's thread sleeps for the moment after which it looks for quiet messages, a sender's turn makes
    /// something due that lies between this moment and the end of the whole sleep.
    #[test]
    fn the_first_part_of_a_sleep_tells_the_end_of_the_whole() {
        let (inbox, mut messages, bed) = inbox();
        inbox.put(1).unwrap();
        assert_eq!(messages.try_recv(), Some(1));
        let until = std::thread::scope(|scope| {
            scope.spawn(|| bed.rest(LONG));
            let until = loop {
                if let Some(sleep) = inbox.shared.lock().sleep {
                    break sleep.until;
                }
                std::thread::yield_now();
            };
            inbox.put(2).unwrap();
            until
        });
        assert!(until > Instant::now() + LONG / 2);
    }

    /// The writer's thread sleeps until what was due when it went to sleep: something may be due sooner now.
    #[test]
    fn a_loan_is_given_back_with_what_is_due() {
        let (inbox, mut messages) = asleep_after(ALONE_FOR);
        let loan = inbox.put_or_borrow(1, || true).unwrap().unwrap();
        assert_eq!(messages.try_recv(), Some(1));
        loan.give_back(LONG / 2);
        assert!(was_called(&inbox));

        let (inbox, _messages) = asleep_after(ALONE_FOR);
        drop(inbox.put_or_borrow(1, || true).unwrap().unwrap());
        assert!(was_called(&inbox), "nobody did the turn");
    }

    /// Without the writer nothing is taken, and what it had not taken is dropped, so that nobody waits for an answer.
    #[test]
    fn an_inbox_without_a_writer_takes_nothing() {
        let (inbox, messages, _bed) = inbox();
        let waited_for = Arc::new(());
        inbox.put(Arc::clone(&waited_for)).unwrap();
        drop(messages);
        assert!(inbox.put(Arc::clone(&waited_for)).is_err());
        inbox.put_quietly([Arc::clone(&waited_for)]);
        assert_eq!(Arc::strong_count(&waited_for), 1);
    }
}
