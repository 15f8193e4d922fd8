//! `streams`: events that consumers pull.

use chrono::{DateTime, SecondsFormat, Utc};
use clap::{Args, Subcommand};
use http::Method;
use pillarbox::log::Tenant;
use serde_json::{Map, Value, json};

use crate::Failure;
use crate::api::{Api, ServerArgs};
use crate::table::{self, print_line};
use crate::{pages, time};

const PATH: &str = "/hub/v1/streams";

#[derive(Args)]
pub struct Streams {
    #[command(subcommand)]
    pub command: Command,
    /// The tenant
    #[arg(long, global = true, value_name = "NAME", default_value = "main")]
    pub tenant: Tenant,
    #[command(flatten)]
    pub server: ServerArgs,
}

#[derive(Subcommand)]
pub enum Command {
    /// List the streams by name, with their lag and readers
    List {
        /// Print lines of JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a stream with its positions, lag and readers as JSON
    Show {
        /// The name of the stream
        name: String,
    },
    /// Move the position of a stream; refused while readers have leases, unless --force ends them
    Seek(Seek),
    /// Delete a stream with its positions and readers
    Delete {
        /// The name of the stream
        name: String,
    },
}

#[derive(Args)]
#[command(group(clap::ArgGroup::new("target").required(true)))]
pub struct Seek {
    /// The name of the stream
    name: String,
    /// Continue with the first event posted at this time or later: RFC 3339, or a duration before now (30m, 2h, 7d)
    #[arg(long, value_name = "TIME", value_parser = time::parse, group = "target")]
    time: Option<DateTime<Utc>>,
    /// Continue after this event
    #[arg(long, value_name = "ID", group = "target")]
    event: Option<String>,
    /// Continue with the oldest event that is retained
    #[arg(long, group = "target")]
    oldest: bool,
    /// Continue with the next event that is posted
    #[arg(long, group = "target")]
    newest: bool,
    /// End the leases of readers
    #[arg(long)]
    force: bool,
}

impl Seek {
    /// The body of the same request over HTTP.
    fn body(&self) -> Value {
        let fields = [
            ("time", self.time.map(|at| json!(at.to_rfc3339_opts(SecondsFormat::Micros, true)))),
            ("event_id", self.event.as_ref().map(|id| json!(id))),
            ("position", self.oldest.then(|| json!("oldest"))),
            ("position", self.newest.then(|| json!("newest"))),
            ("force", self.force.then_some(Value::Bool(true))),
        ];
        let given = fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        Value::Object(given.collect::<Map<_, _>>())
    }
}

/// Lists, shows, moves or deletes streams over HTTP. Fails if the stream does not exist, or if the request is refused.
pub async fn run(api: &Api, command: Command) -> Result<(), Failure> {
    match command {
        Command::List { json } => list(api, json).await,
        Command::Show { name } => Ok(table::print_json(&api.get(&path_of(&name)).await?)?),
        Command::Seek(seek) => {
            let moved = api.post(&format!("{}/seek", path_of(&seek.name)), &seek.body()).await?;
            let lag = &moved["lag"]["messages"];
            Ok(print_line(&format!(
                "Moved the stream {}. {} to be read.",
                seek.name,
                table::count(lag, "message waits", "messages wait")
            ))?)
        }
        Command::Delete { name } => {
            api.send(Method::DELETE, &path_of(&name), None).await?;
            Ok(print_line(&format!("Deleted the stream {name}."))?)
        }
    }
}

fn path_of(name: &str) -> String {
    format!("{PATH}/{}", pages::encoded(name))
}

async fn list(api: &Api, json: bool) -> Result<(), Failure> {
    let mut streams = Vec::new();
    // The list has neither the lag nor the readers.
    for stream in pages::all(api, PATH, "").await? {
        streams.push(api.get(&path_of(stream["name"].as_str().unwrap_or_default())).await?);
    }
    if json {
        for stream in &streams {
            table::print_json(stream)?;
        }
        return Ok(());
    }
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let row = |stream: &Value| {
        let parts = stream["parts"].as_array().map_or(&[][..], Vec::as_slice);
        let lapsed = parts.iter().filter(|part| part["lapsed"] == true).count();
        let with_reader = parts.iter().filter(|part| part["reader"].is_string()).count();
        let lag = &stream["lag"];
        [
            text(&stream["name"]),
            text(&lag["messages"]),
            text(&lag["seconds"]),
            format!("{with_reader}/{}", parts.len()),
            lapsed.to_string(),
        ]
    };
    let rows: Vec<[String; 5]> = streams.iter().map(row).collect();
    Ok(table::print(["NAME", "LAG", "LAG SECONDS", "PARTS READ", "LAPSED"], &rows)?)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        seek: Seek,
    }

    #[test]
    fn a_seek_has_one_target_and_the_body_of_the_request() {
        let body = |args: &[&str]| {
            let args = [&["seek", "orders"], args].concat();
            Program::try_parse_from(args).map(|program| program.seek.body()).map_err(|error| error.kind())
        };
        let event = json!({"event_id": "evt_1", "force": true});
        assert_eq!(body(&["--event", "evt_1", "--force"]).unwrap(), event);
        assert_eq!(body(&["--oldest"]).unwrap(), json!({"position": "oldest"}));
        let time = body(&["--time", "2026-01-31T08:00:00Z"]).unwrap();
        assert_eq!(time, json!({"time": "2026-01-31T08:00:00.000000Z"}));
        assert_eq!(body(&[]), Err(clap::error::ErrorKind::MissingRequiredArgument));
        assert_eq!(body(&["--oldest", "--newest"]), Err(clap::error::ErrorKind::ArgumentConflict));
    }
}
