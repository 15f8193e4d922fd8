//! Support for tests of programs that use the library: call a handler without a running worker, and look at what a transaction
//! has posted.
//!
//! ```no_run
//! # #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
//! # struct OrderPaid { order: i64 }
//! # impl pillarbox::Message for OrderPaid { const TOPIC: &str = "order.paid"; }
//! # #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
//! # struct InvoiceWritten { order: i64 }
//! # impl pillarbox::Message for InvoiceWritten { const TOPIC: &str = "invoice.written"; }
//! use pillarbox::{Tx, testing};
//!
//! async fn write_invoice(tx: &mut Tx, order: OrderPaid) -> Result<(), pillarbox::HandlerError> {
//!     sqlx::query("insert into public.invoice (order_id) values ($1)").bind(order.order).execute(&mut **tx).await?;
//!     pillarbox::post(tx, &InvoiceWritten { order: order.order }).await?;
//!     Ok(())
//! }
//!
//! # async fn test(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! let mut tx = pool.begin().await?;
//! testing::handle(&write_invoice, &mut tx, &OrderPaid { order: 7 }).await?;
//! assert_eq!(testing::posted::<InvoiceWritten>(&mut tx).await?, [InvoiceWritten { order: 7 }]);
//! tx.rollback().await?;
//! # Ok(())
//! # }
//! ```

use std::time::Duration;

use chrono::Utc;
use serde_json::value::RawValue;
use sqlx::PgPool;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use crate::consumers::HandlerError;
use crate::handler::{Handle, Tx};
use crate::log;
use crate::message::{FromLog, Message, post_of};
use crate::operations::status;

/// The pause between two looks at the consumers.
const PAUSE: Duration = Duration::from_millis(20);

/// Calls a handler with a message, as a consumer does: the message is written as JSON and read again.
pub async fn handle<M: FromLog>(
    handler: &impl Handle<M>,
    tx: &mut Tx,
    message: &M::Message,
) -> Result<(), HandlerError> {
    handler.handle(tx, M::from_log(&as_in_the_log(message)?)?).await
}

/// Returns the message as a consumer would read it from the log, with a new id.
pub fn as_in_the_log<M: Message>(message: &M) -> Result<log::Message, HandlerError> {
    let post = post_of(message)?;
    post.check()?;
    Ok(log::Message {
        id: 1,
        shard: 0,
        message_id: Uuid::now_v7(),
        source: M::SOURCE.to_owned(),
        tenant: post.tenant.into(),
        topic: post.topic,
        key: post.key,
        aggregate_type: post.aggregate_type,
        aggregate_id: post.aggregate_id,
        headers: RawValue::from_string("{}".to_owned())?,
        payload: post.payload,
        at: Utc::now(),
    })
}

/// Returns the messages of a type that the transaction has posted so far, in their order.
pub async fn posted<M: Message>(tx: &mut Tx) -> sqlx::Result<Vec<M>> {
    let query = "select payload::text from pillarbox.log
                 where xid = pg_current_xact_id() and source = $1 and topic = $2 order by id";
    let payloads: Vec<String> = sqlx::query_scalar(query).bind(M::SOURCE).bind(M::TOPIC).fetch_all(&mut **tx).await?;
    let read = |payload: &String| serde_json::from_str(payload).map_err(|error| sqlx::Error::Decode(error.into()));
    payloads.iter().map(read).collect()
}

/// Waits until a consumer has processed everything that was posted before, and nothing is parked. Returns false if that takes
/// longer than `time_max`. For tests with a running process.
pub async fn wait_until_processed(db: &PgPool, consumer: &str, time_max: Duration) -> sqlx::Result<bool> {
    let started = Instant::now();
    loop {
        let consumers = status::consumers(db).await?;
        let is_done = |found: &status::ConsumerStatus| found.lag_messages == 0 && found.parked == 0;
        if consumers.iter().any(|found| found.consumer == consumer && is_done(found)) {
            return Ok(true);
        }
        if started.elapsed() > time_max {
            return Ok(false);
        }
        sleep(PAUSE).await;
    }
}
