//! Starts of the server: data folders, migrations, keys, and failures.

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use runtime::secret::MasterKey;
use serde_json::json;
use server::migrations;
use testkit::{Client, TestDatabase, eventually};

use crate::server::process::{ADMIN_KEY, DataFolder, admin_of, run, serve, up};

const MIB: u64 = 1024 * 1024;

#[tokio::test]
async fn an_instance_starts_quickly_stays_small_and_stops_cleanly() {
    let folder = DataFolder::new();
    let started = Instant::now();
    let mut first = up(&folder, &[]);
    let shown = first.wait_for_line(|line| line.contains("admin key pbx_"), Duration::from_secs(60)).await;
    // It creates a cluster and applies the migrations. On a busy machine both starts take longer.
    let first_took = started.elapsed();
    let key = shown.split_whitespace().last().unwrap().to_owned();
    assert_eq!(Client::new(&first.base_url().await).bearer(&key).get("/admin/v1/keys").await.status, 200);
    assert!(first.terminate().await.success());
    assert!(!folder.path().join("postgres/postmaster.pid").exists(), "the embedded PostgreSQL is stopped, too");

    let started = Instant::now();
    let mut again = up(&folder, &[]);
    let client = Client::new(&again.base_url().await);
    assert_eq!(client.get("/readyz").await.status, 200);
    let took = started.elapsed();
    assert!(took < Duration::from_secs(3).max(first_took / 4), "took {took:?}, the first start {first_took:?}");
    assert_eq!(client.bearer(&key).get("/admin/v1/keys").await.status, 200, "the first key still works");
    // Without the binary, of which a debug build has tens of MiB in memory.
    let allocated = again.allocated_bytes();
    assert!(allocated < 50 * MIB, "the idle process uses {} MiB", allocated / MIB);
    assert!(again.terminate().await.success());
    assert!(!again.logs().contains("pbx_"), "a key is shown once:\n{}", again.logs());
}

#[tokio::test]
async fn a_data_folder_is_locked_until_its_process_ends() {
    let folder = DataFolder::new();
    let mut holder = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let base = holder.base_url().await;
    let (code, _, error) = run(&["up", "--listen", "127.0.0.1:0", "--data-dir", folder.text()], &[]);
    assert_eq!(code, Some(1));
    assert!(error.contains("in use by process") && error.contains(&base) && error.contains("--data-dir"), "{error}");

    let postmaster = std::fs::read_to_string(folder.path().join("postgres/postmaster.pid")).unwrap();
    let postmaster = format!("/proc/{}/cwd", postmaster.lines().next().unwrap());
    holder.kill9();
    let ended = async || std::fs::read_link(&postmaster).is_err();
    eventually("PostgreSQL ends with the process that started it", Duration::from_secs(20), ended).await;
    let mut next = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    assert_eq!(admin_of(&next).await.get("/readyz").await.status, 200);
    assert!(next.terminate().await.success());
}

#[tokio::test]
async fn a_stale_pid_file_with_a_reused_pid_is_ignored() {
    let folder = DataFolder::new();
    let mut first = up(&folder, &[]);
    first.base_url().await;
    assert!(first.terminate().await.success());
    // The process of this test: it is alive, but it is not PostgreSQL.
    let stale = format!("{}\n{}\n", std::process::id(), folder.path().join("postgres").display());
    std::fs::write(folder.path().join("postgres/postmaster.pid"), stale).unwrap();
    let mut next = up(&folder, &[]);
    assert_eq!(Client::new(&next.base_url().await).get("/readyz").await.status, 200);
    assert!(next.terminate().await.success());
}

#[tokio::test]
async fn a_crashed_embedded_postgresql_is_restarted() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    let client = Client::new(&process.base_url().await);
    let postmaster = || {
        let text = std::fs::read_to_string(folder.path().join("postgres/postmaster.pid")).ok()?;
        text.lines().next()?.parse::<i32>().ok()
    };
    let killed = postmaster().unwrap();
    // A cleaner of temporary files may delete the folder of the socket.
    std::fs::remove_dir_all(folder.path().join("run")).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(killed), nix::sys::signal::Signal::SIGKILL).unwrap();
    eventually("PostgreSQL has a new process", Duration::from_secs(30), async || {
        postmaster().is_some_and(|pid| pid != killed)
    })
    .await;
    eventually("the server is ready", Duration::from_secs(30), async || client.get("/readyz").await.status == 200)
        .await;
    let made = client.bearer(ADMIN_KEY).post("/admin/v1/keys", json!({"name": "after", "role": "ingest"})).await;
    assert_eq!(made.status, 201, "{made:?}");
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn a_data_folder_of_another_postgresql_version_is_refused() {
    let folder = DataFolder::new();
    std::fs::create_dir_all(folder.path().join("postgres")).unwrap();
    std::fs::write(folder.path().join("postgres/PG_VERSION"), "9\n").unwrap();
    let key = folder.path().join("secret.key");
    std::fs::write(&key, MasterKey::from_bytes([7; 32]).to_base64()).unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    let (code, _, error) = run(&["up", "--listen", "127.0.0.1:0", "--data-dir", folder.text()], &[]);
    assert_eq!(code, Some(1));
    assert!(error.contains("data of PostgreSQL 9") && error.contains("install postgresql-9"), "{error}");
}

