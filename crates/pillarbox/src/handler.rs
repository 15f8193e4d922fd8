//! Typed handlers.

use std::future::Future;
use std::marker::PhantomData;

use sqlx::{Postgres, Transaction};

use crate::consumers::{Handler, HandlerError, HandlerFuture};
use crate::log;
use crate::message::FromLog;

/// Processes messages of one type: an `async fn`, or a type that has state.
///
/// Everything that it does in the transaction happens once for each message, and together with the posts in it. If it fails, the
/// transaction is rolled back; the message is tried again later, and later messages of its key wait. What it does outside of
/// the transaction can happen again.
///
/// The transaction has an empty search path, so name tables with their schemas: `public.orders`.
///
/// ```
/// use pillarbox::{Handle, HandlerError, Tx};
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct OrderPaid { order: i64 }
/// # impl pillarbox::Message for OrderPaid { const TOPIC: &str = "order.paid"; }
///
/// async fn write_invoice(tx: &mut Tx, order: OrderPaid) -> Result<(), sqlx::Error> {
///     sqlx::query("insert into public.invoice (order_id) values ($1)").bind(order.order).execute(&mut **tx).await?;
///     Ok(())
/// }
///
/// struct Invoices {
///     currency: String,
/// }
///
/// impl Handle<OrderPaid> for Invoices {
///     async fn handle(&self, tx: &mut Tx, order: OrderPaid) -> Result<(), HandlerError> {
///         let insert = sqlx::query("insert into public.invoice (order_id, currency) values ($1, $2)");
///         insert.bind(order.order).bind(&self.currency).execute(&mut **tx).await?;
///         Ok(())
///     }
/// }
/// # fn is_handler<M: pillarbox::FromLog>(_: impl Handle<M>) {}
/// # is_handler(write_invoice);
/// # is_handler(Invoices { currency: "EUR".to_owned() });
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a handler of `{M}`",
    note = "a handler is an `async fn(&mut Tx, {M}) -> Result<(), E>`, or a type that implements `Handle<{M}>`"
)]
pub trait Handle<M: FromLog>: Send + Sync + 'static {
    /// Processes one message.
    fn handle(&self, tx: &mut Tx, message: M) -> impl Future<Output = Result<(), HandlerError>> + Send;
}

/// The transaction of a handler.
pub type Tx = Transaction<'static, Postgres>;

/// An `async fn` that handles messages. The lifetime is that of the borrowed transaction; a bound on the function itself could not
/// name the type of its future.
#[doc(hidden)]
pub trait HandlerFn<'t, M>: Send + Sync {
    type Error: Into<HandlerError>;
    type Future: Future<Output = Result<(), Self::Error>> + Send + 't;

    fn call(&self, tx: &'t mut Tx, message: M) -> Self::Future;
}

impl<'t, M, F, R, E> HandlerFn<'t, M> for F
where
    F: Fn(&'t mut Tx, M) -> R + Send + Sync,
    R: Future<Output = Result<(), E>> + Send + 't,
    E: Into<HandlerError>,
{
    type Error = E;
    type Future = R;

    fn call(&self, tx: &'t mut Tx, message: M) -> R {
        self(tx, message)
    }
}

impl<M: FromLog, F> Handle<M> for F
where
    F: for<'t> HandlerFn<'t, M> + 'static,
{
    async fn handle(&self, tx: &mut Tx, message: M) -> Result<(), HandlerError> {
        self.call(tx, message).await.map_err(Into::into)
    }
}

/// A typed handler as the consumers run it.
pub(crate) struct Typed<H, M> {
    handler: H,
    message: PhantomData<fn() -> M>,
}

impl<H, M> Typed<H, M> {
    pub(crate) fn new(handler: H) -> Typed<H, M> {
        Typed { handler, message: PhantomData }
    }
}

impl<H: Handle<M>, M: FromLog + 'static> Handler for Typed<H, M> {
    fn handle<'t>(&'t self, tx: &'t mut Tx, message: &'t log::Message) -> HandlerFuture<'t> {
        Box::pin(async { self.handler.handle(tx, M::from_log(message)?).await })
    }
}
