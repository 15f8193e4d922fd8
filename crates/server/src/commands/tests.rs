//! Tests of the sources of settings: the settings file, variables and `--set` read the same values.

mod contexts;

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::load::load_with;
use super::{Command, InstallationCommand, LocalCommand, options};
use crate::services::SERVICES;
use crate::settings::Settings;

/// Loads the settings from a file, variables and arguments. Fails with the text that the user sees.
fn load(file: &str, variables: &[(&str, &str)], arguments: &[&str]) -> Result<Value, String> {
    let path = std::env::temp_dir().join(format!("pillarbox-settings-{}.toml", uuid::Uuid::new_v4()));
    std::fs::write(&path, file).unwrap();
    let path_text = path.to_str().unwrap();
    let cli = options::parse([&["pillarbox", "--config", path_text], arguments].concat());
    let (cli, _) = cli.map_err(|error| error.to_string())?;
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let loaded = load_with(&cli, variables, None).map_err(|error| error.to_string());
    std::fs::remove_file(path).unwrap();
    loaded.map(|settings| visible(&settings))
}

/// The settings as JSON. Secrets are replaced with their text, which their serialization hides.
fn visible(settings: &Settings) -> Value {
    let mut value = serde_json::to_value(settings).unwrap();
    let previous: Vec<&String> = settings.secret_keys_previous.iter().map(runtime::secret::Secret::reveal).collect();
    value["secret_keys_previous"] = json!(previous);
    value
}

/// The value of a setting such as `hub.export`.
fn value_of(settings: &Value, name: &str) -> Value {
    settings.pointer(&format!("/{}", name.replace('.', "/"))).cloned().unwrap_or(Value::Null)
}

/// A setting as a line of the file: a line in its section.
fn line_of(name: &str, value: &str) -> String {
    match name.rsplit_once('.') {
        Some((section, field)) => format!("[{section}]\n{field} = {value}"),
        None => format!("{name} = {value}"),
    }
}

fn variable_of(name: &str) -> String {
    format!("PILLARBOX_{}", name.to_uppercase().replace('.', "__"))
}

/// Text that is a JSON string, and thereby also a string of TOML.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

const KEY_1: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
const KEY_2: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";

/// Every list of plain values, as JSON and with commas.
fn plain_lists() -> Vec<(&'static str, Value, String)> {
    vec![
        ("services", json!(["events", "joins"]), "events, joins".to_owned()),
        ("roles", json!(["api", "maintain"]), "api,maintain".to_owned()),
        ("trusted_proxies", json!(["10.1.0.0/16", "fd00::/8"]), "10.1.0.0/16, fd00::/8".to_owned()),
        ("secret_keys_previous", json!([KEY_1, KEY_2]), format!("{KEY_1},{KEY_2}")),
        ("hub.allowed_networks", json!(["10.1.0.0/16", "::1/128"]), "10.1.0.0/16, ::1".to_owned()),
        ("hub.allowed_ports", json!([443, 8443]), "443,8443".to_owned()),
        ("hub.export", json!(["event.*", "join.confirmed"]), "event.*,join.confirmed".to_owned()),
        (
            "console.frame_ancestors",
            json!(["https://a.example", "http://localhost:3000"]),
            "https://a.example, http://localhost:3000".to_owned(),
        ),
        ("hub.sql_events", json!(["order.*", "bill.paid"]), "order.*,bill.paid".to_owned()),
        ("relay.enable_routes", json!(["notifications", "email"]), "notifications, email".to_owned()),
    ]
}

/// Every list of tables, as JSON: they have no form with commas.
fn lists_of_tables() -> Vec<(&'static str, Value)> {
    let route = json!([{"name": "all", "exchange": "all", "topics": "order.#, bill.#"}]);
    vec![
        ("issuers", json!([{"issuer": "https://a.example", "audience": "b", "jwks_file": "c"}])),
        ("relay.routes", route),
        ("relay.intake", json!([{"queue": "orders"}])),
        ("relay.topology.exchanges", json!([{"name": "orders"}])),
        ("relay.topology.queues", json!([{"name": "orders", "bindings": [{"exchange": "orders"}]}])),
    ]
}

