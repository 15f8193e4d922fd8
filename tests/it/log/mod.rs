//! Proves that the log accepts valid messages only, that each committed message is read once and in order, and that
//! retention drops nothing that a consumer still needs.

mod advisory_locks;
mod chosen_ids;
mod hostile_producer;
mod nested;
mod post_function;
mod posting;
mod reading;
mod retention;
