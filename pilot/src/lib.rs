//! pilot: durable agent runs.
//!
//! A run is an append-only journal of facts. [`run`] folds them into a state and decides what comes
//! next, without any I/O. [`driver`] commits each fact before it acts on it. [`journal`] keeps the
//! facts, [`brain`] talks to the model, [`tools`] act on the workspace.

pub mod brain;
pub mod cli;
pub mod commands;
pub mod config;
pub mod demo;
pub mod driver;
pub mod error;
pub mod journal;
pub mod run;
pub mod tools;
pub mod ui;