#[test]
fn a_list_is_read_the_same_from_the_file_a_variable_and_an_option() {
    for (name, expected, with_commas) in plain_lists() {
        let json = expected.to_string();
        let spaced = json.replace(',', ", ");
        for text in [&json, &spaced, &with_commas] {
            let set = format!("{name}={text}");
            for (source, loaded) in [
                ("file", load(&line_of(name, &quoted(text)), &[], &[])),
                ("variable", load("", &[(&variable_of(name), text)], &[])),
                ("--set", load("", &[], &["--set", &set])),
            ] {
                let loaded = loaded.unwrap_or_else(|error| panic!("{source} {name} {text}: {error}"));
                let found = value_of(&loaded, name).to_string().replace("::1/128", "::1");
                assert_eq!(found, expected.to_string().replace("::1/128", "::1"), "{source} {name} {text}");
            }
        }
        let listed = load(&line_of(name, &json), &[], &[]).unwrap();
        let found = value_of(&listed, name).to_string().replace("::1/128", "::1");
        assert_eq!(found, expected.to_string().replace("::1/128", "::1"), "{name} as a list of TOML");
        for (source, empty) in
            [("variable", load("", &[(&variable_of(name), "[]")], &[])), ("file", load(&line_of(name, "[]"), &[], &[]))]
        {
            assert_eq!(value_of(&empty.unwrap(), name), json!([]), "{source} {name} without items");
        }
    }
}

