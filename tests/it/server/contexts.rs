//! Contexts of the command line: they switch commands between two installations, and servers ignore them.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use serde_json::Value;

use crate::server::process::{DataFolder, run, up};

#[tokio::test]
async fn a_context_switches_commands_between_installations_and_is_ignored_by_servers() {
    let (blue, green, config, elsewhere) = (DataFolder::new(), DataFolder::new(), DataFolder::new(), DataFolder::new());
    let (mut of_blue, mut of_green) = (up(&blue, &[]), up(&green, &[]));
    let (blue_url, green_url) = (of_blue.base_url().await, of_green.base_url().await);
    let env = [("XDG_CONFIG_HOME", config.text())];
    let command = |line: &str| run(&line.split_whitespace().collect::<Vec<_>>(), &env);
    let succeeds = |line: &str| {
        let (code, out, error) = command(line);
        assert_eq!(code, Some(0), "{line}: {out}{error}");
        (out, error)
    };

    succeeds(&format!("context add blue --data-dir {}", blue.text()));
    succeeds(&format!("context add green --data-dir {}", green.text()));
    let file = config.path().join("pillarbox/contexts.toml");
    assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o777, 0o600);

    for (name, url, other_url) in [("blue", &blue_url, &green_url), ("green", &green_url, &blue_url)] {
        succeeds(&format!("context use {name}"));
        let (status, error) = succeeds("status");
        assert!(status.contains(&**url) && !status.contains(&**other_url) && error.is_empty(), "{status}{error}");
        let (_, error) = succeeds(&format!("key create --role admin --name of-{name}"));
        assert!(error.starts_with(&format!("context {name}: data folder ")), "{error}");
    }
    let (keys, error) = succeeds("key list");
    assert!(keys.contains("of-green") && !keys.contains("of-blue") && error.is_empty(), "{keys}{error}");
    let (keys, _) = succeeds("key list --context blue");
    assert!(keys.contains("of-blue") && !keys.contains("of-green"), "{keys}");
    let (_, keys, _) = run(&["key", "list"], &[env[0], ("PILLARBOX_CONTEXT", "blue")]);
    assert!(keys.contains("of-blue") && !keys.contains("of-green"), "{keys}");
    let (keys, _) = succeeds(&format!("key list --data-dir {}", blue.text()));
    assert!(keys.contains("of-blue"), "a flag wins: {keys}");
    let (subscribers, _) = succeeds("subscribers list --json");
    assert_eq!(subscribers, "", "the server of the data folder answers");

    // A context with a server and the file of a key needs no data folder.
    let (key, _) = succeeds("key create --role admin --name of-http --context blue");
    let key_file = config.path().join("blue.key");
    std::fs::write(&key_file, key).unwrap();
    std::fs::set_permissions(&key_file, std::fs::Permissions::from_mode(0o600)).unwrap();
    succeeds(&format!("context add http --server {blue_url} --api-key-file {}", key_file.display()));
    let (_, error) = succeeds("send order.paid {} --context http");
    assert_eq!(error.trim(), format!("context http: {blue_url}"));
    succeeds("mail list --context http");
    let (keys, _) = succeeds("key list --context http");
    assert!(keys.contains("of-blue"), "{keys}");
    succeeds("parked list --context http");
    let (code, _, error) = command("parity --context http");
    assert!(code == Some(1) && error.contains("context http") && error.contains("--data-dir"), "{error}");
    assert!(!std::fs::read_to_string(&file).unwrap().contains("pbx_"), "the file contains no secret");

    // Servers use the settings file of their folder, which comes after the context for other commands.
    std::fs::create_dir(elsewhere.path()).unwrap();
    let server_error = |settings: &str, args: &[&str]| {
        std::fs::write(elsewhere.path().join("pillarbox.toml"), settings).unwrap();
        let output = testkit::command(testkit::program(), args, &env).current_dir(elsewhere.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let in_use = format!("data folder {} is in use", blue.text());
    for args in [&["up"][..], &[]] {
        let error = server_error(&format!("listen = '127.0.0.1:0'\ndata_dir = '{}'", blue.text()), args);
        assert!(error.contains(&in_use) && !error.contains(green.text()), "{args:?}: {error}");
    }
    let settings =
        format!("listen = '127.0.0.1:0'\ndatabase_url = 'postgres://127.0.0.1:1/x'\ndata_dir = '{}'", elsewhere.text());
    for args in [["serve"], ["migrate"]] {
        let error = server_error(&settings, &args);
        assert!(error.contains("127.0.0.1:1") && !error.contains("context"), "{args:?}: {error}");
    }
    let (code, _, error) = command("migrate --context green");
    assert!(code == Some(1) && error.contains("uses no context"), "{error}");

    assert!(of_blue.terminate().await.success());
    assert!(of_green.terminate().await.success());
}

#[test]
fn contexts_are_listed_shown_and_removed() {
    let folder = DataFolder::new();
    let file = folder.path().join("contexts.toml");
    let env = [("PILLARBOX_CONTEXTS", file.to_str().unwrap())];
    let command = |line: &str| run(&line.split_whitespace().collect::<Vec<_>>(), &env);
    let refused = |line: &str, says: &str| {
        let (code, _, error) = command(line);
        assert!(code.is_some_and(|code| code != 0) && error.contains(says), "{line}: {error}");
    };
    refused("context use prod", "context add prod");
    refused("context add prod", "--data-dir DIR");
    refused("context add prod --database-url postgres://h/n", "--config FILE");
    refused("context add prod --server http://me:hunter2@h", "without a user");
    refused("context add prod --config absent.toml", "absent.toml");
    refused("context add prod --server http://h:1 --api-key-file absent.key", "absent.key");
    assert!(!file.exists(), "a refused command writes nothing");

    let (code, _, error) = command("context add prod --data-dir relative --server http://127.0.0.1:1/");
    assert_eq!(code, Some(0), "{error}");
    refused("context add prod --server http://h:1", "context remove prod");
    refused("context use other", "prod");
    assert_eq!(command("context use prod").0, Some(0));
    let (_, listed, _) = command("context list --json");
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let data_dir = std::env::temp_dir().join("relative");
    assert_eq!(listed["data_dir"].as_str(), data_dir.to_str(), "the path is stored as an absolute one");
    assert_eq!((listed["name"].as_str(), listed["is_selected"].as_bool()), (Some("prod"), Some(true)));
    let (_, shown, _) = command("context show");
    assert!(
        shown.contains("prod (selected by `pillarbox context use`)") && shown.contains("http://127.0.0.1:1"),
        "{shown}"
    );
    let (code, _, error) = command("dead-letters discard --all --yes");
    assert!(code == Some(1) && error.starts_with("context prod: data folder "), "{error}");

    assert_eq!(command("context use --none").0, Some(0));
    assert!(command("context show").1.contains("No context is selected"));
    assert_eq!(command("context use prod").0, Some(0));
    assert_eq!(command("context remove prod").0, Some(0));
    assert!(command("context list").1.contains("There are no contexts"));
    assert!(command("context show").1.contains("No context is selected"));
}