#[tokio::test]
async fn a_port_in_use_is_reported_with_the_flag() {
    let folder = DataFolder::new();
    let occupied = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = occupied.local_addr().unwrap().to_string();
    let (code, _, error) = run(&["up", "--listen", &address, "--data-dir", folder.text()], &[]);
    assert_eq!(code, Some(1));
    assert!(error.contains(&address) && error.contains("--listen"), "{error}");
    assert!(!folder.path().exists(), "no data folder was created");
}

#[tokio::test]
async fn a_folder_that_postgresql_cannot_reach_is_reported() {
    if !nix::unistd::geteuid().is_root() {
        return; // without root, PostgreSQL runs as the same user
    }
    use std::os::unix::fs::PermissionsExt;
    let folder = DataFolder::new();
    std::fs::create_dir_all(folder.path()).unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let inside = folder.path().join("inside");
    let (code, _, error) = run(&["up", "--listen", "127.0.0.1:0", "--data-dir", inside.to_str().unwrap()], &[]);
    assert_eq!(code, Some(1));
    assert!(error.contains("cannot reach") && error.contains(folder.text()), "{error}");
}

#[tokio::test]
async fn a_deep_data_folder_gets_a_short_socket() {
    let folder = DataFolder::new();
    let deep = folder.path().join("d".repeat(80)).join("e".repeat(80));
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o755).create(&deep).unwrap();
    let args = ["up", "--listen", "127.0.0.1:0", "--data-dir", deep.to_str().unwrap()];
    let mut process = testkit::Pillarbox::start(testkit::program(), &args, &[]);
    assert_eq!(Client::new(&process.base_url().await).get("/readyz").await.status, 200);
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn an_unmigrated_database_is_refused_and_migrations_may_race() {
    let (database, folder) = (TestDatabase::empty().await, DataFolder::new());
    let url = database.url();
    let (code, _, error) =
        run(&["serve", "--listen", "127.0.0.1:0", "--data-dir", folder.text(), "--database-url", &url], &[]);
    assert_eq!(code, Some(1));
    assert!(error.contains("pillarbox migrate"), "{error}");

    let migrating: Vec<_> = (0..4)
        .map(|_| {
            let url = url.clone();
            tokio::task::spawn_blocking(move || run(&["migrate", "--database-url", &url], &[]))
        })
        .collect();
    let mut output = String::new();
    for migrated in migrating {
        let (code, out, error) = migrated.await.unwrap();
        assert_eq!(code, Some(0), "{error}");
        output += &out;
    }
    assert!(output.contains("Applied the migrations pillarbox 1, "), "{output}");
    let (_, output, _) = run(&["migrate", "--database-url", &url], &[]);
    assert_eq!(output, "The database's schema is up to date.\n");

    let mut process = serve(&folder, &database, &[]);
    assert_eq!(Client::new(&process.base_url().await).get("/readyz").await.status, 200);
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn a_process_warns_about_roles_that_no_process_runs() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let warns = async || {
        let api = serve(&folder, &database, &[("PILLARBOX_ROLES", "[\"api\"]")]);
        api.base_url().await;
        api.logs().contains("no process runs the roles consume, fanout, dispatch yet")
    };
    assert!(warns().await);
    let workers = serve(&folder, &database, &[]);
    workers.base_url().await;
    let at_work = async || pillarbox::operations::status::active_names(database.pool()).await.unwrap().len() >= 4;
    eventually("all roles have a process", Duration::from_secs(10), at_work).await;
    assert!(!warns().await);
}

