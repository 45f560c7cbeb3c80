//! `brain`: the daemon that owns the device and serves Gemma 4 with MTP speculative decoding.
//!
//! Data flows one way: a front end (`grpc`, `http`) lowers a request through `serving` and `text` into tokens, the
//! `engine` thread asks the pure `sched` what to compute next, a `backend` computes it over the
//! `model`, and the tokens go into the generation's log, over which every stream is a cursor.

pub mod backend;
pub mod bringup;
pub mod callers;
pub mod cli;
pub mod commands;
pub mod config;
pub mod constrain;
pub mod demo;
pub mod engine;
pub mod error;
pub mod grpc;
pub mod http;
pub mod hub;
pub mod inspect;
mod memory;
mod metrics;
pub mod model;
pub mod quantize;
pub mod sched;
pub mod server;
pub mod serving;
pub mod size;
pub mod snapshot;
pub mod text;
pub mod vllm;
