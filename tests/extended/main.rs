//! The extended tests, which only `make test-all` runs: they need more packages than `make test` installs.
//! `tests/README.md` says what belongs here.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

mod sql_clients;
