import { useState } from "preact/hooks";
import { api } from "../api/client";
import type { Subscriber, TestResult } from "../api/types";
import { Loaded } from "../components/async";
import { Card, CodeBlock, Details, Identifier, Notice, Page, Tabs, Time } from "../components/basics";
import { ask } from "../components/dialog";
import { ActionButton } from "../components/form";
import { SecretNotice } from "../components/secret";
import { showToast } from "../components/toasts";
import { formatMilliseconds, formatSeconds, plural } from "../lib/format";
import { useLive } from "../lib/live";
import { useMayManage } from "../lib/permissions";
import { link, linkWithQuery, navigate } from "../lib/router";
import { Deliveries } from "./deliveries";
import { SubscriberHealthCards } from "./subscriber-health";
import { EventTypeList, SubscriberState } from "./subscribers";

const POLL_MS = 5_000;

export function SubscriberPage({ id, tab }: { id: string; tab: string }) {
  const live = useLive(`subscriber ${id}`, (signal) => api.get("/hub/v1/subscribers/{id}", { path: { id }, signal }), POLL_MS);
  const [secret, setSecret] = useState("");
  const [test, setTest] = useState<TestResult>();
  return (
    <Page title={live.data?.name ?? "Subscriber"} parent={{ label: "Subscribers", href: link("subscribers") }}
      description={live.data && <span class="row"><SubscriberState subscriber={live.data} /><code>{live.data.url}</code></span>}
      actions={live.data && <Actions subscriber={live.data} reload={live.reload} onSecret={setSecret} onTest={setTest} />}>
      {secret !== "" && <SecretNotice secret={secret} what="signing secret" onClose={() => setSecret("")} />}
      {test !== undefined && <TestNotice result={test} />}
      {live.data?.inactive_reason && <Notice tone="bad">Disabled: {live.data.inactive_reason}</Notice>}
      {live.data?.unverified_since && <Notice tone="warn">The endpoint has not answered the challenge yet. Nothing is sent until it does.</Notice>}
      <Tabs label="Parts of the subscriber" current={tab} tabs={[
        { id: "", label: "Deliveries", href: link("subscribers", id) },
        { id: "health", label: "Health", href: linkWithQuery({ tab: "health" }, "subscribers", id) },
        { id: "settings", label: "Settings", href: linkWithQuery({ tab: "settings" }, "subscribers", id) },
      ]} />
      {tab === "health" ? <SubscriberHealthCards id={id} />
        : tab === "settings" ? <Loaded live={live}>{(subscriber) => <Settings subscriber={subscriber} />}</Loaded>
          : <><SubscriberHealthCards id={id} isBrief /><Card title="Latest deliveries" flush><Deliveries subscriber={id} /></Card></>}
    </Page>
  );
}

function TestNotice({ result }: { result: TestResult }) {
  const answer = result.status ? `status ${result.status}` : result.error ?? "no response";
  return (
    <Notice tone={result.delivered ? "good" : "bad"}>
      <strong>{result.delivered ? "The test was delivered" : "The test failed"}</strong>: {answer} in {formatMilliseconds(result.latency_ms)}.
      {result.detail && <div>{result.detail}</div>}
      {result.excerpt && <code>{result.excerpt}</code>}
    </Notice>
  );
}

interface ActionsProps {
  subscriber: Subscriber;
  reload: () => void;
  onSecret: (secret: string) => void;
  onTest: (result: TestResult) => void;
}

