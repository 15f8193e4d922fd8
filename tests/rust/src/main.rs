//! Inserts an order and posts a message about it in one transaction. Prints the id of the message.

use std::env;
use std::error::Error;

use serde_json::json;
use tokio_postgres::NoTls;
use uuid::Uuid;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let message_id: Uuid = env::var("MESSAGE_ID")?.parse()?;
    let (mut client, connection) = tokio_postgres::connect(&env::var("DATABASE_URL")?, NoTls).await?;
    tokio::spawn(connection); // ends when `client` is dropped
    let transaction = client.transaction().await?;
    transaction.batch_execute("create table if not exists tokio_orders (id bigint primary key)").await?;
    transaction.execute("insert into tokio_orders values ($1) on conflict do nothing", &[&5_i64]).await?;
    let posted: Uuid = transaction
        .query_one(
            "select pillarbox.post('order.created', $1::jsonb, key => $2::bigint, aggregate_type => $3,
                                   aggregate_id => $4::bigint, headers => $5, message_id => $6)",
            &[&json!({"id": 5}), &5_i64, &"ORDER", &5_i64, &json!({"team": "blue"}), &message_id],
        )
        .await?
        .get(0);
    transaction.commit().await?;
    println!("{posted}");
    Ok(())
}
