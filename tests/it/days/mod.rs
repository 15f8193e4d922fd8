//! Proves the promises that need days, on a database whose time the test moves: what retention deletes and what it must not,
//! consumers that are away for weeks, effects that happen once across midnight, responses that are repeated for a day, and a
//! process whose clock is wrong.

mod inbox;
mod log;
mod processes;
mod responses;
mod support;
