//! `brain`: the daemon that owns the device and serves Gemma 4 with MTP speculative decoding.
//!
//! Data flows one way: a front end (`grpc`) lowers a request through `text` into tokens, the
//! `engine` thread asks the pure `sched` what to compute next, a `backend` computes it over the
//! `model`, and the tokens go into the generation's log, over which every stream is a cursor.

pub mod backend;
pub mod engine;
pub mod model;
pub mod sched;
pub mod text;
