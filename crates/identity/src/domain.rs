//! Accounts, refresh tokens, subscriptions and limits: the types, and the rules that decide.

mod account;
mod refresh;
mod subscription;
mod throttle;

pub use self::account::Role;
pub(crate) use self::account::{Account, Session, SessionView, TokenKind};
pub(crate) use self::refresh::{PresentedToken, Refresh, refresh};
pub(crate) use self::subscription::{Refused, Status, Subscription};
pub(crate) use self::throttle::{Attempts, Limit};
