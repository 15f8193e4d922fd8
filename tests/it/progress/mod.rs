//! The progress service: items that count once, one completion for each project, on Redis and on PostgreSQL.

mod access;
mod archive;
mod changes;
mod crashes;
mod damage;
mod deleted_accounts;
mod failover;
mod finish_line;
pub(crate) mod fixture;
mod items;
mod limits;
mod lost;
mod outage;
mod repeats;
mod retention;
mod streams;
