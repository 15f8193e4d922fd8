// Pages that must not claim more than the server has said: empty, old, ended, cut off.
import assert from "node:assert/strict";
import { test } from "node:test";
import { apiClient } from "./support/api.mjs";
import { goTo } from "./support/browser.mjs";
import { startReceiver } from "./support/receiver.mjs";
import { waitFor } from "./support/wait.mjs";

const POLL_MS = 2_000;
const OUTAGE_MS = 300_000;

/** The first test: nothing has been posted yet. */
export function emptyTests(world) {
  test("an empty installation shows the first steps, and not that everything works", async () => {
    const { page, close } = await world.openSignedIn();
    await page.getByRole("heading", { name: "First steps" }).waitFor();
    await page.getByText("its messages stay in the log until retention ends").waitFor();
    assert.equal(await page.getByText("Everything works").count(), 0);
    await close();
  });
}

export function truthTests(world) {
  test("the overview of a tenant shows no old number as the present one while the server does not answer", async () => {
    const receiver = await startReceiver();
    await world.api.post("/admin/v1/tenants", { name: "stale" });
    const tenant = apiClient(world.pillarbox.url, world.adminKey, { "pillarbox-tenant": "stale" });
    await tenant.post("/hub/v1/subscribers", { name: "works", url: receiver.url, event_types: ["*"] });
    await tenant.post("/hub/v1/streams", { name: "all", event_types: ["*"] });
    const { page, close } = await world.openSignedIn({ expectedStatuses: [503] });
    await page.clock.install();
    await goTo(page, "#/?tenant=stale");
    await page.getByRole("row", { name: /works healthy/ }).waitFor();
    await page.getByText("None of these subscribers fails").waitFor();
    await page.route("**/hub/v1/subscribers?*", (route) => route.fulfill({ status: 503, json: { title: "Service Unavailable" } }));
    await page.clock.runFor(11_000);
    await page.getByText("Service Unavailable").waitFor();
    const values = await page.locator(".stat-value").allInnerTexts();
    assert.deepEqual([...new Set(values)], ["…"]);
    assert.equal(await page.getByText("None of these subscribers fails").count(), 0);
    assert.equal(await page.getByText("healthy").count(), 0);
    await page.getByRole("row", { name: "all * … …" }).waitFor();
    await page.getByText("the last known").waitFor();
    await page.unrouteAll({ behavior: "ignoreErrors" });
    await page.clock.runFor(61_000);
    await page.getByRole("row", { name: /works healthy/ }).waitFor();
    await world.api.delete("/admin/v1/tenants/stale").catch(() => {});
    await receiver.stop();
    await close();
  });

  test("a chart draws no line through an outage", async () => {
    const { page, close } = await world.open();
    const real = await world.api.get("/admin/v1/overview");
    const start = Date.now();
    let answered = 0;
    await page.route("**/admin/v1/overview", (route) => {
      // Five answers, five minutes without one, five answers: 100 events per second in all of them.
      const at = start + answered * POLL_MS + (answered >= 5 ? OUTAGE_MS : 0);
      answered += 1;
      return route.fulfill({ json: { ...real, at: new Date(at).toISOString(), posted_total: 1_000_000 + Math.round((at - start) / 10) } });
    });
    await page.clock.install();
    await page.goto(`${world.console.url}/console/`);
    await page.getByLabel("API key or portal token").fill(world.adminKey);
    await page.getByRole("button", { name: "Sign in", exact: true }).click();
    const canvas = page.getByRole("img", { name: /^Posted and delivered per second/ }).locator("canvas");
    await canvas.waitFor();
    for (let poll = 1; poll <= 10; poll += 1) {
      await waitFor(`answer ${poll}`, async () => {
        if (answered < poll) await page.clock.runFor(POLL_MS / 4);
        return answered >= poll;
      });
    }
    await page.clock.runFor(POLL_MS / 4);
    await waitFor("the chart shows lines", async () => (await lineColumns(canvas)).length > 0);
    const columns = await lineColumns(canvas);
    const inOutage = columns.filter((share) => share > 0.3 && share < 0.9);
    assert.deepEqual(inOutage, [], "there are lines in the middle of the chart");
    assert.ok(columns.some((share) => share > 0.95), "the samples after the outage are drawn");
    await page.unrouteAll({ behavior: "ignoreErrors" });
    await close();
  });

  test("an overview without findings claims nothing about what is not looked at", async () => {
    const receiver = await startReceiver();
    const subscriber = await world.api.post("/hub/v1/subscribers", { name: "on-hold", url: receiver.url, event_types: ["hold.*"] });
    await world.api.post(`/hub/v1/subscribers/${subscriber.id}/pause`);
    const { event_id: event } = await world.api.post("/hub/v1/events", { event_type: "hold.posted", payload: {} });
    const outcomes = async () => JSON.stringify(await world.api.get(`/hub/v1/events/${event}`));
    await waitFor("the paused subscriber has a backlog", async () => (await outcomes()).includes(subscriber.id));
    const { page, close } = await world.openSignedIn();
    let named = 0;
    await page.route("**/admin/v1/overview", async (route) => {
      const overview = await (await route.fetch()).json();
      named += overview.findings.filter((finding) => JSON.stringify(finding).includes("on-hold")).length;
      // Other tests leave dead letters behind.
      await route.fulfill({ json: { ...overview, findings: [] } });
    });
    await goTo(page, "#/");
    const notice = page.locator(".notice", { hasText: "No findings." });
    await notice.getByText(/Not looked\s+at: paused subscribers, blocked lanes and streams/).waitFor();
    const text = await page.locator("main").innerText();
    assert.ok(!/everything works|nothing needs your attention/i.test(text), text);
    assert.equal(named, 0, "the finding names it: the overview may say so now");
    await page.unrouteAll({ behavior: "ignoreErrors" });
    await world.api.delete(`/hub/v1/subscribers/${subscriber.id}`);
    await receiver.stop();
    await close();
  });

  test("a reader whose lease has ended is not counted as one", async () => {
    await world.api.post("/hub/v1/streams", { name: "leases", event_types: ["leases.*"] });
    await world.api.post("/hub/v1/events", { event_type: "leases.posted", payload: {} });
    await waitFor("the stream has the event", async () => (await world.api.get("/hub/v1/streams/leases")).lag.messages === 1);
    await world.api.post("/hub/v1/streams/leases/pull", { reader: "gone" });
    const { page, close } = await world.openSignedIn();
    let hasEnded = false;
    await page.route("**/hub/v1/streams/leases", async (route) => {
      const stream = await (await route.fetch()).json();
      if (hasEnded) for (const reader of stream.readers) reader.lease_until = new Date(Date.now() - 60_000).toISOString();
      await route.fulfill({ json: stream });
    });
    await goTo(page, "#/streams/leases");
    const readers = page.locator(".stat", { hasText: "with a lease" }).locator(".stat-value");
    await waitFor("the reader is counted", async () => (await readers.innerText()) === "1");
    hasEnded = true;
    await waitFor("the reader is not counted", async () => (await readers.innerText()) === "0");
    await page.getByRole("row", { name: /gone .* ended 1 min ago/ }).waitFor();
    await page.unrouteAll({ behavior: "ignoreErrors" });
    await world.api.delete("/hub/v1/streams/leases");
    await close();
  });

  test("a key that has expired says so", async () => {
    const key = await world.api.post("/admin/v1/keys", { name: "short-lived", role: "ingest", tenant: "main", expires_at: new Date(Date.now() + 1_500).toISOString() });
    await waitFor("the key expires", () => Date.now() > Date.parse(key.expires_at ?? Date.now() + 2_000));
    const { page, close } = await world.openSignedIn();
    await goTo(page, "#/keys");
    await page.getByRole("row", { name: /short-lived/ }).getByText("expired").waitFor();
    await close();
  });

  test("a question about many dead letters says that it counts at least so many", async () => {
    const receiver = await startReceiver({ status: 422 });
    const subscriber = await world.api.post("/hub/v1/subscribers", { name: "crowded", url: receiver.url, event_types: ["crowded.*"] });
    await world.api.post("/hub/v1/events/batch", { events: Array.from({ length: 101 }, (_, n) => ({ event_type: "crowded.item", payload: { n } })) });
    const count = async () => {
      const { items, next_cursor } = await world.api.get(`/hub/v1/dead-letters?subscriber_id=${subscriber.id}&retried=false&limit=100`);
      return items.length + (next_cursor ? 1 : 0);
    };
    await waitFor("all messages die", async () => (await count()) === 101, 30_000);
    const { page, close } = await world.openSignedIn();
    await goTo(page, `#/dead-letters?subscriber=${subscriber.id}`);
    await page.getByRole("button", { name: "Retry all that match" }).click();
    const question = page.getByRole("dialog", { name: "Retry at least 100 dead letters?" });
    await question.getByText(/^from before .* to /).waitFor();
    await question.getByRole("button", { name: "Cancel" }).click();
    await world.api.post("/hub/v1/dead-letters/discard", { subscriber_id: subscriber.id });
    await world.api.delete(`/hub/v1/subscribers/${subscriber.id}`);
    await receiver.stop();
    await close();
  });

  test("a question about dead letters of consumers has their number, consumers and range", async () => {
    const { page, close } = await world.openSignedIn();
    const retried = [];
    const [status] = (await world.api.get("/admin/v1/consumers")).items;
    const letter = (id) => ({ id, consumer: "notify.mail", attempts: 3, last_error: "refused", died_at: new Date(Date.now() - (200 - id) * 60_000).toISOString(),
      message: { event_id: "evt_x", log_id: id, topic: "order.created", source: "sql", tenant: "main", at: new Date().toISOString() } });
    await page.route("**/admin/v1/dead-letters?*", (route) => route.fulfill({ json: { items: Array.from({ length: 100 }, (_, n) => letter(n + 1)), next_cursor: "100" } }));
    await page.route("**/admin/v1/consumers", (route) => route.fulfill({ json: { items: [{ ...status, consumer: "notify.mail", dead: 1_234 }] } }));
    await page.route("**/admin/v1/dead-letters/retry", (route) => {
      retried.push(route.request().postDataJSON());
      return route.fulfill({ json: { count: 100, more: false } });
    });
    await goTo(page, "#/dead-letters/consumers");
    const ask = async (title) => {
      await page.getByRole("button", { name: "Retry all that match" }).click();
      const question = page.getByRole("dialog", { name: title });
      await question.getByText("notify.mail").waitFor();
      await question.getByText(/^from 3 h ago to after 2 h ago$/).waitFor();
      return question;
    };
    await (await ask("Retry at least 100 dead letters?")).getByRole("button", { name: "Cancel" }).click();
    await page.getByLabel("Consumer", { exact: true }).fill("notify.mail");
    await (await ask("Retry 1,234 dead letters?")).getByRole("button", { name: "Cancel" }).click();
    await page.getByLabel("Given up").selectOption("24h");
    await (await ask("Retry at least 100 dead letters?")).getByRole("button", { name: "Retry all" }).click();
    await page.getByText("100 messages retried.").waitFor();
    assert.equal(retried.length, 1);
    assert.equal(retried[0].consumer, "notify.mail");
    assert.ok(Math.abs(Date.parse(retried[0].to) - Date.parse(retried[0].from) - 86_400_000) < 10_000);
    await page.unrouteAll({ behavior: "ignoreErrors" });
    await close();
  });

  test("a question about dead notifications has their number, filter and range, and its retry ends where the question did", async () => {
    const { page, close } = await world.openSignedIn();
    const [listed, retried] = [[], []];
    const notification = (id) => ({ id, event_id: "evt_x", event_type: "order.paid", user_id: "01890000-0000-7000-8000-000000000000", channel: "webhook",
      status: "dead", attempts: 5, last_error: "refused", created_at: new Date(Date.now() - (200 - id) * 60_000).toISOString() });
    await page.route("**/admin/v1/notifications?*", (route) => {
      listed.push(new URL(route.request().url()).searchParams);
      return route.fulfill({ json: { items: Array.from({ length: 100 }, (_, n) => notification(100 - n)), next_cursor: "1" } });
    });
    await page.route("**/admin/v1/notifications/retry", (route) => {
      retried.push(route.request().postDataJSON());
      return route.fulfill({ json: { count: 100, more: false } });
    });
    await goTo(page, "#/notifications?status=dead");
    const ask = async (...details) => {
      await page.getByRole("button", { name: "Retry all that match" }).click();
      const question = page.getByRole("dialog", { name: "Retry at least 100 dead notifications?" });
      for (const detail of ["from before 3 h ago to 2 h ago", ...details]) await question.getByText(detail, { exact: true }).waitFor();
      return question;
    };
    await (await ask()).getByRole("button", { name: "Cancel" }).click();
    await page.getByLabel("Channel").selectOption("webhook");
    await page.getByLabel("Event type").fill("order.paid");
    await waitFor("the list is filtered", () => listed.at(-1).get("event_type") === "order.paid" && listed.at(-1).get("channel") === "webhook");
    const asked = Date.now();
    const question = await ask("webhook", "order.paid");
    await waitFor("some time passes", () => Date.now() > asked + 1_500);
    await question.getByRole("button", { name: "Retry all" }).click();
    await page.getByText("100 messages retried.").waitFor();
    const [{ to, ...selection }] = retried;
    assert.deepEqual([retried.length, selection], [1, { channel: "webhook", event_type: "order.paid" }]);
    assert.ok(Math.abs(Date.parse(to) - asked) < 1_000, `${to} is not when the question was asked`);
    await page.unrouteAll({ behavior: "ignoreErrors" });
    await close();
  });

  test("an event is found by the UUID that SQL returns", async () => {
    const { event_id: event } = await world.api.post("/hub/v1/events", { event_type: "found.posted", payload: {} });
    const uuid = event.slice(4);
    const { page, close } = await world.openSignedIn();
    const isOpen = async () => {
      await page.getByRole("heading", { name: "found.posted", level: 1 }).waitFor();
      await waitFor("the address has the id of the API", () => page.url().endsWith(`#/events/${event}`));
    };
    await page.keyboard.press("/");
    await page.locator(":focus[aria-label='A page or an id']").waitFor();
    await page.keyboard.type(uuid);
    await page.keyboard.press("Enter");
    await isOpen();
    await goTo(page, "#/events");
    await page.getByLabel("Type or event id").fill(` ${uuid.toUpperCase()} `);
    await page.getByRole("button", { name: "Search" }).click();
    await isOpen();
    await world.api.post("/hub/v1/streams", { name: "found", event_types: ["found.*"] });
    const later = await world.api.post("/hub/v1/events", { event_type: "found.again", payload: {} });
    await waitFor("the stream has the event", async () => (await world.api.get("/hub/v1/streams/found")).lag.messages === 1);
    await goTo(page, "#/streams/found");
    await page.getByLabel("To", { exact: true }).selectOption("event");
    await page.getByLabel("Event", { exact: true }).fill(later.event_id.slice(4));
    const sent = page.waitForRequest("**/streams/found/seek");
    await page.getByRole("button", { name: "Move" }).click();
    assert.equal((await sent).postDataJSON().event_id, later.event_id);
    await page.getByText("Moved: 0 messages to read.").waitFor();
    await world.api.delete("/hub/v1/streams/found");
    await close();
  });
}

/** Where the chart has pixels in the colour of the line "Posted", as shares of its width. */
function lineColumns(canvas) {
  return canvas.evaluate((element) => {
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--chart-blue").trim();
    probe.fillRect(0, 0, 1, 1);
    const line = probe.getImageData(0, 0, 1, 1).data;
    const { width, height } = element;
    const { data } = element.getContext("2d").getImageData(0, 0, width, height);
    const columns = [];
    for (let x = 0; x < width; x += 1) {
      for (let y = 0; y < height; y += 1) {
        const at = (y * width + x) * 4;
        const isLine = [0, 1, 2].every((channel) => Math.abs(data[at + channel] - line[channel]) < 40) && data[at + 3] > 100;
        if (isLine) {
          columns.push(x / width);
          break;
        }
      }
    }
    return columns;
  });
}
