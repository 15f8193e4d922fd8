//! The in-app inbox: lists, exact counts, and streams that miss nothing.

mod counts;
mod idle_streams;
mod lost_numbers;
mod stream_client;
mod streams;
