//! Use cases, one transaction each. A password is hashed before the transaction begins.

pub(crate) mod account;
pub(crate) mod contact;
mod email;
pub(crate) mod login;
pub(crate) mod password;
pub(crate) mod request;
pub(crate) mod role;
pub(crate) mod session;
pub(crate) mod subscription;
mod throttle;

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use http_kit::auth::TokenVerifier;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

pub(crate) type Tx<'t> = Transaction<'t, Postgres>;

/// The client of a request.
#[derive(Debug, Clone)]
pub(crate) struct ClientInfo {
    /// None if the address is not known.
    pub(crate) network: Option<IpAddr>,
    pub(crate) user_agent: Option<String>,
}

/// The sessions that a transaction ends. Their tokens are refused by this process once it has committed.
#[derive(Debug, Clone, Default)]
pub(crate) struct EndedSessions(Arc<Mutex<Vec<Uuid>>>);

impl EndedSessions {
    fn add(&self, sessions: impl IntoIterator<Item = Uuid>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(sessions);
    }

    /// Call it after the commit.
    pub(crate) fn apply(&self, tokens: &TokenVerifier) {
        for session in self.0.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            tokens.end_session(session);
        }
    }
}
