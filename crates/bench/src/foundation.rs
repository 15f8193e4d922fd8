//! The base costs of an installation: start, memory, and an empty request.

use std::path::Path;
use std::time::Duration;

use crate::Outcome;
use crate::load::rate;
use crate::report::{Pairs, Report};
use crate::server::Server;

const CONNECTIONS: usize = 32;
const RUN: Duration = Duration::from_secs(2);

pub(crate) async fn measure(pillarbox: &Path, pairs: usize) -> Outcome<Report> {
    let folder = std::env::temp_dir().join(format!("pillarbox-bench-{}", uuid::Uuid::new_v4().simple()));
    let folder_text = folder.to_str().ok_or("the path of the temporary folder is not UTF-8")?;
    let outcome = measure_in(pillarbox, folder_text, pairs).await;
    std::fs::remove_dir_all(&folder)?;
    outcome
}

async fn measure_in(pillarbox: &Path, folder: &str, pairs: usize) -> Outcome<Report> {
    let args = ["up", "--listen", "127.0.0.1:0", "--data-dir", folder];
    let mut report = Report::default();

    eprintln!("starting {pairs} times");
    let first = Server::start(pillarbox, &args).await?;
    report.add("start to ready, new data folder", "s", vec![first.ready_after.as_secs_f64()]);
    first.stop().await?;
    let (mut starts, mut rss) = (Vec::new(), Vec::new());
    for _ in 0..pairs {
        let server = Server::start(pillarbox, &args).await?;
        starts.push(server.ready_after.as_secs_f64());
        tokio::time::sleep(Duration::from_secs(2)).await; // the process is idle after the first health checks
        rss.push(server.rss_bytes()? as f64 / 1024.0 / 1024.0);
        server.stop().await?;
    }
    report.add("start to ready, existing data folder", "s", starts);
    report.add("memory of the idle process", "MiB", rss);

    let ours = Server::start(pillarbox, &args).await?;
    let raw = Server::start(&std::env::current_exe()?, &["raw-server"]).await?;
    let runs = Pairs::run(
        "healthz",
        pairs,
        async || rate(&raw.address, "/", CONNECTIONS, RUN).await,
        async || rate(&ours.address, "/healthz", CONNECTIONS, RUN).await,
    );
    let runs = runs.await?;
    report.add("raw hyper, GET", "req/s", runs.raws);
    report.add("pillarbox, GET /healthz", "req/s", runs.ours);
    report.add("ratio to raw", "", runs.ratios);
    ours.stop().await?;
    Ok(report)
}
