//! The clients: each is a program that runs the statements which the test writes to its standard input.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use uuid::Uuid;

const TESTS: &str = env!("CARGO_MANIFEST_DIR");
/// `scripts/setup test-all` installs and builds them.
const PYTHON: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/extended-python/bin/python");
const NODE_PACKAGES: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/extended-node/node_modules");
const RUST_PROGRAM: &str = concat!(env!("CARGO_TARGET_TMPDIR"), "/rust/debug/examples/tokio-postgres-client");
const PGJDBC: &str = "/usr/share/java/postgresql.jar";
/// The slowest program compiles itself before it answers.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

pub(super) struct Client {
    /// `{}` is its version.
    pub(super) name: &'static str,
    /// The folder of its program in `tests/extended`.
    folder: &'static str,
    command: &'static [&'static str],
}

pub(super) const CLIENTS: [Client; 18] = [
    client("psycopg {}", "python", &[PYTHON, "psycopg_client.py"]),
    client("asyncpg {}", "python", &[PYTHON, "asyncpg_client.py"]),
    client("SQLAlchemy {}, psycopg", "python", &[PYTHON, "sqlalchemy_client.py", "psycopg"]),
    client("SQLAlchemy {}, psycopg2", "python", &[PYTHON, "sqlalchemy_client.py", "psycopg2"]),
    client("SQLAlchemy {}, pg8000", "python", &[PYTHON, "sqlalchemy_client.py", "pg8000"]),
    client("SQLAlchemy {}, asyncpg", "python", &[PYTHON, "sqlalchemy_client.py", "asyncpg"]),
    client("Django {}, psycopg", "python", &[PYTHON, "django_client.py"]),
    client("pg8000 {}", "python", &[PYTHON, "pg8000_client.py"]),
    client("node-postgres {}", "node", &["node", "pg.mjs"]),
    client("Knex {}", "node", &["node", "knex.mjs"]),
    client("TypeORM {}", "node", &["node", "typeorm.mjs"]),
    client("Drizzle {}, node-postgres", "node", &["node", "drizzle.mjs", "node-postgres"]),
    client("Drizzle {}, postgres.js", "node", &["node", "drizzle.mjs", "postgres-js"]),
    client("Prisma {}", "node", &["node", "prisma.mjs"]),
    client("postgres.js {}", "node", &["node", "postgres.mjs"]),
    client("tokio-postgres {}", "rust", &[RUST_PROGRAM]),
    client("pgjdbc {}", "java", &["java", "-cp", PGJDBC, "PgjdbcClient.java"]),
    client(
        "pgjdbc {}, `stringtype=unspecified`",
        "java",
        &["java", "-cp", PGJDBC, "PgjdbcClient.java", "stringtype=unspecified"],
    ),
];

/// A running program, in a separate folder with a copy of its files.
pub(super) struct Session {
    pub(super) version: String,
    name: &'static str,
    folder: PathBuf,
    program: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

pub(super) enum Answer {
    Posted(Uuid),
    Refused(String),
    Unsupported,
}

const fn client(name: &'static str, folder: &'static str, command: &'static [&'static str]) -> Client {
    Client { name, folder, command }
}

impl Session {
    pub(super) async fn start(client: &Client, database_url: &str) -> Session {
        let folder = std::env::temp_dir().join(format!("pillarbox-client-{}", Uuid::new_v4().simple()));
        fs::create_dir(&folder).unwrap();
        for file in fs::read_dir(format!("{TESTS}/extended/{}", client.folder)).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), folder.join(file.file_name())).unwrap();
        }
        // An ECMAScript module finds its packages in a folder above it only.
        symlink(NODE_PACKAGES, folder.join("node_modules")).unwrap();
        let mut program = Command::new(client.command[0]);
        program.args(&client.command[1..]).current_dir(&folder).env("DATABASE_URL", database_url).kill_on_drop(true);
        program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut program = program.spawn().unwrap_or_else(|error| {
            panic!("{}: {error} (`scripts/setup test-all` installs it)", client.command[0]);
        });
        let input = program.stdin.take().unwrap();
        let output = BufReader::new(program.stdout.take().unwrap()).lines();
        let mut session = Session { version: String::new(), name: client.name, folder, program, input, output };
        session.version = session.next_line().await;
        session
    }

    /// Runs a statement in a transaction of the client.
    pub(super) async fn post(&mut self, end: &str, sql: &str, values: &[String]) -> Answer {
        let line = [&[end.to_owned(), sql.to_owned()], values].concat().join("\t") + "\n";
        self.input.write_all(line.as_bytes()).await.unwrap();
        let answer = self.next_line().await;
        match answer.parse() {
            Ok(id) => Answer::Posted(id),
            Err(_) if answer == "unsupported" => Answer::Unsupported,
            Err(_) => match answer.strip_prefix("error: ") {
                Some(error) => Answer::Refused(error.to_owned()),
                None => panic!("{}: unexpected answer {answer:?}", self.name),
            },
        }
    }

    async fn next_line(&mut self) -> String {
        let line = tokio::time::timeout(ANSWER_TIME_MAX, self.output.next_line()).await;
        match line.unwrap_or_else(|_| panic!("{}: no answer in time", self.name)).unwrap() {
            Some(line) => line,
            None => {
                let mut errors = String::new();
                self.program.stderr.as_mut().unwrap().read_to_string(&mut errors).await.unwrap();
                panic!("{} has ended (`scripts/setup test-all` installs its packages): {errors}", self.name);
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

impl Answer {
    pub(super) fn posted(self) -> Uuid {
        match self {
            Answer::Posted(id) => id,
            Answer::Refused(error) => panic!("{error}"),
            Answer::Unsupported => panic!("the client has no such kind of value"),
        }
    }
}
