//! Runs the statements that the test writes to standard input.
//!
//! Each line is a transaction: `commit` or `rollback`, a statement, and its values as `KIND VALUE`, separated by tabs. The answer is
//! one line: the id of the message, `error: ...`, or `unsupported` if the client has no such kind of value.

use std::env;
use std::error::Error;
use std::io::stdin;

use serde_json::Value;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, NoTls};
use uuid::Uuid;

const LOCK_FILE: &str = include_str!("../../rust/Cargo.lock");

type Argument = Box<dyn ToSql + Sync>;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (mut client, connection) = tokio_postgres::connect(&env::var("DATABASE_URL")?, NoTls).await?;
    tokio::spawn(connection); // ends when `client` is dropped
    println!("{}", version().ok_or("the lock file has no tokio-postgres")?);
    for line in stdin().lines() {
        let line = line?;
        let fields: Vec<&str> = line.split('\t').collect();
        let [end, sql, arguments @ ..] = &fields[..] else { return Err("a line has an end and a statement".into()) };
        let arguments: Option<Vec<Argument>> = arguments.iter().map(|argument| parsed(argument)).collect();
        match arguments {
            None => println!("unsupported"),
            Some(arguments) => match post(&mut client, sql, &arguments, *end == "commit").await {
                Ok(id) => println!("{id}"),
                Err(error) => println!("error: {}", described(&error)),
            },
        }
    }
    Ok(())
}

async fn post(
    client: &mut Client,
    sql: &str,
    arguments: &[Argument],
    commits: bool,
) -> Result<Uuid, tokio_postgres::Error> {
    let arguments: Vec<_> = arguments.iter().map(|argument| &**argument).collect();
    let transaction = client.transaction().await?;
    transaction.batch_execute("insert into orders default values").await?; // the change that the message reports
    let id = transaction.query_one(sql, &arguments).await?.get(0);
    if commits {
        transaction.commit().await?
    } else {
        transaction.rollback().await?
    }
    Ok(id)
}

fn parsed(argument: &str) -> Option<Argument> {
    let (kind, value) = argument.split_once(' ')?;
    Some(match kind {
        "text" => Box::new(value.to_owned()),
        "integer" => Box::new(value.parse::<i64>().ok()?),
        "uuid" => Box::new(value.parse::<Uuid>().ok()?),
        "object" => Box::new(serde_json::from_str::<Value>(value).ok()?),
        "null" => match value {
            "jsonb" => Box::new(None::<Value>),
            "uuid" => Box::new(None::<Uuid>),
            _ => Box::new(None::<String>),
        },
        _ => return None,
    })
}

/// The cause says more than the error.
fn described(error: &tokio_postgres::Error) -> String {
    let cause = error.source().map(ToString::to_string).unwrap_or_default();
    format!("{error}: {cause}").lines().next().unwrap_or_default().to_owned()
}

fn version() -> Option<&'static str> {
    let (_, package) = LOCK_FILE.split_once("name = \"tokio-postgres\"\nversion = \"")?;
    package.split('"').next()
}
