//! The embedded PostgreSQL over TCP: with the password of the role for programs, on this machine, and with few rights.

use std::os::unix::fs::PermissionsExt;

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection, PgConnection};

use crate::guides::free_port;
use crate::server::process::{ADMIN_KEY, DataFolder, run, up};

async fn connect(url: &str) -> sqlx::Result<PgConnection> {
    // Without the environment and the password file of the developer.
    let options: PgConnectOptions = url.parse()?;
    options.ssl_mode(sqlx::postgres::PgSslMode::Disable).connect().await
}

async fn execute(connection: &mut PgConnection, statement: &'static str) -> Result<(), String> {
    let result = sqlx::raw_sql(statement).execute(connection).await;
    result.map(|_| ()).map_err(|error| error.to_string())
}

#[tokio::test]
async fn programs_connect_over_tcp_with_a_password_and_may_post_and_create_tables_only() {
    let (folder, port) = (DataFolder::new(), free_port().to_string());
    let environment = [("PILLARBOX_ADMIN_KEY", ADMIN_KEY), ("PILLARBOX_POSTGRES_PORT", port.as_str())];
    let mut process = up(&folder, &environment);
    process.base_url().await;
    let file = folder.path().join("postgres.url");
    let url = std::fs::read_to_string(&file).unwrap();
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600, "others must not read it");
    let password = url.split([':', '@']).nth(2).unwrap();
    assert_eq!(password.len(), 64, "{url}");

    let mut program = connect(url.trim()).await.unwrap();
    for allowed in [
        "create table orders (id int primary key)",
        "begin; insert into orders values (1);
         select pillarbox.post('order.created', '{}', key => 1); commit",
    ] {
        execute(&mut program, allowed).await.unwrap();
    }
    for forbidden in [
        "select * from pillarbox.log",
        "select * from pillarbox_admin.api_key",
        "create role other",
        "copy orders to program 'true'",
        // It would be found by a superuser's session, whose search path is `public`.
        "create table public.orders (id int)",
        "set role pillarbox",
    ] {
        let error = execute(&mut program, forbidden).await.unwrap_err();
        assert!(error.contains("permission denied") || error.contains("must be superuser"), "{forbidden}: {error}");
    }
    let address = format!("127.0.0.1:{port}/pillarbox");
    for stranger in [
        format!("postgresql://pillarbox_app@{address}"),
        format!("postgresql://pillarbox_app:guess@{address}"),
        format!("postgresql://pillarbox@{address}"),
        format!("postgresql://pillarbox:{password}@{address}"),
    ] {
        let error = connect(&stranger).await.unwrap_err().to_string();
        assert!(error.contains("password") || error.contains("pg_hba.conf"), "{stranger}: {error}");
    }

    // Commands and the socket follow the port.
    let (code, status, error) = run(&["status", "--data-dir", folder.text()], &[]);
    assert_eq!(code, Some(0), "{status}{error}");
    assert!(status.contains(&format!("&port={port}&")) && status.contains("postgres.url"), "{status}");
    for text in [status.as_str(), &process.logs()] {
        assert!(!text.contains(password), "the password is in the file only");
    }
    assert!(process.terminate().await.success());

    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    process.base_url().await;
    assert!(!file.exists());
    let can_login = "select rolcanlogin from pg_roles where rolname = 'pillarbox_app'";
    let can_login: bool = sqlx::query_scalar(can_login).fetch_one(&folder.database().await).await.unwrap();
    assert!(!can_login, "without the setting, the role may not log in");
    assert!(process.terminate().await.success());
    program.close().await.ok();
}

#[tokio::test]
async fn a_port_that_is_in_use_is_refused_with_the_name_of_the_setting() {
    let folder = DataFolder::new();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port().to_string();
    let arguments = ["up", "--listen", "127.0.0.1:0", "--data-dir", folder.text(), "--postgres-port", &port];
    let (code, _, error) = run(&arguments, &[]);
    assert_ne!(code, Some(0));
    assert!(error.contains(&format!("postgres_port: 127.0.0.1:{port} cannot be used")), "{error}");
    assert!(error.contains("choose another port"), "{error}");
}
