//! Posts in the transaction of a change, and handles the message once.

use std::error::Error;
use std::time::Duration;

use pillarbox::{Message, Pillarbox, Tx, post, testing};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

#[derive(Serialize, Deserialize)]
struct OrderPaid {
    order: i64,
}

impl Message for OrderPaid {
    const TOPIC: &str = "order.paid";

    fn key(&self) -> Option<String> {
        Some(self.order.to_string())
    }
}

async fn write_invoice(tx: &mut Tx, paid: OrderPaid) -> Result<(), sqlx::Error> {
    let insert = sqlx::query("insert into public.invoice (order_id) values ($1)");
    insert.bind(paid.order).execute(&mut **tx).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    pillarbox::database::migrate(&pool.connect_options()).await?;
    let table = "create table public.invoice (order_id bigint primary key)";
    sqlx::query(table).execute(&pool).await?;
    let running = Pillarbox::new(pool.clone()).handler("invoices", write_invoice).start().await?;

    let mut rolled_back = pool.begin().await?;
    post(&mut rolled_back, &OrderPaid { order: 1 }).await?;
    rolled_back.rollback().await?;
    let mut tx = pool.begin().await?;
    post(&mut tx, &OrderPaid { order: 2 }).await?;
    tx.commit().await?;

    assert!(testing::wait_until_processed(&pool, "invoices", Duration::from_secs(30)).await?);
    let invoices: Vec<i64> = sqlx::query_scalar("select order_id from public.invoice").fetch_all(&pool).await?;
    println!("invoices: {invoices:?}");
    running.stop().await;
    Ok(())
}
