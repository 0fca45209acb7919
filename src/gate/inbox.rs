//! The writer's inbox.
//!
//! All senders put into one list, in one order, and the writer takes the whole list at once. It is woken only when it
//! sleeps, and not for what can ride along with the next turn: that every answer is followed by the word that it
//! arrived would otherwise cost a wake-up and a turn for each.

use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// After something was handed out, the writer looks once more after this time for what did not wake it: the word that
/// the answers have arrived. What comes in even later waits for the writer's next tick.
const QUIET_FOR: Duration = Duration::from_millis(10);

/// The two ends of a new inbox.
pub(super) fn inbox<T>() -> (Inbox<T>, Messages<T>) {
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            list: Vec::new(),
            is_urgent: false,
            sleeps: false,
            is_closed: false,
        }),
        arrived: Condvar::new(),
    });
    let messages = Messages {
        shared: Arc::clone(&shared),
        taken: Vec::new().into_iter(),
        is_lively: false,
    };
    (Inbox { shared }, messages)
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
    /// Something in the list is not to wait.
    is_urgent: bool,
    /// The writer sleeps until it is woken.
    sleeps: bool,
    /// One end is gone.
    is_closed: bool,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
        let mut state = self.shared.lock();
        if state.is_closed {
            return Err(Closed);
        }
        state.list.push(message);
        state.is_urgent = true;
        let wake = std::mem::take(&mut state.sleeps);
        drop(state);
        if wake {
            self.shared.arrived.notify_one();
        }
        Ok(())
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

/// The writer's end.
#[derive(Debug)]
pub(super) struct Messages<T> {
    shared: Arc<Shared<T>>,
    /// Taken out of the list and not handed out yet.
    taken: std::vec::IntoIter<T>,
    /// Something was handed out since the last sleep.
    is_lively: bool,
}

impl<T> Messages<T> {
    /// The next message, without waiting.
    pub(super) fn try_recv(&mut self) -> Option<T> {
        if self.taken.as_slice().is_empty() {
            let mut state = self.shared.lock();
            self.taken = take_all(&mut state);
        }
        let next = self.taken.next();
        self.is_lively |= next.is_some();
        next
    }

    /// The next message, as soon as there is an urgent one; the first of whatever is there after `wait`.
    ///
    /// # Errors
    /// Nothing is there after that time, or the senders are gone.
    pub(super) fn recv_timeout(&mut self, wait: Duration) -> Result<T, RecvTimeoutError> {
        if self.taken.as_slice().is_empty() {
            let until = Instant::now() + wait;
            if std::mem::take(&mut self.is_lively) && QUIET_FOR < wait {
                self.sleep(Instant::now() + QUIET_FOR);
            }
            if self.taken.as_slice().is_empty() {
                self.sleep(until);
            }
        }
        match self.try_recv() {
            Some(message) => Ok(message),
            None if self.shared.lock().is_closed => Err(RecvTimeoutError::Disconnected),
            None => Err(RecvTimeoutError::Timeout),
        }
    }

    /// Sleeps until something urgent is there, at most until then, and takes all that is there.
    fn sleep(&mut self, until: Instant) {
        let mut state = self.shared.lock();
        while !state.is_urgent && !state.is_closed {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state.sleeps = true;
            state = self
                .shared
                .arrived
                .wait_timeout(state, left)
                .map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
        }
        state.sleeps = false;
        self.taken = take_all(&mut state);
    }
}

impl<T> Drop for Messages<T> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_closed = true;
        let rest = take_all(&mut state);
        drop(state);
        // Whoever waits for an answer hears now that there will be none.
        drop(rest);
    }
}

fn take_all<T>(state: &mut State<T>) -> std::vec::IntoIter<T> {
    state.is_urgent = false;
    // The next list is as long as this one, in all likelihood.
    let next = Vec::with_capacity(state.list.len());
    std::mem::replace(&mut state.list, next).into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing is ever told by its end: a message that wakes nobody makes the test hang.
    const LONG: Duration = Duration::from_secs(86_400);

    /// What does not wake the writer keeps its place in the order, and comes by itself when nothing else does.
    #[test]
    fn messages_keep_their_order_and_quiet_ones_wait() {
        let (inbox, mut messages) = inbox();
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
        assert_eq!(messages.recv_timeout(LONG), Ok(4), "without being woken");
        assert_eq!(messages.try_recv(), None);
        drop(inbox);
        assert_eq!(
            messages.recv_timeout(LONG),
            Err(RecvTimeoutError::Disconnected)
        );
    }

    /// Without the writer nothing is taken, and what it had not taken is dropped, so that nobody waits for an answer.
    #[test]
    fn an_inbox_without_a_writer_takes_nothing() {
        let (inbox, messages) = inbox();
        let waited_for = Arc::new(());
        inbox.put(Arc::clone(&waited_for)).unwrap();
        drop(messages);
        assert!(inbox.put(Arc::clone(&waited_for)).is_err());
        inbox.put_quietly([Arc::clone(&waited_for)]);
        assert_eq!(Arc::strong_count(&waited_for), 1);
    }
}
