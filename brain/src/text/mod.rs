//! Messages to tokens and tokens to messages: one path for every front end.
//!
//! Down: [`conversation`] → [`template`] (with [`guard`]) → [`tokenizer`]; or [`append`], which
//! continues a list of tokens. Up: tokens → [`visible`] ([`detok`], [`stop`]) → [`turn`] and [`args`];
//! [`stream`] is all of that in one.

mod admitted;
pub mod append;
pub mod args;
mod bounds;
pub mod conversation;
pub mod detok;
pub mod guard;
mod habits;
mod json;
pub mod markers;
pub mod model;
mod python;
pub mod schema;
pub mod stop;
pub mod stream;
mod strftime;
pub mod template;
#[cfg(test)]
pub(crate) mod testing;
pub mod tokenizer;
pub mod turn;
mod typing;
pub mod visible;
