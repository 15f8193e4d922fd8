//! Typed messages: a Rust type that says its topic and its key.

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::to_raw_value;
use sqlx::{Postgres, Transaction};
use uuid::Uuid;

use crate::consumers::HandlerError;
use crate::log::{self, Post, PostError, Source, Tenant};

/// A type of message. Its JSON is the payload.
///
/// Messages are read long after they were written, also by older versions of a program. So add fields only, with a default.
///
/// ```
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Serialize, Deserialize)]
/// struct OrderPaid {
///     order: i64,
///     cents: i64,
/// }
///
/// impl pillarbox::Message for OrderPaid {
///     const TOPIC: &str = "order.paid";
///
///     fn key(&self) -> Option<String> {
///         Some(self.order.to_string())
///     }
/// }
/// ```
pub trait Message: Serialize + DeserializeOwned + Send {
    /// Letters, digits and `_` in parts joined by dots, such as `order.paid`.
    const TOPIC: &'static str;

    /// Who posts it. A handler receives messages of this source only, so programs that share a database choose different ones.
    /// Messages that are posted with the SQL function `pillarbox.post` have the source `sql`.
    const SOURCE: &'static str = "app";

    /// Messages with the same key are processed in the order of their posts. A message without a key waits for no other.
    fn key(&self) -> Option<String> {
        None
    }
}

/// Posts a message in the caller's transaction, and returns its id. Consumers see it if and when the transaction commits.
///
/// ```no_run
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct OrderPaid { order: i64 }
/// # impl pillarbox::Message for OrderPaid { const TOPIC: &str = "order.paid"; }
/// # async fn pay(pool: &sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin().await?;
/// sqlx::query("update public.orders set paid = true where id = 7").execute(&mut *tx).await?;
/// pillarbox::post(&mut tx, &OrderPaid { order: 7 }).await?;
/// tx.commit().await?;
/// # Ok(())
/// # }
/// ```
pub async fn post<M: Message>(tx: &mut Transaction<'_, Postgres>, message: &M) -> Result<Uuid, PostError> {
    let post = post_of(message)?;
    log::post(tx, &Source::new(M::SOURCE), &post).await
}

/// Returns the message as [`log::post()`] takes it, to set what the type does not say: the tenant, an id, an aggregate.
///
/// Fails with [`PostError::Database`] if the message cannot be written as JSON.
pub fn post_of<M: Message>(message: &M) -> Result<Post, PostError> {
    let payload = to_raw_value(message).map_err(|error| sqlx::Error::Encode(error.into()))?;
    Ok(Post { key: message.key(), ..Post::new(M::TOPIC, payload) })
}

/// What a handler can receive: a [`Message`], or a [`Received`] message.
pub trait FromLog: Sized + Send {
    /// The type of message.
    type Message: Message;

    /// Reads the message. Fails if its payload does not fit the type.
    fn from_log(message: &log::Message) -> Result<Self, HandlerError>;
}

impl<M: Message> FromLog for M {
    type Message = M;

    fn from_log(message: &log::Message) -> Result<M, HandlerError> {
        let payload = serde_json::from_str(message.payload.get());
        payload.map_err(|error| format!("the payload is not a valid `{}`: {error}", M::TOPIC).into())
    }
}

/// A message together with what the log knows about it, for handlers that need it.
#[derive(Debug, Clone)]
pub struct Received<M> {
    /// The id that [`post()`] has returned. It is the same in every redelivery, so other systems can recognise a repetition by it.
    pub id: Uuid,
    /// The tenant it was posted for.
    pub tenant: Tenant,
    /// When it was posted.
    pub at: DateTime<Utc>,
    /// The message.
    pub message: M,
}

impl<M: Message> FromLog for Received<M> {
    type Message = M;

    fn from_log(message: &log::Message) -> Result<Received<M>, HandlerError> {
        Ok(Received {
            id: message.message_id,
            tenant: message.tenant.parse()?,
            at: message.at,
            message: M::from_log(message)?,
        })
    }
}
