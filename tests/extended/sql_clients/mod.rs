//! Thirteen clients of PostgreSQL post with each kind of value that they have, and docs/sql-clients.md has the results.

mod clients;
mod forms;

use std::fmt::Write;

use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use server::migrations;
use sqlx::AssertSqlSafe;
use testkit::TestDatabase;
use uuid::Uuid;

use clients::{Answer, CLIENTS, Client, Session};
use forms::{Argument, FORMS, Form, statement};

const PAGE: &str = include_str!("../../../docs/sql-clients.md");
const PARALLEL_MAX: usize = 3;

/// A row of the tables on the page.
struct Measured {
    client: String,
    /// One for each form.
    cells: Vec<Cell>,
}

#[derive(Clone, Copy, PartialEq)]
enum Cell {
    Works,
    NeedsCast,
    Fails,
    /// It posts another value than the one that was sent.
    Altered,
    /// The client has no such kind of value.
    Absent,
}

#[tokio::test]
async fn thirteen_clients_post_in_their_transactions_as_the_page_says() {
    let measured: Vec<Measured> = stream::iter(&CLIENTS).map(measure).buffered(PARALLEL_MAX).collect().await;
    let tables = [&["payload", "headers"][..], &["key", "aggregate_id", "message_id", "null"]]
        .map(|arguments| table(arguments, &measured));
    for table in &tables {
        assert!(PAGE.contains(table), "docs/sql-clients.md does not have this table:\n{}", tables.join("\n"));
    }
}

async fn measure(client: &Client) -> Measured {
    let database = TestDatabase::new(&migrations()).await;
    sqlx::raw_sql("create table orders (id bigint generated always as identity)")
        .execute(database.pool())
        .await
        .unwrap();
    let mut session = Session::start(client, &database.url()).await;
    let mut cells = Vec::new();
    for form in &FORMS {
        cells.push(measure_form(&mut session, form, &database).await);
    }
    let posted = count(&database, "pillarbox.log").await;
    assert!(posted > 0, "{}", client.name);

    let arguments = whole_message(&cells);
    let (sql, values) = statement("order.created", &arguments);
    let rolled_back = session.post("rollback", &sql, &values).await.posted();
    assert_eq!(stored(&database, rolled_back).await, Value::Null, "{}: the message was rolled back", client.name);
    let whole = session.post("commit", &sql, &values).await.posted();
    let expected = json!({
        "topic": "order.created", "key": "5", "aggregate_type": "ORDER", "aggregate_id": 5,
        "headers": {"team": "blue"}, "payload": {"id": 5},
    });
    assert_eq!(stored(&database, whole).await, expected, "{}", client.name);

    // A transaction that was refused or rolled back has left neither an order nor a message.
    assert_eq!(count(&database, "pillarbox.log").await, posted + 1, "{}", client.name);
    assert_eq!(count(&database, "orders").await, posted + 1, "{}", client.name);
    Measured { client: client.name.replace("{}", &session.version), cells }
}

async fn measure_form(session: &mut Session, form: &Form, database: &TestDatabase) -> Cell {
    for (has_cast, cell) in [(false, Cell::Works), (true, Cell::NeedsCast)] {
        let arguments: Vec<_> = form.arguments.iter().map(|argument| (argument, has_cast)).collect();
        let (sql, values) = statement("form.posted", &arguments);
        match session.post("commit", &sql, &values).await {
            Answer::Posted(id) if stored(database, id).await == form.expected() => return cell,
            Answer::Posted(_) => return Cell::Altered,
            Answer::Refused(error) => eprintln!("{} {}: {error}", session.version, form.name()),
            Answer::Unsupported => return Cell::Absent,
        }
    }
    Cell::Fails
}

/// The arguments of a whole message, each in a form that this client can post: with integers as key and aggregate id.
fn whole_message(cells: &[Cell]) -> Vec<(&'static Argument, bool)> {
    let find = |name: &str, kinds: &[&str], wanted: Cell| {
        let fits = |form: &Form| form.tested().name == name && kinds.contains(&form.tested().kind);
        let found = FORMS.iter().zip(cells).find(|(form, cell)| fits(form) && **cell == wanted);
        found.map(|(form, _)| (form.tested(), wanted == Cell::NeedsCast))
    };
    let find = |name, kinds: &[&str]| find(name, kinds, Cell::Works).or_else(|| find(name, kinds, Cell::NeedsCast));
    let arguments = [
        find("payload", &["object", "jsonb", "text"]),
        find("key", &["integer"]),
        Some((&forms::AGGREGATE_TYPE, false)),
        find("aggregate_id", &["integer"]),
        find("headers", &["object", "jsonb", "text"]),
        find("message_id", &["uuid", "text"]),
    ];
    arguments.map(|argument| argument.expect("each argument has a form that works")).to_vec()
}

/// The message with this id, as the log has it.
async fn stored(database: &TestDatabase, message_id: Uuid) -> Value {
    let query = "select jsonb_build_object('topic', topic, 'key', key, 'aggregate_type', aggregate_type,
                     'aggregate_id', aggregate_id, 'headers', headers, 'payload', payload)
                 from pillarbox.log where message_id = $1";
    let found = sqlx::query_scalar(query).bind(message_id).fetch_optional(database.pool()).await.unwrap();
    found.unwrap_or_default()
}

async fn count(database: &TestDatabase, table: &str) -> i64 {
    let query = AssertSqlSafe(format!("select count(*) from {table}"));
    sqlx::query_scalar(query).fetch_one(database.pool()).await.unwrap()
}

/// The columns of these arguments, as the page has them.
fn table(arguments: &[&str], measured: &[Measured]) -> String {
    let columns: Vec<usize> = (0..FORMS.len()).filter(|at| arguments.contains(&FORMS[*at].column)).collect();
    let mut table = String::from("| client |");
    for at in &columns {
        write!(table, " {} |", FORMS[*at].name()).unwrap();
    }
    table += &format!("\n|---|{}\n", "---|".repeat(columns.len()));
    for row in measured {
        write!(table, "| {} |", row.client).unwrap();
        for at in &columns {
            write!(table, " {} |", row.cells[*at].text()).unwrap();
        }
        table.push('\n');
    }
    table
}

impl Cell {
    fn text(self) -> &'static str {
        match self {
            Cell::Works => "yes",
            Cell::NeedsCast => "cast",
            Cell::Fails => "no",
            Cell::Altered => "altered",
            Cell::Absent => "–",
        }
    }
}
