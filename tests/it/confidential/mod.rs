//! Proves that the payload of a confidential message reaches its consumers only, and that it is blanked when they have
//! it, or when it has expired, and never before.

mod blanking;
mod deletion;
mod routes;
pub(crate) mod support;
mod views;
