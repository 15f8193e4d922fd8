// Pages that change while they are looked at.
import assert from "node:assert/strict";
import { test } from "node:test";
import { apiClient } from "./support/api.mjs";
import { goTo } from "./support/browser.mjs";
import { startReceiver } from "./support/receiver.mjs";
import { waitFor } from "./support/wait.mjs";

const SEATS = 5;
const PEOPLE = 8;

export function liveTests(world) {
  test("a gathering fills up live, with a waitlist", async () => {
    const people = await tokens(world.pillarbox, PEOPLE + 1);
    const owner = apiClient(world.pillarbox.url, people[0]);
    const gathering = await publishGathering(owner);
    const { page, close } = await world.openSignedIn();
    await goTo(page, `#/gatherings/${gathering}`);
    const seats = page.getByRole("progressbar", { name: /seats are taken/ });
    for (const token of people.slice(1)) await apiClient(world.pillarbox.url, token).post(`/join/v1/events/${gathering}/join`);
    await waitFor("all seats are taken", async () => (await seats.getAttribute("aria-valuenow")) === "100");
    await waitFor("three people wait", async () => /Waitlist\s*3/.test(await page.locator(".stats").innerText()));
    const participants = page.getByRole("table", { name: "Participants" }).getByRole("row");
    await waitFor("the participants are listed", async () => (await participants.count()) === SEATS + 1);

    // Moderation: the seat of a removed user goes to the first who waits.
    await participants.nth(1).getByRole("button", { name: "Remove" }).click();
    await page.getByRole("dialog").getByLabel("Reason").fill("asked to leave");
    await page.getByRole("dialog").getByRole("button", { name: "Remove" }).click();
    await waitFor("one fewer waits", async () => /Waitlist\s*2/.test(await page.locator(".stats").innerText()));
    await close();
  });

  test("the progress of a project is streamed", async () => {
    await world.api.post("/progress/v1/projects", { id: "streamed" });
    await world.api.patch("/progress/v1/projects/streamed", { status: "PROCESSING", total: 4 });
    const { page, close } = await world.openSignedIn();
    await goTo(page, "#/progress/streamed");
    await page.getByText("0 of 4 items").waitFor();
    await world.api.post("/progress/v1/projects/streamed/items", { items: [{ id: "a" }, { id: "b" }, { id: "c" }] });
    await page.getByText("3 of 4 items").waitFor();
    await world.api.post("/progress/v1/projects/streamed/items", { items: [{ id: "d" }] });
    await page.getByText("done", { exact: true }).waitFor();
    await close();
  });

  test("new messages of the log appear in the live tail", async () => {
    const { page, close } = await world.openSignedIn();
    await goTo(page, "#/log/tail");
    const accepted = await world.api.post("/hub/v1/events", { event_type: "tail.seen", payload: {} });
    await page.getByRole("link", { name: "tail.seen" }).click();
    await page.getByText(accepted.event_id).first().waitFor();
    await page.getByRole("row", { name: /hub\.fanout/ }).waitFor();
    await close();
  });

  test("the overview shows no old number as the present one while the server does not answer", async () => {
    const { page, close } = await world.openSignedIn({ expectedStatuses: [503] });
    await goTo(page, "#/");
    const deadLetters = page.locator(".stat", { hasText: "Other dead letters" });
    await waitFor("the number is shown", async () => /\d/.test(await deadLetters.locator(".stat-value").innerText()));
    await page.route("**/admin/v1/overview", (route) => route.fulfill({ status: 503, json: { title: "Service Unavailable" } }));
    await waitFor("the number is gone", async () => (await deadLetters.locator(".stat-value").innerText()) === "…");
    await page.unroute("**/admin/v1/overview");
    const fanOut = page.getByRole("table", { name: "Consumers of the log" }).getByRole("row", { name: /^hub\.fanout/ });
    assert.match(await fanOut.innerText(), /\s0\s*$/, "no dead letter");
    await page.route("**/admin/v1/consumers", (route) => route.fulfill({ status: 503, json: { title: "Service Unavailable" } }));
    await waitFor("no number of a consumer is shown", async () => /^hub\.fanout(\s+…){5}\s*$/.test(await fanOut.innerText()));
    await page.unroute("**/admin/v1/consumers");
    await close();
  });

  test("the page of an event that waits polls less and less, with one request and without the attempts again", async () => {
    const receiver = await startReceiver();
    const create = (name) => world.api.post("/hub/v1/subscribers", { name, url: receiver.url, event_types: ["paused.*"] });
    const [paused, running] = await Promise.all([create("waits"), create("runs")]);
    await world.api.post(`/hub/v1/subscribers/${paused.id}/pause`);
    const { event_id: event } = await world.api.post("/hub/v1/events", { event_type: "paused.posted", payload: { text: "x".repeat(100_000) } });
    await waitFor("the other subscriber has it", () => receiver.received.length === 1);
    const { page, close } = await world.openSignedIn();
    await page.clock.install();
    const requests = [];
    page.on("request", (request) => requests.push(new URL(request.url()).pathname.replace(/.*\/v1\//, "")));
    await goTo(page, `#/events/${event}`);
    await page.getByText("Attempt 1").waitFor();
    assert.equal(requests.filter((path) => path.startsWith("events/")).length, 1);
    requests.length = 0;
    // Ten minutes: after 2, 4, 8, 16 and 32 s, then every minute. Each step waits for the answer that it asked for.
    for (const seconds of [3, 5, 9, 17, 33, ...Array(9).fill(61)]) {
      const before = requests.length;
      const answered = page.waitForResponse((response) => response.url().includes("/hub/v1/events/"));
      await page.clock.runFor(seconds * 1_000);
      await answered;
      assert.equal(requests.length, before + 1, requests.join());
      // The page has stored the answer, so that the next timer runs.
      await page.evaluate(() => new Promise((resolve) => queueMicrotask(resolve)));
      await page.waitForTimeout(50);
    }
    assert.ok(requests.every((path) => path.startsWith("events/")), requests.join());

    // A change is seen, and polled for at the first pace again.
    await world.api.post(`/hub/v1/subscribers/${paused.id}/resume`);
    await waitFor("the paused subscriber has it", () => receiver.received.length === 2);
    requests.length = 0;
    await page.clock.runFor(61_000);
    await page.getByText("Completed", { exact: true }).waitFor();
    assert.equal(requests.filter((path) => path.endsWith("/attempts")).length, 1);
    const again = page.waitForResponse((response) => response.url().includes("/hub/v1/events/"));
    await page.clock.runFor(3_000);
    await again;
    for (const { id } of [paused, running]) await world.api.delete(`/hub/v1/subscribers/${id}`);
    await receiver.stop();
    await close();
  });

  test("a page in the background does not poll", async () => {
    const { page, context, close } = await world.openSignedIn();
    await page.clock.install();
    await goTo(page, "#/log");
    let requests = 0;
    await setHidden(page, true);
    context.on("request", () => (requests += 1));
    await page.clock.runFor(60_000);
    assert.equal(requests, 0);
    await setHidden(page, false);
    await page.clock.runFor(1_000);
    await waitFor("the page polls again", () => requests > 0);
    await close();
  });

  test("hiding and showing the tab during a request starts no second one", async () => {
    const { page, close } = await world.openSignedIn();
    const held = [];
    await goTo(page, "#/log");
    await page.route("**/admin/v1/consumers", (route) => void held.push(route));
    await waitFor("the page polls", () => held.length === 1);
    await setHidden(page, true);
    await setHidden(page, false);
    await page.waitForTimeout(500);
    assert.equal(held.length, 1);
    await held[0].continue();
    await waitFor("the page polls again after the answer", () => held.length === 2);
    await page.unrouteAll({ behavior: "ignoreErrors" });
    await close();
  });
}

/** Chromium without a window does not report hidden tabs, so the test says it in the browser's place. */
function setHidden(page, isHidden) {
  return page.evaluate((value) => {
    Object.defineProperty(document, "hidden", { value, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
  }, isHidden);
}

function tokens(pillarbox, count) {
  const user = (number) => `0190b000-0000-7000-8000-${String(number).padStart(12, "0")}`;
  return Promise.all(Array.from({ length: count }, (_, number) => pillarbox.command("token", "--user", user(number))));
}

async function publishGathering(owner) {
  const event = await owner.post("/event/v1/events", {
    title: "Live test", city: "Bern", category: "tech", capacity: SEATS, time_zone: "Europe/Zurich",
    start_time: "2035-03-01T18:00:00+01:00", end_time: "2035-03-01T21:00:00+01:00",
  });
  await owner.post(`/event/v1/events/${event.id}/publish`);
  await waitFor("joins knows the gathering", () => owner.get(`/join/v1/events/${event.id}/stats`).then(() => true, () => false));
  return event.id;
}
