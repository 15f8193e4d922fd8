//! Tenants, the customers of an installation: managing, suspending and deleting them, acting for them, their portal tokens and
//! their limits.

mod acting;
mod api;
mod callers;
mod deletion;
mod limits;
mod portal;
mod producers;
mod routes;
mod suspension;
