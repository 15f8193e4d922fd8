//! Checks that the queues of services lose nothing, and publishes again what they have lost.
//!
//! RabbitMQ confirms a message when it is in every queue that is bound for it. It cannot tell that a queue is missing among
//! them, or that a queue was deleted, purged or has let a message expire before it was read. So each announced queue has a
//! consumer of the log, `check.<queue>`. It follows the routes: when they have published its messages, it sends the ids through
//! the same queue, and the reader replies which of them it has not recorded. Those are published to the queue again, in the
//! order of the log. The positions advance when nothing is missing, whatever the cause was, so nothing is skipped, and a
//! crash of any process repeats a check. A message that was not lost after all arrives a second time, with the same id.

mod processor;
mod replies;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use pillarbox::consumers::{
    Consumer, ConsumerKind, ConsumerOptions, RetryPolicy, Runtime, ShardWorkerOptions, StartAt,
};
use pillarbox::log::Filter;
use runtime::backoff::Backoff;
use runtime::worker::{Round, RoundLimits};
use tokio::sync::Mutex;
use tokio::time::timeout;
use uuid::Uuid;

use self::processor::QueueCheck;
use self::replies::Replies;
use crate::broker::{Broker, BrokerError, response_of, short_name};
use crate::control::{self, Announcement, CheckReply, SERVICES_EXCHANGE};
use crate::intake::{Incoming, Intake};
use crate::relay::RelaySettings;
use crate::route::Route;
use crate::signature::MessageSigner;

/// RabbitMQ deletes the queue of a process that has ended after this time.
const EXPIRES_MS: i32 = 60_000;
/// How many announcements and replies are delivered at a time.
const PREFETCH: u16 = 100;
/// How long a round waits for a delivery. The worker can be stopped only between rounds.
const DELIVERY_WAIT: Duration = Duration::from_millis(500);
/// How many messages one check has; ten times as many while it lags.
const BATCH: u32 = 100;
/// How often a message that a queue does not keep is published again before it becomes a dead letter of the check.
const RETRY: RetryPolicy =
    RetryPolicy { retries: Some(8), backoff: Backoff::new(Duration::from_secs(1), Duration::from_secs(60)) };

/// Starts the worker that receives announcements and replies, and starts a consumer for each announced queue.
/// `for_services`: as for [`relay::start`](crate::start).
pub fn start(
    runtime: &Arc<Runtime>,
    settings: &RelaySettings,
    broker: &Arc<Broker>,
    signer: &MessageSigner,
    for_services: bool,
) {
    let worker = runtime.worker("queue checks".to_owned(), Duration::from_millis(100));
    let worker = worker.with_limits(RoundLimits::STEPS);
    let own_queue = format!("pillarbox.relay.{}", Uuid::now_v7());
    let all_routes = settings.routes();
    let routes = all_routes.iter().filter(|route| settings.is_on(route, for_services));
    let receiver_broker = Arc::new(broker.separate_connection());
    let receiver = Receiver {
        checks: Checks {
            runtime: runtime.clone(),
            routes: routes.map(Route::consumer_name).collect(),
            broker: broker.clone(),
            signer: signer.clone(),
            replies: Arc::new(Replies::new(own_queue.clone())),
            started: HashSet::new(),
        },
        intake: Intake::new(receiver_broker.clone(), own_queue.clone(), PREFETCH),
        broker: receiver_broker.clone(),
        own_queue,
        is_declared: false,
    };
    runtime.spawn(async move {
        let receiver = Mutex::new(receiver);
        worker.run(async || receiver.lock().await.round().await).await;
        receiver.into_inner().intake.close().await;
        receiver_broker.close().await;
    });
}

/// Receives what is published to the queue of this process.
struct Receiver {
    checks: Checks,
    intake: Intake,
    broker: Arc<Broker>,
    own_queue: String,
    is_declared: bool,
}

struct Checks {
    runtime: Arc<Runtime>,
    /// The consumers of the routes.
    routes: Vec<String>,
    broker: Arc<Broker>,
    signer: MessageSigner,
    replies: Arc<Replies>,
    /// The queues whose consumers run. A queue whose announcement changes is checked for the former messages until the process
    /// is replaced.
    started: HashSet<String>,
}

impl Receiver {
    async fn round(&mut self) -> Result<Round, BrokerError> {
        if !self.is_declared {
            self.declare().await?;
            self.is_declared = true;
        }
        let Ok(received) = timeout(DELIVERY_WAIT, self.intake.next_batch(PREFETCH.into())).await else {
            return Ok(Round::Busy);
        };
        // The queue may have been deleted.
        let batch = received.inspect_err(|_| self.is_declared = false)?;
        batch.iter().for_each(|one| self.checks.receive(one));
        self.intake.ack(&batch).await?;
        Ok(Round::Busy)
    }

    async fn declare(&self) -> Result<(), BrokerError> {
        let channel = self.broker.channel().await?;
        let (queue, exchange) = (short_name(&self.own_queue)?, short_name(SERVICES_EXCHANGE)?);
        let durable = ExchangeDeclareOptions { durable: true, ..Default::default() };
        let fanout = lapin::ExchangeKind::Fanout;
        response_of(channel.exchange_declare(exchange.clone(), fanout, durable, FieldTable::default())).await?;
        let mut arguments = FieldTable::default();
        arguments.insert("x-expires".into(), EXPIRES_MS.into());
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        response_of(channel.queue_declare(queue.clone(), durable, arguments)).await?;
        let options = QueueBindOptions::default();
        response_of(channel.queue_bind(queue, exchange, "".into(), options, FieldTable::default())).await
    }
}

impl Checks {
    /// Ignores what no process of this installation has signed.
    fn receive(&mut self, one: &Incoming) {
        if let Some(reply) = control::open::<CheckReply>(&self.signer, one) {
            self.replies.deliver(reply);
        } else if let Some(announcement) = control::open::<Announcement>(&self.signer, one)
            && self.started.insert(announcement.queue.clone())
        {
            self.start(&announcement);
        }
    }

    fn start(&self, Announcement { queue, matching }: &Announcement) {
        let consumer = Consumer {
            name: format!("check.{queue}"),
            kind: ConsumerKind::Handler,
            filter: Filter::matching(matching),
            start: StartAt::Now,
        };
        let options = ConsumerOptions {
            workers: 1,
            worker: ShardWorkerOptions { batch: BATCH, retry: RETRY, in_log_order: false },
            pause: Duration::from_secs(1),
            delay: Duration::ZERO,
        };
        self.runtime.consume(&consumer, options, || {
            QueueCheck::new(queue.clone(), self.routes.clone(), &self.broker, &self.signer, &self.replies)
        });
    }
}
