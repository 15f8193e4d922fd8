// From a new subscriber to a message that dies, is retried from the page, and arrives.
import assert from "node:assert/strict";
import { test } from "node:test";
import { goTo } from "./support/browser.mjs";
import { startReceiver } from "./support/receiver.mjs";
import { waitFor } from "./support/wait.mjs";

export function deliveryTests(world) {
  test("a message that dies is retried from the page and arrives", async () => {
    const receiver = await startReceiver();
    const { page, close } = await world.openSignedIn();
    await createSubscriber(page, receiver.url);

    await page.getByRole("button", { name: "Send a test" }).click();
    await page.getByText("The test was delivered").waitFor();
    assert.equal(receiver.received.length, 1);

    // The table is refreshed by itself: nothing reloads the page from here on.
    await page.evaluate(() => (window.isSamePage = true));
    const first = await world.api.post("/hub/v1/events", { event_type: "order.paid", payload: { id: 1 } });
    const deliveries = page.getByRole("table", { name: "Deliveries" });
    await deliveries.getByRole("row", { name: /order\.paid delivered 1 200/ }).waitFor();
    assert.ok(receiver.received.some(({ id }) => id === first.event_id));

    receiver.answerWith(500);
    const second = await world.api.post("/hub/v1/events", { event_type: "order.lost", payload: { id: 2 } });
    await deliveries.getByRole("row", { name: /order\.lost dead 2 500/ }).waitFor();

    await goTo(page, "#/dead-letters");
    receiver.answerWith(200);
    const letter = page.getByRole("row", { name: /order\.lost/ });
    await letter.getByRole("button", { name: "Retry" }).click();
    await waitFor("the retried message arrives", () => receiver.received.some(({ id, status }) => id === second.event_id && status === 200));
    await letter.waitFor({ state: "detached" });

    await goTo(page, `#/events/${second.event_id}`);
    await page.getByText("Attempt 3").waitFor();
    await page.getByText("Retried: its dead letter was sent again").waitFor();
    await page.getByText("Completed", { exact: true }).waitFor();

    // However often a message is sent, it is one delivery with one outcome.
    await page.getByRole("link", { name: "Open the delivery" }).click();
    await page.getByRole("button", { name: "Send again" }).click();
    await page.getByRole("dialog", { name: "Send this message to billing again?" }).getByRole("button", { name: "Send again" }).click();
    await page.getByText("finished").waitFor();
    await goTo(page, "#/deliveries");
    await page.getByRole("row", { name: /order\.lost billing delivered replayed 1 200/ }).waitFor();
    assert.equal(await page.getByRole("row", { name: /order\.lost/ }).count(), 1);
    await page.getByRole("link", { name: "order.lost" }).click();
    await page.getByText("Sent again by a replay").waitFor();
    assert.equal(await page.evaluate(() => window.isSamePage), true);
    await receiver.stop();
    await close();
  });

  test("a dead delivery offers to retry its dead letter, which is then closed", async () => {
    const receiver = await startReceiver({ status: 422 });
    const subscriber = await world.api.post("/hub/v1/subscribers", { name: "one", url: receiver.url, event_types: ["one.*"] });
    const event = await world.api.post("/hub/v1/events", { event_type: "one.dead", payload: {} });
    const open = async () => (await world.api.get(`/hub/v1/dead-letters?subscriber_id=${subscriber.id}&retried=false`)).items;
    await waitFor("the message dies", async () => (await open()).length === 1);
    const { page, close } = await world.openSignedIn();
    await goTo(page, `#/deliveries/${event.event_id.slice(4)}.${subscriber.id}`);
    await page.getByRole("link", { name: "Open the dead letter" }).waitFor();
    assert.equal(await page.getByRole("button", { name: "Send again" }).count(), 0);
    receiver.answerWith(200);
    await page.getByRole("button", { name: "Retry" }).click();
    await page.getByText("Retried: its dead letter was sent again").waitFor();
    await page.getByRole("button", { name: "Send again" }).waitFor();
    assert.deepEqual(await open(), []);

    // A replay of the event also closes its dead letter.
    receiver.answerWith(422);
    const second = await world.api.post("/hub/v1/events", { event_type: "one.dead", payload: {} });
    await waitFor("the second message dies", async () => (await open()).length === 1);
    receiver.answerWith(200);
    await goTo(page, `#/events/${second.event_id}`);
    await page.getByRole("button", { name: "Send again" }).click();
    const question = page.getByRole("dialog", { name: "Send this event again?" });
    await question.getByText("Until now it was sent to 1 subscriber.").waitFor();
    await question.getByRole("button", { name: "Send again" }).click();
    await page.getByText("finished").waitFor();
    await waitFor("the dead letter is closed", async () => (await open()).length === 0);
    await world.api.delete(`/hub/v1/subscribers/${subscriber.id}`);
    await receiver.stop();
    await close();
  });

  test("a rejected event shows what is wrong, and is delivered when its type is mended and it is checked again", async () => {
    const receiver = await startReceiver();
    const subscriber = await world.api.post("/hub/v1/subscribers", { name: "invoices", url: receiver.url, event_types: ["invoice.*"] });
    const schema = (maximum) => ({ properties: { total: { maximum } } });
    await world.api.post("/hub/v1/event-types", { name: "invoice.sent", schema: schema(5) });
    const id = await world.pillarbox.sql(`select pillarbox.post('invoice.sent', '{"total": 9}')`);
    const { page, close } = await world.openSignedIn();
    await goTo(page, "#/events");
    await page.getByLabel("Status").selectOption({ label: "Rejected" });
    await page.getByRole("row", { name: /invoice\.sent .*\/payload\/total must be at most 5/ }).getByRole("link").first().click();
    await page.getByRole("table", { name: "Errors" }).getByRole("row", { name: "/payload/total must be at most 5" }).waitFor();
    await page.getByText("Rejected by version 1 of its event type: it is not sent").waitFor();
    assert.equal(receiver.received.length, 0);

    await world.api.post("/hub/v1/event-types/invoice.sent/versions", { schema: schema(10) });
    await page.getByRole("button", { name: "Check again" }).click();
    await waitFor("the event is delivered", () => receiver.received.some((webhook) => webhook.id === `evt_${id}` && webhook.status === 200));
    await page.getByText("Completed", { exact: true }).waitFor();
    await goTo(page, "#/events?status=rejected");
    await page.getByText("No event matches").waitFor();
    await world.api.delete(`/hub/v1/subscribers/${subscriber.id}`);
    await world.api.delete("/hub/v1/event-types/invoice.sent");
    await receiver.stop();
    await close();
  });

  test("many dead letters are retried together, and one is discarded after a confirmation", async () => {
    const receiver = await startReceiver({ status: 422 });
    const subscriber = await world.api.post("/hub/v1/subscribers", { name: "many", url: receiver.url, event_types: ["many.*"] });
    const events = Array.from({ length: 30 }, (_, index) => ({ event_type: "many.item", payload: { index } }));
    await world.api.post("/hub/v1/events/batch", { events });
    const letters = async () => (await world.api.get(`/hub/v1/dead-letters?subscriber_id=${subscriber.id}&retried=false&limit=100`)).items;
    await waitFor("all messages die", async () => (await letters()).length === 30);

    const { page, close } = await world.openSignedIn();
    await goTo(page, `#/dead-letters?subscriber=${subscriber.id}`);
    await page.getByRole("button", { name: "Discard", exact: true }).first().click();
    await page.getByRole("dialog").getByRole("button", { name: "Cancel" }).click();
    assert.equal((await letters()).length, 30);
    await page.getByRole("button", { name: "Discard", exact: true }).first().click();
    await page.getByRole("dialog").getByRole("button", { name: "Discard" }).click();
    await waitFor("one is discarded", async () => (await letters()).length === 29);

    receiver.answerWith(200);
    await page.getByLabel("Given up").selectOption({ label: "In the last hour" });
    await page.getByRole("button", { name: "Retry all that match" }).click();
    const question = page.getByRole("dialog", { name: "Retry 29 dead letters?" });
    await question.getByText("many", { exact: true }).waitFor();
    await question.getByRole("button", { name: "Retry all" }).click();
    await page.getByText("29 messages retried.").waitFor();
    await waitFor("the retried messages arrive", () => receiver.received.filter(({ status }) => status === 200).length === 29);
    await page.getByText("No dead letter", { exact: true }).waitFor();
    await receiver.stop();
    await close();
  });

  test("a subscriber is paused, edited, rotated and deleted from its page", async () => {
    const receiver = await startReceiver();
    const created = await world.api.post("/hub/v1/subscribers", { name: "to-change", url: receiver.url, event_types: ["change.*"] });
    const { page, close } = await world.openSignedIn({ expectedStatuses: [422] });
    await goTo(page, `#/subscribers/${created.id}`);

    await page.getByRole("button", { name: "Pause" }).click();
    await page.getByText("paused", { exact: true }).waitFor();
    await page.getByRole("button", { name: "Resume" }).click();
    await page.getByText("enabled", { exact: true }).waitFor();

    await page.getByRole("button", { name: "Rotate secret" }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Rotate" }).click();
    await page.getByText(/^whsec_/).waitFor();
    await page.getByRole("button", { name: "I have stored it" }).click();

    await page.getByRole("link", { name: "Edit" }).click();
    await page.getByLabel("Timeout (ms)").fill("1");
    await page.getByRole("button", { name: "Save" }).click();
    await page.locator(".field-error").first().waitFor();
    await page.getByLabel("Timeout (ms)").fill("5000");
    await page.getByRole("button", { name: "Save" }).click();
    await page.getByRole("button", { name: "Delete" }).click();
    const dialog = page.getByRole("dialog");
    assert.equal(await dialog.getByRole("button", { name: "Delete" }).isDisabled(), true);
    await dialog.getByLabel("Type to-change to confirm").fill("to-change");
    await dialog.getByRole("button", { name: "Delete" }).click();
    await page.getByRole("heading", { name: "Subscribers" }).waitFor();
    const left = await world.api.get("/hub/v1/subscribers");
    assert.ok(!left.items.some(({ id }) => id === created.id));
    await receiver.stop();
    await close();
  });

  test("a replay is counted, started and watched until its end", async () => {
    const receiver = await startReceiver();
    const subscriber = await world.api.post("/hub/v1/subscribers", { name: "replayed", url: receiver.url, event_types: ["replay.*"] });
    const events = Array.from({ length: 40 }, (_, index) => ({ event_type: "replay.item", payload: { index } }));
    await world.api.post("/hub/v1/events/batch", { events });
    await waitFor("the live messages arrive", () => receiver.received.length === 40);

    const { page, close } = await world.openSignedIn();
    await goTo(page, "#/replays/new");
    assert.equal(await page.getByRole("button", { name: "Start the replay" }).isEnabled(), false, "no subscriber is chosen yet");
    await page.getByLabel("Send to").selectOption({ label: "One subscriber" });
    await page.getByLabel("Subscriber", { exact: true }).selectOption({ label: "replayed" });
    await page.getByLabel("Messages per second").fill("20");
    await page.getByRole("button", { name: "Count" }).click();
    await page.getByText("40 messages").waitFor();
    assert.equal(receiver.received.length, 40);

    const ask = async (title, ...details) => {
      await page.getByRole("button", { name: "Start the replay" }).click();
      const question = page.getByRole("dialog", { name: title });
      for (const detail of ["replayed", ...details]) await question.getByText(detail, { exact: true }).waitFor();
      return question;
    };
    const [from, to] = [page.getByLabel("From", { exact: true }), page.getByLabel("To", { exact: true })];
    const lastHour = await from.inputValue();
    await from.fill(await hoursAgo(page, 3));
    await to.fill(await hoursAgo(page, 2));
    await (await ask("Send 0 messages again?", "3 h ago", "2 h ago")).getByRole("button", { name: "Cancel" }).click();
    await from.fill(lastHour);
    await to.fill("");
    const question = await ask("Send 40 messages again?", "1 h ago", "now");
    await question.getByRole("button", { name: "Start the replay" }).click();
    const bar = page.getByRole("progressbar");
    await bar.waitFor();
    // 40 messages at 20 per second take 2 s, so the bar is seen before its end.
    const share = async () => Number(await bar.getAttribute("aria-valuenow"));
    await waitFor("the bar moves", async () => (await share()) > 0);
    await page.getByText("finished").waitFor();
    await waitFor("the bar is full", async () => (await share()) === 100);
    await waitFor("the messages arrive again", () => receiver.received.length === 80);
    await world.api.delete(`/hub/v1/subscribers/${subscriber.id}`);
    await receiver.stop();
    await close();
  });
}

/** A value of a field for a local time. */
function hoursAgo(page, hours) {
  return page.evaluate((before) => {
    const now = new Date();
    return new Date(now.getTime() - now.getTimezoneOffset() * 60_000 - before * 3_600_000).toISOString().slice(0, 16);
  }, hours);
}

async function createSubscriber(page, url) {
  await page.getByRole("link", { name: "Subscribers", exact: true }).click();
  await page.getByRole("link", { name: "Create a subscriber" }).first().click();
  await page.getByLabel("Name").fill("billing");
  await page.getByLabel("URL").fill(url);
  await page.getByLabel("Event types").fill("order.*");
  await page.getByLabel("Pauses between attempts (s)").fill("1");
  await page.getByRole("button", { name: "Create", exact: true }).click();
  await page.getByText(/^whsec_/).waitFor();
  await page.getByRole("button", { name: "I have stored it" }).click();
  await page.getByRole("heading", { name: "billing", level: 1 }).waitFor();
}
