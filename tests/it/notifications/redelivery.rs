//! A listener that is killed after it has recorded notifications and before the broker knows it: everything is delivered again.

use server::migrations;
use testkit::{FaultProxy, TestApp, TestDatabase, TestVhost, eventually};

use super::fixture::{add_recipients, check_inboxes, count, in_app_count, users};
use crate::relay::broker_client::BrokerClient;
use crate::relay::support::{TIMEOUT, installation_key, relay_to};
use crate::server::process::{DataFolder, serve};

const EVENTS: u32 = 50;
const QUEUE: &str = "notification.agency";

#[tokio::test]
async fn a_listener_that_is_killed_between_the_insert_and_the_ack_makes_no_second_notification() {
    let (here, there) = (TestDatabase::new(&migrations()).await, TestDatabase::new(&migrations()).await);
    let (vhost, folder, db, user) = (TestVhost::new().await, DataFolder::new(), there.pool(), users(3));
    add_recipients(db, "AGENCY", Some(1), &user).await;
    let relay = TestApp::start_with(&here, relay_to(&vhost)).await;
    let (amqp, proxy) = (BrokerClient::connect(&vhost).await, FaultProxy::in_front_of(&vhost.amqp_url()).await);
    amqp.wait_for_queue(QUEUE).await;
    let (key, url) = (installation_key(&vhost.amqp_url()).to_base64(), proxy.url(&vhost.amqp_url()));
    let environment = [
        ("PILLARBOX_SECRET_KEY", key.as_str()),
        ("PILLARBOX_AMQP_URL", url.as_str()),
        ("PILLARBOX_BUS", "rabbitmq"),
        ("PILLARBOX_SERVICES", "[\"notify\"]"),
        ("PILLARBOX_ROLES", "[\"api\", \"consume\"]"),
        ("PILLARBOX_LEASE_MS", "2000"),
    ];
    let mut process = serve(&folder, &there, &environment);
    eventually("the listener consumes", TIMEOUT, async || amqp.consumers(QUEUE).await == 1).await;

    // The broker delivers, and gets no acknowledgement.
    proxy.withhold_requests();
    let post = "select pillarbox.notify('A', 'AGENCY', 1, to_json(n),
                    event_id => case when n % 2 = 0 then 'order-' || n end) from generate_series(1, $1) as n";
    sqlx::query(post).bind(EVENTS as i32).execute(here.pool()).await.unwrap();
    let all = i64::from(EVENTS) * 3;
    eventually("all are recorded", TIMEOUT, async || match in_app_count(db).await {
        found if found == all => Ok(()),
        other => Err(other),
    })
    .await;
    process.kill9();
    proxy.cut();
    // With the relay's check of the queue, if it was published before the broker noticed that the listener is gone.
    eventually("all return to the queue", TIMEOUT, async || match amqp.depth(QUEUE).await {
        depth if depth >= EVENTS => Ok(()),
        other => Err(other),
    })
    .await;

    let mut process = serve(&folder, &there, &environment);
    eventually("all are acknowledged", TIMEOUT, async || {
        let (ready, consumers) = (amqp.depth(QUEUE).await, amqp.consumers(QUEUE).await);
        if (ready, consumers) == (0, 1) { Ok(()) } else { Err((ready, consumers)) }
    })
    .await;
    // It is behind them in the queue and in the order of its aggregate.
    let last = "select pillarbox.notify('LAST', 'AGENCY', 1, '0')";
    sqlx::query(last).execute(here.pool()).await.unwrap();
    for user in user {
        eventually("the last one has arrived", TIMEOUT, async || match super::fixture::inbox(db, user).await {
            types if types.last().is_some_and(|last| last == "LAST") => Ok(()),
            other => Err(other.len()),
        })
        .await;
    }
    assert_eq!(in_app_count(db).await, all + 3, "no event makes a second notification");
    let events = "select count(*) from pillarbox.log where source = 'amqp:notification.agency'";
    assert_eq!(count(db, events).await, i64::from(EVENTS) + 1, "no event is read twice");
    check_inboxes(db).await;
    assert!(process.terminate().await.success());
    relay.stop().await;
}
