//! What a run is, without any I/O: entries, the state they fold into, and what to do next.
//!
//! Nothing here knows a clock, a socket, a thread or a file (a test looks).

pub mod entry;
pub mod event;
