//! The exchange of a refresh token for a new one, and how the reuse of an old one is recognised.
//!
//! A session has one current token. The exchange replaces it; its child becomes the current one. A client that lost the
//! answer repeats the request within a short grace. It gets another child, which replaces the one that was lost,
//! so there is still one current token. A replaced token that is presented in any other case was copied, and another client
//! has the current one or had it: the session ends.

use chrono::{DateTime, TimeDelta, Utc};

use super::Session;

/// A refresh token that was presented, with what is stored about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct PresentedToken {
    pub(crate) expires_at: DateTime<Utc>,
    pub(crate) replaced_at: Option<DateTime<Utc>>,
    /// Whether the current token of the session was issued for this one. The current token has not been used, because using
    /// it would have replaced it.
    pub(crate) is_parent_of_current: bool,
}

/// The outcome of presenting a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refresh {
    /// It is current and is replaced by a new one.
    Exchange,
    /// It is presented again within the grace: the current token is replaced by a new one.
    Repeat,
    /// It or its session has expired.
    Expired,
    /// It was replaced before: the session ends.
    Reused,
}

pub(crate) fn refresh(token: PresentedToken, session: &Session, grace: TimeDelta, now: DateTime<Utc>) -> Refresh {
    match token.replaced_at {
        _ if now >= session.expires_at => Refresh::Expired,
        None if now >= token.expires_at => Refresh::Expired,
        None => Refresh::Exchange,
        Some(replaced_at) if token.is_parent_of_current && now < replaced_at + grace => Refresh::Repeat,
        Some(_) => Refresh::Reused,
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    const GRACE: TimeDelta = TimeDelta::seconds(10);

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_000_000 + seconds, 0).unwrap()
    }

    fn token(replaced_at: Option<i64>, is_parent_of_current: bool) -> PresentedToken {
        PresentedToken { expires_at: at(100), replaced_at: replaced_at.map(at), is_parent_of_current }
    }

    fn refresh(token: PresentedToken, grace: TimeDelta, now: DateTime<Utc>) -> Refresh {
        let (id, user_id) = (Uuid::nil(), Uuid::nil());
        let session = Session { id, user_id, user_agent: None, created_at: at(0), expires_at: at(200) };
        super::refresh(token, &session, grace, now)
    }

    #[test]
    fn a_current_token_is_exchanged_until_it_or_its_session_expires() {
        assert_eq!(refresh(token(None, false), GRACE, at(99)), Refresh::Exchange);
        assert_eq!(refresh(token(None, false), GRACE, at(100)), Refresh::Expired);
        let longer = PresentedToken { expires_at: at(300), ..token(None, false) };
        assert_eq!(refresh(longer, GRACE, at(199)), Refresh::Exchange);
        assert_eq!(refresh(longer, GRACE, at(200)), Refresh::Expired);
    }

    #[test]
    fn a_replaced_token_may_be_repeated_only_within_the_grace_and_while_its_child_is_unused() {
        assert_eq!(refresh(token(Some(0), true), GRACE, at(9)), Refresh::Repeat);
        assert_eq!(refresh(token(Some(0), true), GRACE, at(10)), Refresh::Reused);
        assert_eq!(refresh(token(Some(0), false), GRACE, at(1)), Refresh::Reused);
        assert_eq!(refresh(token(Some(0), true), TimeDelta::zero(), at(0)), Refresh::Reused, "no grace");
        // A replaced token that has expired was still copied.
        assert_eq!(refresh(token(Some(0), false), GRACE, at(150)), Refresh::Reused);
    }
}
