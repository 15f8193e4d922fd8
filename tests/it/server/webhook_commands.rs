//! The commands about subscribers, deliveries, dead letters and e-mails, which talk to the server over HTTP.

use std::sync::Arc;

use base64::Engine;
use serde_json::{Value, json};
use testkit::{Receiver, Reply, eventually};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::{ServerConfig, crypto};

use crate::server::process::{ADMIN_KEY, DataFolder, admin_of, run, up};
use crate::support::{DEADLINE, text};

/// Runs a command on the installation of a folder. Fails unless it succeeds.
fn command(folder: &DataFolder, args: &[&str]) -> String {
    let (code, out, error) = run(&[args, &["--data-dir", folder.text()]].concat(), &[]);
    assert_eq!(code, Some(0), "{args:?}: {out}{error}");
    out
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

// The receiver responds while a command runs.
#[tokio::test(flavor = "multi_thread")]
async fn subscribers_are_managed_by_command_with_no_key_but_the_data_folder() {
    let (folder, receiver) = (DataFolder::new(), Receiver::start().await);
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let admin = admin_of(&process).await;
    let create =
        ["subscribers", "create", "--name", "shop", "--url", &receiver.url(), "--event-types", "order.*,user.*"];
    let fields = ["--field", "max_in_flight=4", "--field", "on_exhausted=block"];
    let made = &lines(&command(&folder, &[&create[..], &fields].concat()))[0];
    assert!(text(&made["secret"]).starts_with("whsec_"), "{made}");
    assert_eq!((&made["max_in_flight"], &made["on_exhausted"]), (&json!(4), &json!("block")));
    assert_eq!(made["event_types"], json!(["order.*", "user.*"]));
    let id = text(&made["id"]);
    let list = || command(&folder, &["subscribers", "list"]);
    assert!(list().contains(id) && list().contains("active") && list().contains("order.*, user.*"), "{}", list());
    command(&folder, &["subscribers", "pause", id]);
    assert!(list().contains("paused"), "{}", list());
    command(&folder, &["subscribers", "resume", id]);
    let tested = &lines(&command(&folder, &["subscribers", "test", id]))[0];
    assert_eq!(tested["delivered"], true, "{tested}");
    let changed =
        &lines(&command(&folder, &["subscribers", "update", id, "--name", "store", "--field", "max_in_flight=null"]))
            [0];
    assert_eq!((&changed["name"], &changed["event_types"]), (&json!("store"), &made["event_types"]), "{changed}");
    assert_ne!(changed["max_in_flight"], made["max_in_flight"]);
    let (code, _, error) = run(&["subscribers", "update", id, "--url", "nowhere", "--data-dir", folder.text()], &[]);
    assert!(code == Some(1) && error.matches("url").count() == 1, "the reason is printed once: {error}");
    assert_eq!(run(&["subscribers", "update", id, "--data-dir", folder.text()], &[]).0, Some(2), "nothing to change");
    command(&folder, &["subscribers", "update", id, "--name", "shop"]);
    for (search, expected) in [("SHO", 1), ("store", 0)] {
        let found = lines(&command(&folder, &["subscribers", "list", "--json", "--search", search]));
        assert_eq!(found.len(), expected, "{search}");
    }
    let rotated = &lines(&command(&folder, &["subscribers", "rotate-secret", id, "--overlap-hours", "0"]))[0];
    assert_ne!(rotated["secret"], made["secret"]);
    let shown = command(&folder, &["subscribers", "show", id]);
    assert!(shown.contains("\"name\":\"shop\"") && !shown.contains("whsec_"), "{shown}");
    assert_eq!(lines(&command(&folder, &["subscribers", "list", "--json"])).len(), 1);

    receiver.set_reply(|_| Reply::status(500));
    let (code, out, _) = run(&["subscribers", "test", id, "--data-dir", folder.text()], &[]);
    assert!(code == Some(1) && out.contains("\"delivered\":false"), "{out}");
    // Another tenant has other subscribers, and a tenant must exist.
    command(&folder, &["tenants", "create", "acme"]);
    let updated = &lines(&command(&folder, &["tenants", "update", "acme", "--display-name", "Acme Inc."]))[0];
    assert_eq!(updated["display_name"], "Acme Inc.", "{updated}");
    assert!(command(&folder, &["tenants", "list", "--search", "INC"]).contains("acme"));
    let send = ["send", "order.paid", "{}", "--tenant", "acme", "--data-dir", folder.text()];
    let (code, sent, error) = run(&send, &[("PILLARBOX_API_KEY", ADMIN_KEY)]);
    assert!(code == Some(0) && sent.contains("evt_"), "{sent}{error}");
    let of_acme = admin.with_header("pillarbox-tenant", "acme").get("/hub/v1/events").await.json();
    assert_eq!(of_acme["items"].as_array().unwrap().len(), 1, "{of_acme}");
    assert_eq!(lines(&command(&folder, &["subscribers", "list", "--json", "--tenant", "acme"])), Vec::<Value>::new());
    let (code, _, error) = run(&["subscribers", "list", "--tenant", "globex", "--data-dir", folder.text()], &[]);
    assert!(code == Some(1) && error.contains("globex"), "{error}");
    command(&folder, &["subscribers", "delete", id]);
    let (code, _, error) = run(&["subscribers", "show", id, "--data-dir", folder.text()], &[]);
    assert!(code == Some(1) && error.contains("there is no such subscriber"), "{error}");
    // The credentials of each command are gone.
    assert_eq!(admin.get("/hub/v1/portal-tokens").await.json()["items"], json!([]));
    // With a key and an address, no access to the data folder is needed.
    let env = [("PILLARBOX_API_KEY", ADMIN_KEY)];
    let remote = ["subscribers", "list", "--json", "--server", admin.base(), "--data-dir", "/nonexistent"];
    assert_eq!(run(&remote, &env), (Some(0), String::new(), String::new()));
    let (code, _, error) = run(&remote, &[("PILLARBOX_API_KEY", "pbx_a_key_that_is_not_known")]);
    assert!(code == Some(1) && error.contains("401"), "{error}");
    assert!(process.terminate().await.success());
}

/// Starts a proxy with TLS in front of a server, as installations have one. Returns its address and its certificate.
async fn start_tls_proxy(server: &str) -> (String, String) {
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let key = signing_key.serialize_der().try_into().unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("https://localhost:{}", listener.local_addr().unwrap().port());
    let server = server.trim_start_matches("http://").to_owned();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, server) = (acceptor.clone(), server.clone());
            tokio::spawn(async move {
                let Ok(mut client) = acceptor.accept(stream).await else { return };
                let mut server = TcpStream::connect(server).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    let text = base64::engine::general_purpose::STANDARD.encode(cert.der());
    (address, format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n"))
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_use_https_and_verify_the_certificate() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let (address, certificate) = start_tls_proxy(admin_of(&process).await.base()).await;
    let file = std::env::temp_dir().join(format!("pillarbox-{}.pem", uuid::Uuid::now_v7()));
    std::fs::write(&file, certificate).unwrap();
    let key = ("PILLARBOX_API_KEY", ADMIN_KEY);
    let trusted = [key, ("SSL_CERT_FILE", file.to_str().unwrap())];
    let args = |command: &[&'static str]| [command, &["--server"]].concat();
    for command in [args(&["subscribers", "list", "--json"]), args(&["send", "order.paid"])] {
        let command = [&command[..], &[&address]].concat();
        let (code, out, error) = run(&command, &trusted);
        assert_eq!(code, Some(0), "{out}{error}");
        let (code, _, error) = run(&command, &[key]);
        assert!(code == Some(1) && error.contains("certificate"), "no authority has signed it: {error}");
    }
    let (code, _, error) = run(&["subscribers", "list", "--server", "ftp://localhost"], &[key]);
    assert!(code == Some(1) && error.contains("https://example.org"), "{error}");
    std::fs::remove_file(file).unwrap();
    assert!(process.terminate().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_and_dead_letters_are_listed_retried_and_discarded_by_command() {
    let (folder, receiver) = (DataFolder::new(), Receiver::with_reply(|_| Reply::status(400)).await);
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let admin = admin_of(&process).await;
    let body = json!({"name": "shop", "url": receiver.url(), "event_types": ["order.*"]});
    assert_eq!(admin.post("/hub/v1/subscribers", body).await.status, 201);
    for n in 0..3 {
        let event = json!({"event_type": if n == 0 { "order.first" } else { "order.paid" }, "payload": {"n": n}});
        assert_eq!(admin.post("/hub/v1/events", event).await.status, 202);
    }
    let dead = async || lines(&command(&folder, &["webhook-dead-letters", "list", "--json"]));
    eventually("three dead letters", DEADLINE, async || dead().await.len() == 3).await;
    assert!(command(&folder, &["status"]).contains("3 webhooks: `pillarbox webhook-dead-letters list"));
    let listed = command(&folder, &["webhook-dead-letters", "list", "--event-type", "order.first"]);
    assert!(listed.lines().count() == 2 && listed.contains("refused"), "{listed}");
    let deliveries = lines(&command(&folder, &["deliveries", "list", "--json", "--outcome", "dead"]));
    assert_eq!(deliveries.len(), 3);
    assert_eq!(lines(&command(&folder, &["deliveries", "list", "--json", "--limit", "2"])).len(), 2);
    let shown = &lines(&command(&folder, &["deliveries", "show", text(&deliveries[0]["id"])]))[0];
    assert_eq!(shown["attempt_list"][0]["status"], 400, "{shown}");

    let of_type = |dead: Vec<Value>| dead.into_iter().find(|one| one["event_type"] == "order.paid").unwrap();
    let first = of_type(dead().await)["id"].clone();
    let shown = command(&folder, &["webhook-dead-letters", "show", text(&first)]);
    assert!(shown.contains("\"payload\""), "{shown}");
    assert!(
        command(&folder, &["webhook-dead-letters", "discard", text(&first)]).contains("1 dead letter is discarded.")
    );
    let (code, _, error) = run(&["webhook-dead-letters", "discard", "--data-dir", folder.text()], &[]);
    assert!(code == Some(2) && error.contains("--all"), "nothing is discarded by mistake: {error}");
    receiver.set_reply(|_| Reply::status(200));
    assert!(
        command(&folder, &["webhook-dead-letters", "retry", "--event-type", "order.paid"])
            .contains("1 webhook is sent again.")
    );
    eventually("the retry is delivered", DEADLINE, async || {
        lines(&command(&folder, &["deliveries", "list", "--json", "--outcome", "delivered"])).len() == 1
    })
    .await;
    assert!(command(&folder, &["webhook-dead-letters", "discard", "--all"]).contains("1 dead letter is discarded."));
    assert_eq!(dead().await.len(), 1, "the retried one is retained");
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn emails_are_listed_and_shown_by_command() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let admin = admin_of(&process).await;
    let account = json!({"email": "anna@example.org", "password": "correct horse battery staple", "name": "Anna"});
    let registered = testkit::Client::new(admin.base()).post("/identity/v1/register", account).await;
    assert!(registered.status < 300, "{registered:?}");
    let list = || lines(&command(&folder, &["mail", "list", "--json", "--to", "anna@example.org"]));
    eventually("the e-mail is captured", DEADLINE, async || list().iter().any(|mail| mail["status"] == "captured"))
        .await;
    let id = list()[0]["id"].to_string();
    let table = command(&folder, &["mail", "list", "--status", "captured"]);
    assert!(table.contains("anna@example.org") && table.starts_with("ID"), "{table}");
    assert_eq!(lines(&command(&folder, &["mail", "show", &id]))[0]["id"].to_string(), id);
    let (code, _, error) = run(&["mail", "show", "999999", "--data-dir", folder.text()], &[]);
    assert!(code == Some(1) && error.contains("no such e-mail"), "{error}");
    testkit::Client::new(admin.base()).get(&format!("/admin/v1/mail/{id}")).await.assert_problem(401, "unauthorized");
    assert!(process.terminate().await.success());
}

#[test]
fn completions_and_manual_pages_describe_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let (code, out, error) = run(&["completions", shell], &[]);
        assert_eq!(code, Some(0), "{error}");
        assert!(out.contains("webhook-dead-letters"), "{shell}");
    }
    let folder = DataFolder::new();
    let (code, _, error) = run(&["man", folder.text()], &[]);
    assert_eq!(code, Some(0), "{error}");
    for page in ["pillarbox.1", "pillarbox-subscribers-create.1", "pillarbox-demo.1"] {
        let text = std::fs::read_to_string(folder.path().join(page)).unwrap_or_else(|error| panic!("{page}: {error}"));
        assert!(text.starts_with(".") && text.contains("SYNOPSIS"), "{page}");
    }
    let (code, _, error) = run(&["man", "/dev/null/x"], &[]);
    assert!(code == Some(1) && error.contains("/dev/null/x"), "{error}");
}
