//! Operations: what operators see and repair, and periodic maintenance.

pub mod browse;
pub mod confidential;
pub mod cursors;
pub mod dead_letters;
pub mod maintenance;
pub mod parity;
pub mod parked;
pub mod recovery;
pub mod replays;
pub mod retention_hold;
pub mod status;
pub mod tail;