function Actions({ subscriber, reload, onSecret, onTest }: ActionsProps) {
  const path = { id: subscriber.id };
  if (!useMayManage()) return null;
  const test = async () => onTest(await api.post("/hub/v1/subscribers/{id}/test", { path, body: {} }));
  const verify = async () => {
    const result = await api.post("/hub/v1/subscribers/{id}/verify", { path });
    showToast(result.verified ? "The endpoint is verified." : `Not verified: ${result.detail ?? result.error ?? "wrong answer"}`, result.verified ? "neutral" : "bad");
    reload();
  };
  const change = (message: string, work: () => Promise<{ effective?: boolean }>) => async () => {
    const result = await work();
    showToast(result.effective === false ? "Stored. Not every dispatcher has confirmed it yet." : message);
    reload();
  };
  const pause = change("Paused: messages wait.", () => api.post("/hub/v1/subscribers/{id}/pause", { path }));
  const resume = change("Resumed: messages are sent.", () => api.post("/hub/v1/subscribers/{id}/resume", { path }));
  const enable = change("Enabled.", () => api.patch("/hub/v1/subscribers/{id}", { path, body: { is_active: true } }));
  const rotate = async () => {
    const body = "A new signing secret is created and shown once. The previous one also signs for 24 hours, so the receiver has time to change.";
    if (await ask({ title: "Rotate the signing secret?", body, confirm: "Rotate" }) === null) return;
    const result = await api.post("/hub/v1/subscribers/{id}/rotate-secret", { path, body: {} });
    onSecret(result.secret);
    reload();
  };
  const remove = async () => {
    const body = "Messages that wait are not sent. This cannot be undone.";
    if (await ask({ title: `Delete ${subscriber.name}?`, body, confirm: "Delete", isDangerous: true, typeToConfirm: subscriber.name }) === null) return;
    await api.delete("/hub/v1/subscribers/{id}", { path });
    showToast(`${subscriber.name} was deleted.`);
    navigate(link("subscribers"));
  };
  return (
    <>
      <ActionButton class="primary" label="Send a test" onRun={test} />
      {subscriber.unverified_since && <ActionButton label="Verify" onRun={verify} />}
      {!subscriber.is_active && <ActionButton label="Enable" onRun={enable} />}
      {subscriber.paused_at ? <ActionButton label="Resume" onRun={resume} /> : <ActionButton label="Pause" onRun={pause} />}
      <a class="button" href={link("subscribers", subscriber.id, "edit")}>Edit</a>
      <ActionButton label="Rotate secret" onRun={rotate} />
      <ActionButton class="danger" label="Delete" onRun={remove} />
    </>
  );
}

function Settings({ subscriber }: { subscriber: Subscriber }) {
  const headers = Object.keys(subscriber.headers);
  const rules = Object.entries(subscriber.retry_rules);
  return (
    <div class="grid">
      <Card title="Delivery">
        <Details entries={[
          ["Id", <Identifier value={subscriber.id} />],
          ["URL", <code>{subscriber.url}</code>],
          ["Event types", <EventTypeList types={subscriber.event_types} />],
          ["Ordering key", subscriber.ordering_key ? <code>{subscriber.ordering_key}</code> : "that of the event"],
          ["Format", subscriber.format],
          ["Batches", subscriber.batch ? `up to ${plural(subscriber.batch.max, "message")}${subscriber.batch.wait_ms > 0 ? `, waiting ${formatMilliseconds(subscriber.batch.wait_ms)}` : ""}` : "no"],
          ["Timeout", formatMilliseconds(subscriber.timeout_ms)],
          ["Requests in flight", `at most ${subscriber.max_in_flight}`],
          ["Rate limit", subscriber.rate_limit_per_second ? `${subscriber.rate_limit_per_second}/s` : "none"],
          ["Headers", headers.length === 0 ? "none" : headers.join(", ")],
          ["Credentials", subscriber.auth?.type === "oauth2" ? `OAuth 2.0 (${subscriber.auth.client_id})` : subscriber.auth ? "TLS client certificate" : "none"],
        ]} />
      </Card>
      <Card title="Retries and secrets">
        <Details entries={[
          ["Pauses between attempts", subscriber.retry_backoff_seconds.map(formatSeconds).join(", ")],
          ["Retry rules", rules.length === 0 ? "the default: 429 and 5xx are retried" : <code>{rules.map(([status, rule]) => `${status}: ${rule}`).join(", ")}</code>],
          ["After the last attempt", subscriber.on_exhausted === "block" ? "messages with the same ordering key wait for an operator" : "dead letter, and later messages go on"],
          ["Secrets", plural(subscriber.secrets.length, "valid secret")],
          ["Created", <Time at={subscriber.created_at} />],
          ["Changed", <Time at={subscriber.updated_at} />],
          ["Version", subscriber.version],
        ]} />
      </Card>
      {subscriber.filter && subscriber.filter.length > 0 && <Card title="Filter"><CodeBlock label="filter" value={subscriber.filter} /></Card>}
    </div>
  );
}