#[tokio::test]
async fn a_process_with_another_secret_key_is_refused() {
    let database = TestDatabase::new(&migrations()).await;
    let (first, second) = (DataFolder::new(), DataFolder::new());
    serve(&first, &database, &[]).base_url().await;
    let url = database.url();
    let args = ["serve", "--listen", "127.0.0.1:0", "--data-dir", second.text(), "--database-url", &url];
    let (code, _, error) = run(&args, &[]);
    assert_eq!(code, Some(1));
    let expected = second.path().join("secret.key");
    for part in ["PILLARBOX_SECRET_KEY", expected.to_str().unwrap(), "--data-dir"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let up = ["up", "--listen", "127.0.0.1:0", "--data-dir", second.text(), "--database-url", &url];
    assert_eq!(run(&up, &[]).0, Some(1));
    let (code, _, _) = run(&["subscribers", "list", "--data-dir", second.text(), "--database-url", &url], &[]);
    assert_eq!(code, Some(1));
    assert!(!expected.exists(), "no key was created that the installation does not know");
    // A key that is not the installation's is refused as well.
    let other = MasterKey::generate().to_base64();
    let (code, _, error) = run(&args, &[("PILLARBOX_SECRET_KEY", &other)]);
    assert_eq!(code, Some(1));
    assert!(error.contains("another secret key"), "{error}");
    // With the old key as a previous key, the new key is accepted.
    let old = std::fs::read_to_string(first.path().join("secret.key")).unwrap();
    let previous = format!("secret_keys_previous=[\"{}\"]", old.trim());
    let args = [&args[..], &["--set", &previous]].concat();
    let process = testkit::Pillarbox::start(testkit::program(), &args, &[]);
    assert_eq!(Client::new(&process.base_url().await).get("/readyz").await.status, 200);
}

#[tokio::test]
async fn a_lost_or_damaged_secret_key_is_not_replaced() {
    let folder = DataFolder::new();
    let mut process = up(&folder, &[]);
    process.base_url().await;
    assert!(process.terminate().await.success());
    let file = folder.path().join("secret.key");
    let key = std::fs::read(&file).unwrap();
    let starts_with_error = |says: &str| {
        let (code, _, error) = run(&["up", "--listen", "0", "--data-dir", folder.text()], &[]);
        assert_eq!(code, Some(1), "{error}");
        for part in [file.to_str().unwrap(), says, "backup", "PILLARBOX_SECRET_KEY"] {
            assert!(error.contains(part) && !error.contains("--data-dir"), "{part}: {error}");
        }
    };
    std::fs::write(&file, [0xff; 44]).unwrap();
    starts_with_error("is damaged");
    std::fs::remove_file(&file).unwrap();
    starts_with_error("is missing");
    assert!(!file.exists());
    std::fs::write(&file, key).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let mut process = up(&folder, &[]);
    process.base_url().await;
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn an_invalid_address_is_noticed_before_postgresql_is_created() {
    for flag in ["--amqp-url", "--redis-url", "--smtp-url", "--replica-url"] {
        let folder = DataFolder::new();
        let args = ["up", "--listen", "0", "--data-dir", folder.text(), flag, "nonsense"];
        let (code, _, error) = run(&args, &[]);
        assert_eq!(code, Some(1), "{flag}: {error}");
        assert!(error.contains(&flag[2..].replace('-', "_")) && error.contains("://"), "{flag}: {error}");
        assert!(!folder.path().exists(), "{flag}: nothing was created");
    }
}

#[tokio::test]
async fn a_data_folder_of_another_installation_is_not_used() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let mut owner = up(&folder, &[]);
    owner.base_url().await;
    assert!(owner.terminate().await.success());
    let content = || {
        let entries = std::fs::read_dir(folder.path()).unwrap().flatten();
        let entry = |entry: std::fs::DirEntry| (entry.file_name(), entry.metadata().unwrap().modified().unwrap());
        let mut content: Vec<_> = entries.map(entry).collect();
        content.sort();
        (content, std::fs::read(folder.path().join("lock")).unwrap())
    };
    let (before, url, user) = (content(), database.url(), uuid::Uuid::now_v7().to_string());
    for command in [&["serve", "--listen", "0"][..], &["up", "--listen", "0"], &["token", "--user", &user]] {
        let args = [command, &["--data-dir", folder.text(), "--database-url", &url]].concat();
        let (code, out, error) = run(&args, &[]);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{command:?}: {error}");
        for part in ["belongs to the installation", folder.text(), "--data-dir", "PILLARBOX_SECRET_KEY"] {
            assert!(error.contains(part), "{command:?}: {error}");
        }
        assert_eq!(content(), before, "{command:?} touched the folder");
    }
    // With a key of its own, `serve` needs no folder.
    let key = MasterKey::generate().to_base64();
    let mut process = serve(&folder, &database, &[("PILLARBOX_SECRET_KEY", &key)]);
    process.base_url().await;
    assert!(process.terminate().await.success());
    assert_eq!(content(), before);
}

#[tokio::test]
async fn the_first_admin_key_survives_a_start_that_fails() {
    let folder = DataFolder::new();
    let args = ["up", "--listen", "127.0.0.1:0", "--data-dir", folder.text()];
    let (code, out, _) = run(&[&args[..], &["--redis-url", "nonsense"]].concat(), &[]);
    assert_eq!(code, Some(1));
    assert!(!out.contains("pbx_"));
    let mut process = up(&folder, &[]);
    process.wait_for_line(|line| line.contains("admin key pbx_"), Duration::from_secs(60)).await;
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn an_installation_without_admin_keys_gets_a_new_one() {
    let (database, folder) = (TestDatabase::new(&migrations()).await, DataFolder::new());
    let mut process = serve(&folder, &database, &[]);
    let first = process.wait_for_line(|line| line.contains("admin key pbx_"), Duration::from_secs(60)).await;
    assert!(process.terminate().await.success());
    sqlx::query("update pillarbox_admin.api_key set revoked_at = now()").execute(database.pool()).await.unwrap();
    let process = serve(&folder, &database, &[]);
    let second = process.wait_for_line(|line| line.contains("admin key pbx_"), Duration::from_secs(60)).await;
    assert_ne!(first, second);
}

#[tokio::test]
async fn a_folder_writable_by_others_is_refused_and_not_changed() {
    use std::os::unix::fs::PermissionsExt;
    let folder = DataFolder::new();
    std::fs::create_dir(folder.path()).unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o1777)).unwrap();
    let (code, _, error) = run(&["up", "--listen", "127.0.0.1:0", "--data-dir", folder.text()], &[]);
    assert_eq!(code, Some(1));
    assert!(error.contains("no other user may write"), "{error}");
    assert_eq!(std::fs::metadata(folder.path()).unwrap().permissions().mode() & 0o7777, 0o1777);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn an_empty_private_folder_is_accepted() {
    use std::os::unix::fs::PermissionsExt;
    let folder = DataFolder::new();
    std::fs::create_dir(folder.path()).unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let mut process = up(&folder, &[]);
    assert_eq!(Client::new(&process.base_url().await).get("/readyz").await.status, 200);
    assert!(process.terminate().await.success());
}

#[tokio::test]
async fn the_environment_of_postgresql_contains_no_secret() {
    let folder = DataFolder::new();
    let process = up(&folder, &[("PILLARBOX_ADMIN_KEY", ADMIN_KEY)]);
    process.base_url().await;
    let pid = std::fs::read_to_string(folder.path().join("postgres/postmaster.pid")).unwrap();
    let environment = std::fs::read(format!("/proc/{}/environ", pid.lines().next().unwrap())).unwrap();
    let environment = String::from_utf8_lossy(&environment).into_owned();
    assert!(environment.contains("PATH=") && !environment.contains("PILLARBOX"), "{environment}");
}

#[tokio::test]
async fn a_first_start_succeeds_after_kills_at_any_time() {
    let folder = DataFolder::new();
    for pause_ms in [5, 100, 300, 600] {
        let mut process = up(&folder, &[]);
        tokio::time::sleep(Duration::from_millis(pause_ms)).await; // kills at different points of the start
        process.kill9();
    }
    let mut process = up(&folder, &[]);
    assert_eq!(Client::new(&process.base_url().await).get("/readyz").await.status, 200);
    assert!(process.terminate().await.success());
    let entries = std::fs::read_dir(folder.path()).unwrap().flatten();
    assert_eq!(entries.filter(|entry| entry.file_name().to_str().unwrap().contains(".new")).count(), 0);
}

#[tokio::test]
async fn a_stop_during_the_start_is_clean() {
    let folder = DataFolder::new();
    for pause_ms in [200, 700] {
        let mut process = up(&folder, &[]);
        process.wait_for_line(|line| line.contains("PostgreSQL"), Duration::from_secs(20)).await;
        tokio::time::sleep(Duration::from_millis(pause_ms)).await; // stops at different points of the start
        assert!(process.terminate().await.success(), "{}", process.logs());
        assert!(!folder.path().join("postgres/postmaster.pid").exists());
        std::fs::remove_dir_all(folder.path()).unwrap();
    }
}

#[tokio::test]
async fn other_users_cannot_read_the_lock_or_the_secret_key() {
    use std::os::unix::fs::PermissionsExt;
    let folder = DataFolder::new();
    let mut process = up(&folder, &[]);
    process.base_url().await;
    let mode = |name| std::fs::metadata(folder.path().join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("lock"), mode("secret.key"), mode("postgres.log")), (0o600, 0o600, 0o600));
    assert!(process.terminate().await.success());

    let key = folder.path().join("secret.key");
    std::fs::set_permissions(key, std::fs::Permissions::from_mode(0o644)).unwrap();
    let user = uuid::Uuid::now_v7().to_string();
    let (code, out, error) = run(&["token", "--user", &user, "--data-dir", folder.text()], &[]);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(error.contains("others can read") && error.contains("chmod 600"), "{error}");
}