#[test]
fn a_list_of_tables_is_read_the_same_from_the_file_a_variable_and_an_option() {
    for (name, value) in lists_of_tables() {
        let json = value.to_string();
        let set = format!("{name}={json}");
        let from_file =
            load(&line_of(name, &quoted(&json)), &[], &[]).unwrap_or_else(|error| panic!("{name}: {error}"));
        let found = value_of(&from_file, name);
        assert_eq!(found.as_array().map(Vec::len), Some(1), "{name}: {found}");
        for (field, given) in value[0].as_object().unwrap() {
            let is_list = found[0][field].is_array() && given.is_string();
            assert!(is_list || given.is_array() || found[0][field] == *given, "{name}.{field}: {found}");
        }
        assert_eq!(value_of(&load("", &[(&variable_of(name), &json)], &[]).unwrap(), name), found, "variable {name}");
        assert_eq!(value_of(&load("", &[], &["--set", &set]).unwrap(), name), found, "--set {name}");
    }
    let toml = load("", &[("PILLARBOX_RELAY__INTAKE", r#"[{queue = "orders", prefetch = 7}]"#)], &[]).unwrap();
    assert_eq!(toml["relay"]["intake"][0]["prefetch"], 7, "inline tables of TOML");
    let routes = load("", &[("PILLARBOX_RELAY__ROUTES", &lists_of_tables()[1].1.to_string())], &[]).unwrap();
    assert_eq!(routes["relay"]["routes"][0]["topics"], json!(["order.#", "bill.#"]), "a list inside of a table");
}

/// A new list setting belongs into the tables above.
#[test]
fn the_tables_contain_every_list_setting() {
    let defaults = serde_json::to_value(Settings::default()).unwrap();
    let mut lists = BTreeSet::new();
    let mut open = vec![(String::new(), defaults)];
    while let Some((path, value)) = open.pop() {
        match value {
            Value::Array(_) => drop(lists.insert(path)),
            Value::Object(fields) => {
                let below = |name: String| if path.is_empty() { name } else { format!("{path}.{name}") };
                open.extend(fields.into_iter().map(|(name, value)| (below(name), value)));
            }
            _ => {}
        }
    }
    // Their default is null instead of a list: loopback or nothing, and the default routes.
    lists.extend(["hub.allowed_networks", "relay.routes"].map(str::to_owned));
    let plain = plain_lists().into_iter().map(|(name, _, _)| name.to_owned());
    let tested: BTreeSet<String> =
        plain.chain(lists_of_tables().into_iter().map(|(name, _)| name.to_owned())).collect();
    assert_eq!(tested, lists);
}

#[test]
fn an_invalid_list_names_its_setting_and_quotes_no_secret() {
    for (name, text) in [
        ("roles", "api,king"),
        ("hub.allowed_ports", "443,many"),
        ("hub.allowed_networks", "[\"10.1.0.0/33\"]"),
        ("trusted_proxies", "10.1.0.0/16,proxy"),
        ("hub.export", "[\"event.*\""),
        ("relay.routes", "orders"),
        ("secret_keys_previous", "hunter2"),
    ] {
        for error in [
            load("", &[(&variable_of(name), text)], &[]).unwrap_err(),
            load("", &[], &["--set", &format!("{name}={text}")]).unwrap_err(),
            load(&line_of(name, &quoted(text)), &[], &[]).unwrap_err(),
        ] {
            assert!(error.contains(name) && !error.contains("hunter2"), "{name}={text}: {error}");
        }
    }
}

#[test]
fn a_setting_that_does_not_fit_to_another_names_both_values_and_their_origins() {
    let refused = |file: &str, variables: &[(&str, &str)], arguments: &[&str]| {
        load(file, variables, arguments).unwrap_err().replace(&std::env::temp_dir().display().to_string(), "")
    };
    assert_eq!(
        refused("", &[("PILLARBOX_POOL_MAX", "9")], &[]),
        "setting `pool_max` (set by PILLARBOX_POOL_MAX): must be 10 or more: not below pool_min, which is 10 (the default)"
    );
    assert_eq!(
        refused("", &[("PILLARBOX_POOL_MIN", "30")], &[]),
        "setting `pool_max`: must be 30 or more: not below pool_min, which is 30 (set by PILLARBOX_POOL_MIN)"
    );
    let error = refused("pool_min = 30", &[], &["--set", "pool_max=20"]);
    assert!(error.contains("`pool_max` (set with --set)") && error.contains("which is 30 (in /"), "{error}");
    let error = refused("log_days = 30", &[], &[]);
    assert!(error.starts_with("setting `behind_days`: must be 30 or more") && error.ends_with(".toml)"), "{error}");
    let error = refused("", &[("ENABLE_DUAL_PUBLISH", "perhaps")], &[]);
    assert!(error.contains("(set by ENABLE_DUAL_PUBLISH)"), "{error}");
}

#[test]
fn a_duration_is_read_the_same_from_the_file_a_variable_and_an_option() {
    for (name, text, expected) in [
        ("lease_ms", "20s", json!(20_000)),
        ("lease_ms", "20000", json!(20_000)),
        ("relay.poll_interval_ms", "500ms", json!(500)),
        ("events.trending_seconds", "5m", json!(300)),
        ("events.reconcile_minutes", "2h", json!(120)),
        ("log_days", "7d", json!(7)),
    ] {
        let set = format!("{name}={text}");
        for loaded in [
            load(&line_of(name, &quoted(text)), &[], &[]),
            load("", &[(&variable_of(name), text)], &[]),
            load("", &[], &["--set", &set]),
        ] {
            assert_eq!(value_of(&loaded.unwrap(), name), expected, "{name}={text}");
        }
    }
    for (name, text) in [("lease_ms", "soon"), ("events.trending_seconds", "1500ms"), ("log_days", "12h")] {
        for error in [
            load("", &[(&variable_of(name), text)], &[]).unwrap_err(),
            load(&line_of(name, &quoted(text)), &[], &[]).unwrap_err(),
        ] {
            assert!(error.contains(name) && error.contains("a duration such as"), "{name}={text}: {error}");
        }
    }
    let issuer = r#"[{"issuer": "https://a.example", "audience": "b", "jwks_file": "c", "token_hours_max": "2d"}]"#;
    let loaded = load("", &[("PILLARBOX_ISSUERS", issuer)], &[]).unwrap();
    assert_eq!(loaded["issuers"][0]["token_hours_max"], 48);
}

#[test]
fn options_accept_durations_and_short_addresses() {
    let token = |ttl: &str| {
        let user = "01890a5d-ac96-774b-bcce-b302099a8057";
        match options::parse(["pillarbox", "token", "--user", user, "--ttl", ttl]).map(|(cli, _)| cli.command) {
            Ok(Some(Command::Installation(InstallationCommand::Local(LocalCommand::Token { ttl, .. })))) => {
                Ok(ttl.as_secs())
            }
            Ok(_) => unreachable!("the command is `token`"),
            Err(error) => Err(error.to_string()),
        }
    };
    assert_eq!((token("1h"), token("90s"), token("3600"), token("1d")), (Ok(3_600), Ok(90), Ok(3_600), Ok(86_400)));
    for ttl in ["0", "25h", "2d", "soon", "-1", "500ms"] {
        assert!(token(ttl).is_err(), "{ttl}");
    }
    assert!(options::parse(["pillarbox", "reconcile", "--wait-seconds", "5m"]).is_ok());
    for (listen, expected) in [("8080", "127.0.0.1:8080"), ("localhost:8080", "127.0.0.1:8080")] {
        for loaded in [
            load("", &[], &["--listen", listen]),
            load("", &[], &["--set", &format!("listen={listen}")]),
            load("", &[("PILLARBOX_LISTEN", listen)], &[]),
            load(&format!("listen = '{listen}'"), &[], &[]),
        ] {
            assert_eq!(loaded.unwrap()["listen"], expected, "{listen}");
        }
    }
    assert_eq!(load("listen = 8080", &[], &[]).unwrap()["listen"], "127.0.0.1:8080");
    let error = load("", &[], &["--listen", "example.com"]).unwrap_err();
    assert!(error.contains("localhost:8080"), "{error}");
}

#[test]
fn the_alias_of_dual_publishing_is_overridden_by_the_name_of_the_setting() {
    let (alias, name) = ("ENABLE_DUAL_PUBLISH", "PILLARBOX_RELAY__ENABLE_DUAL_PUBLISH");
    let set = ["--set", "relay.enable_dual_publish=false"];
    for (variables, arguments, expected) in [
        (vec![], &[][..], false),
        (vec![(alias, "true")], &[], true),
        (vec![(alias, "true"), (name, "false")], &[], false),
        (vec![(name, "true"), (alias, "false")], &[], true),
        (vec![(alias, "true")], &set, false),
    ] {
        let settings = load("", &variables, arguments).unwrap();
        assert_eq!(value_of(&settings, "relay.enable_dual_publish"), json!(expected), "{variables:?} {arguments:?}");
    }
    let error = load("", &[(alias, "perhaps")], &[]).unwrap_err();
    assert!(error.contains("relay.enable_dual_publish"), "{error}");
}

#[test]
fn the_aliases_of_redis_name_the_state_of_projects_and_are_overridden_by_the_name_of_the_setting() {
    let (host, name) = (("REDIS_HOST", "cache"), "PILLARBOX_PROGRESS__REDIS_URL");
    let all = vec![host, ("REDIS_PORT", "6380"), ("REDIS_PASSWORD", "p@ss/w:1"), ("REDIS_STATE_DB", "3")];
    let address = |variables: &[(&str, &str)]| {
        let environment = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let (cli, _) = options::parse(["pillarbox", "status"]).unwrap();
        let settings = load_with(&cli, environment, None).map_err(|error| error.to_string())?;
        Ok::<_, String>(settings.progress.redis_url.map(|url| url.reveal().clone()))
    };
    assert_eq!(address(&[("REDIS_PORT", "6380")]), Ok(None), "without a host there is no Redis");
    assert_eq!(address(&[host]), Ok(Some("redis://cache:6379/1".to_owned())));
    assert_eq!(address(&all), Ok(Some("redis://:p%40ss%2Fw%3A1@cache:6380/3".to_owned())));
    assert_eq!(address(&[("REDIS_HOST", "::1")]), Ok(Some("redis://[::1]:6379/1".to_owned())));
    assert_eq!(address(&[host, (name, "redis://other/2")]), Ok(Some("redis://other/2".to_owned())));
    let path = std::env::temp_dir().join(format!("pillarbox-aliases-{}.toml", uuid::Uuid::new_v4()));
    std::fs::write(&path, "[progress]\nredis_url = 'redis://file/4'").unwrap();
    let (cli, _) = options::parse(["pillarbox", "--config", path.to_str().unwrap(), "status"]).unwrap();
    let in_file = load_with(&cli, vec![("REDIS_HOST".to_owned(), "cache".to_owned())], None).unwrap();
    std::fs::remove_file(path).unwrap();
    assert_eq!(in_file.progress.redis_url.map(|url| url.reveal().clone()), Some("redis://file/4".to_owned()));
    // As Kubernetes sets it for a service with the name redis.
    let error = address(&[host, ("REDIS_PORT", "tcp://10.0.0.1:6379")]).unwrap_err();
    assert!(error.contains("progress.redis_url") && error.contains("REDIS_PORT"), "{error}");
    assert!(address(&[host, ("REDIS_STATE_DB", "one")]).unwrap_err().contains("REDIS_STATE_DB"));
}

#[test]
fn the_alert_rules_use_metrics_that_exist() {
    let rules = include_str!("../../../../docs/alerts.yml");
    let of_services = SERVICES.iter().flat_map(|service| service.metrics());
    let known: BTreeSet<&str> =
        relay::METRICS.iter().chain(pillarbox::METRICS).chain(of_services).map(|(name, _)| *name).collect();
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let expressions = rules.lines().filter(|line| line.contains("_seconds") || line.contains("expr:"));
    let used: BTreeSet<&str> = expressions
        .flat_map(|line| line.split(|c| !is_part(c)))
        .filter(|word| word.starts_with("event_") || word.starts_with("pillarbox_"))
        .map(|word| word.strip_suffix("_bucket").unwrap_or(word))
        .collect();
    assert!(used.contains("event_publish_duration_seconds") && used.is_subset(&known), "{used:?}");
    assert!(used.contains("pillarbox_progress_redis_memory_ratio") && rules.contains("ratio > 0.8"), "{used:?}");
    for gauge in ["pillarbox_notifications_dead", "pillarbox_notifications_oldest_seconds", "pillarbox_mail_dead_total"]
    {
        assert!(used.contains(gauge), "no alert uses {gauge}");
    }
    assert!(rules.contains("histogram_quantile(0.99, ") && rules.contains(") > 0.1"), "p99 above 100 ms");
}

#[test]
fn the_page_about_the_command_line_has_every_command() {
    let page = include_str!("../../../../docs/cli.md");
    let command = options::command();
    let missing: Vec<&str> = command
        .get_subcommands()
        .map(clap::Command::get_name)
        .filter(|name| !page.lines().any(|line| line.starts_with('|') && line.contains(&format!("`{name}`"))))
        .collect();
    assert_eq!(missing, [""; 0], "add them to docs/cli.md");
}
