//! Tokens that were verified recently, and sessions that have ended.
//!
//! Verifying a signature takes longer than most small requests. A token that was verified is therefore remembered by its
//! digest, for a bounded time and in a bounded number. The token of a session that ended in this process is refused at
//! once; other processes accept it until it expires, at most [`SESSION_TOKEN_TTL_MAX`] later.

use std::time::Duration;

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use uuid::Uuid;

use super::SESSION_TOKEN_TTL_MAX;
use crate::caller::Caller;
use runtime::secret::digest;

/// The number of remembered tokens, of about 300 bytes each.
const TOKENS_MAX: u64 = 20_000;
/// How long a token is remembered.
const REMEMBERED: Duration = Duration::from_secs(300);
/// The number of remembered ended sessions, of about 100 bytes each. If more sessions end within the lifetime of a token,
/// the tokens of the earliest are accepted until they expire.
const ENDED_SESSIONS_MAX: u64 = 100_000;

#[derive(Clone)]
struct VerifiedToken {
    caller: Caller,
    /// The first second in which the token is no longer valid, in seconds since 1970.
    invalid_from: i64,
}

pub(super) struct TokenCache {
    verified: Cache<[u8; 32], VerifiedToken>,
    ended_sessions: Cache<Uuid, ()>,
}

impl TokenCache {
    pub(super) fn new() -> TokenCache {
        TokenCache {
            verified: Cache::builder().max_capacity(TOKENS_MAX).time_to_live(REMEMBERED).build(),
            ended_sessions: Cache::builder()
                .max_capacity(ENDED_SESSIONS_MAX)
                // The newest entry is always accepted.
                .eviction_policy(EvictionPolicy::lru())
                // A token may have been signed in the moment before its session ended.
                .time_to_live(SESSION_TOKEN_TTL_MAX + Duration::from_secs(60))
                .build(),
        }
    }

    /// Returns the caller of a remembered token that is still valid. `time_for` returns the time by which the token of a
    /// session, or one without a session, expires.
    pub(super) fn find(&self, token: &str, time_for: impl Fn(Option<Uuid>) -> i64) -> Option<Caller> {
        let VerifiedToken { caller, invalid_from } = self.verified.get(&digest(token))?;
        (time_for(caller.session) < invalid_from && !self.has_ended(&caller)).then_some(caller)
    }

    pub(super) fn insert(&self, token: &str, caller: Caller, invalid_from: i64) {
        self.verified.insert(digest(token), VerifiedToken { caller, invalid_from });
    }

    pub(super) fn end_session(&self, session: Uuid) {
        self.ended_sessions.insert(session, ());
    }

    /// Returns true if the session of the token has ended in this process.
    pub(super) fn has_ended(&self, caller: &Caller) -> bool {
        caller.session.is_some_and(|session| self.ended_sessions.contains_key(&session))
    }
}
