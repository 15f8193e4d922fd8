//! Posts a message together with a change, and handles it.
//!
//!     DATABASE_URL=postgres://localhost/example cargo run --example post_and_handle

use std::error::Error;
use std::time::Duration;

use pillarbox::{Message, Pillarbox, Tx, post, testing};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

#[derive(Serialize, Deserialize)]
struct OrderPaid {
    order: i64,
    cents: i64,
}

impl Message for OrderPaid {
    const TOPIC: &str = "order.paid";
}

/// Runs in a transaction. What it writes there happens once for each message.
async fn write_invoice(tx: &mut Tx, paid: OrderPaid) -> Result<(), sqlx::Error> {
    let insert = sqlx::query("insert into public.example_invoice (order_id, cents) values ($1, $2)");
    insert.bind(paid.order).bind(paid.cents).execute(&mut **tx).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    pillarbox::database::migrate(&pool.connect_options()).await?;
    sqlx::raw_sql(
        "create table if not exists public.example_order (id bigint primary key generated always as identity, cents bigint);
         create table if not exists public.example_invoice (order_id bigint primary key, cents bigint)",
    )
    .execute(&pool)
    .await?;
    let running = Pillarbox::new(pool.clone()).handler("example.invoices", write_invoice).start().await?;

    // The order and the message are committed together, or neither is.
    let mut tx = pool.begin().await?;
    let insert = "insert into public.example_order (cents) values (1250) returning id";
    let order: i64 = sqlx::query_scalar(insert).fetch_one(&mut *tx).await?;
    post(&mut tx, &OrderPaid { order, cents: 1250 }).await?;
    tx.commit().await?;

    assert!(testing::wait_until_processed(&pool, "example.invoices", Duration::from_secs(10)).await?);
    let query = "select cents from public.example_invoice where order_id = $1";
    let cents: i64 = sqlx::query_scalar(query).bind(order).fetch_one(&pool).await?;
    println!("the invoice of order {order} is about {cents} cents");
    running.stop().await;
    Ok(())
}
