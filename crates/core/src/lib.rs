//! What kvgate decides, as a deterministic state machine: no I/O, no clock, no floats, nothing
//! that depends on hash order.
//!
//! A [`turn::Turn`] takes commands in, changes the state by records and ends as a
//! [`batch::Batch`]. Only [`batch::Batch::commit`] gives out the effects of a turn, after a
//! [`store::Store`] made its records durable; a batch that could not be committed takes the state
//! that ran ahead of the store with it.
#![no_std]

extern crate alloc;

mod arena;
pub mod audit;
pub mod batch;
pub mod capacity;
pub mod close;
mod closes;
pub mod command;
mod decide;
pub mod decision;
pub mod decisions;
mod delivery;
pub mod effect;
pub mod event;
mod fanout;
mod few;
pub mod ids;
mod ledger;
mod lifecycle;
pub mod machine;
pub mod memory;
mod operate;
mod ordered;
mod pass;
pub mod policy;
mod presence;
mod queue;
mod read;
pub mod reading;
pub mod record;
mod renewals;
pub mod report;
mod sessions;
pub mod settings;
pub mod state;
mod steps;
pub mod store;
pub mod tally;
pub mod ticket;
mod tickets;
pub mod turn;
pub mod units;
pub mod view;
