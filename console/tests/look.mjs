// Every page: accessible in both themes, no horizontal scrolling on a phone, usable by keyboard.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { test } from "node:test";
import { goTo } from "./support/browser.mjs";
import { startReceiver } from "./support/receiver.mjs";
import { waitFor } from "./support/wait.mjs";

const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

export function lookTests(world) {
  for (const colorScheme of ["light", "dark"]) {
    test(`no page has a serious accessibility problem (${colorScheme})`, async () => {
      const { page, close } = await world.openSignedIn({ context: { colorScheme } });
      // The policy of the page forbids foreign scripts; the debugger may evaluate them.
      await page.evaluate(AXE);
      for (const address of await allPages(world)) {
        await goTo(page, address);
        const serious = await page.evaluate(async () => {
          const { violations } = await globalThis.axe.run(document, { resultTypes: ["violations"] });
          return violations.filter(({ impact }) => impact === "serious" || impact === "critical")
            .map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map((node) => `${node.html.slice(0, 160)} ${node.any[0]?.message ?? ""}`).join(" | ")}`);
        });
        assert.deepEqual(serious, [], address);
      }
      await close();
    });
  }

  test("no page scrolls horizontally at 390 px", async () => {
    const { page, close } = await world.openSignedIn({ context: { viewport: { width: 390, height: 844 } } });
    for (const address of await allPages(world)) {
      await goTo(page, address);
      const width = await page.evaluate(() => document.documentElement.scrollWidth);
      assert.ok(width <= 390, `${address} is ${width} px wide`);
    }
    await page.getByRole("button", { name: "Menu" }).click();
    await page.getByRole("link", { name: "Tenants" }).click();
    await page.getByRole("heading", { name: "Tenants" }).waitFor();
    await close();
  });

  test("the column that names a row is readable at 1024 px", async () => {
    const letter = await makeDeadLetter(world);
    const { page, close } = await world.openSignedIn({ context: { viewport: { width: 1024, height: 768 } } });
    for (const address of ["#/events", "#/deliveries", "#/dead-letters", "#/notifications"]) {
      await goTo(page, address);
      const cells = page.locator("td.primary");
      await cells.first().waitFor();
      const width = await cells.first().evaluate((cell) => cell.getBoundingClientRect().width);
      assert.ok(width >= 150, `${address}: ${width} px`);
    }
    // Nor is the last column cut off.
    for (const [address, last] of [["#/events", page.locator("td time")], ["#/dead-letters", page.getByRole("button", { name: "Discard", exact: true })]]) {
      await goTo(page, address);
      const [cell, card] = await Promise.all([last.first(), page.locator(".card")].map((element) => element.boundingBox()));
      assert.ok(cell.x + cell.width <= card.x + card.width, `${address}: the last column is cut off`);
    }
    await letter.remove();
    await close();
  });

  test("the focus stays where the person works", async () => {
    const letter = await makeDeadLetter(world);
    const { page, close } = await world.openSignedIn({ expectedStatuses: [422, 503] });
    const focused = () => page.evaluate(() => document.activeElement?.textContent ?? "");
    const subscriber = (await world.api.get("/hub/v1/subscribers")).items[0];
    await goTo(page, `#/subscribers/${subscriber.id}`);
    await page.getByRole("button", { name: "Delete", exact: true }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Cancel" }).click();
    await waitFor("the button has the focus again", async () => (await focused()) === "Delete");

    await goTo(page, "#/tenants/new");
    const name = page.getByLabel("Name", { exact: true });
    await name.fill("Not A Name!");
    await page.getByRole("button", { name: "Create" }).click();
    await page.locator(".field-error").waitFor();
    await waitFor("the field that is wrong has the focus", () => name.evaluate((field) => field === document.activeElement));

    // An error that belongs to no field.
    await name.fill("a-name");
    await page.route("**/admin/v1/tenants", (route) => route.fulfill({ status: 503, json: { title: "Service Unavailable" } }));
    await page.getByRole("button", { name: "Create" }).click();
    await waitFor("the error has the focus", async () => (await focused()).startsWith("Service Unavailable"));
    await page.unroute("**/admin/v1/tenants");

    // The button of a form that asks, and one that has nothing to count.
    await goTo(page, "#/replays/new");
    await page.getByLabel("Send to").selectOption({ label: "All subscribers" });
    await page.getByRole("button", { name: "Start the replay" }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Cancel" }).click();
    await waitFor("the button of the form has the focus again", async () => (await focused()) === "Start the replay");
    await page.getByRole("button", { name: "Count" }).click();
    await page.locator(".notice", { hasText: "would be sent" }).waitFor();
    await waitFor("the other button has the focus again", async () => (await focused()) === "Count");

    await goTo(page, "#/dead-letters");
    await page.getByRole("button", { name: "Retry all that match" }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Cancel" }).click();
    await waitFor("the button of a bulk action has the focus again", async () => (await focused()) === "Retry all that match");
    await letter.remove();
    await close();
  });

  test("marks that change the direction of text are shown", async () => {
    const receiver = await startReceiver({ status: 422, text: "refused \u202eyllaer" });
    const subscriber = await world.api.post("/hub/v1/subscribers", { name: "marked \u2067name", url: receiver.url, event_types: ["marks.*"] });
    const event = await world.api.post("/hub/v1/events", { event_type: "marks.posted", ordering_key: "key\u202e1", payload: { note: "a\u202eb" } });
    await waitFor("the message dies", async () => (await world.api.get(`/hub/v1/dead-letters?subscriber_id=${subscriber.id}`)).items.length === 1);
    const { page, context, close } = await world.openSignedIn();
    await goTo(page, `#/events/${event.event_id}`);
    await page.getByText(String.raw`"note": "a\u202eb"`).waitFor();
    await page.getByText(String.raw`refused \u202eyllaer`).waitFor();
    await page.getByText(String.raw`marked \u2067name`).waitFor();
    await goTo(page, "#/events");
    await page.getByRole("cell", { name: String.raw`key\u202e1`, exact: true }).waitFor();
    // What is copied is what was posted.
    await goTo(page, `#/events/${event.event_id}`);
    await context.grantPermissions(["clipboard-read", "clipboard-write"]);
    await page.getByRole("button", { name: "Copy payload" }).click();
    assert.deepEqual(JSON.parse(await page.evaluate(() => navigator.clipboard.readText())), { note: "a\u202eb" });
    await world.api.delete(`/hub/v1/subscribers/${subscriber.id}`);
    await receiver.stop();
    await close();
  });

  test("the keyboard reaches pages, dialogs and actions", async () => {
    const { page, close } = await world.openSignedIn();
    await page.keyboard.press("/");
    await page.locator(":focus[aria-label='A page or an id']").waitFor();
    await page.keyboard.type("subscr");
    await page.keyboard.press("Enter");
    await page.getByRole("heading", { name: "Subscribers", level: 1 }).waitFor();
    await page.keyboard.press("/");
    await page.getByRole("dialog").waitFor();
    await page.keyboard.press("Escape");
    await page.getByRole("dialog").waitFor({ state: "detached" });
    await goTo(page, "#/events");
    await page.getByRole("button", { name: "Post an event" }).focus();
    await page.keyboard.press("Enter");
    await page.getByRole("dialog").getByLabel("Type").focus();
    await page.keyboard.press("Enter");
    await page.getByText("Delivery history").waitFor();
    await close();
  });

  test("the server's errors are shown beside their fields", async () => {
    const { page, close } = await world.openSignedIn({ expectedStatuses: [422] });
    await goTo(page, "#/tenants/new");
    await page.getByLabel("Name", { exact: true }).fill("Not A Name!");
    await page.getByRole("button", { name: "Create" }).click();
    const field = page.getByLabel("Name", { exact: true });
    await page.locator(".field-error").waitFor();
    assert.equal(await field.getAttribute("aria-invalid"), "true");
    await close();
  });
}

/** A message that was given up; `remove` deletes its subscriber with it. */
async function makeDeadLetter(world) {
  const receiver = await startReceiver({ status: 422 });
  const { id } = await world.api.post("/hub/v1/subscribers", { name: "given-up", url: receiver.url, event_types: ["givenup.*"] });
  await world.api.post("/hub/v1/events", { event_type: "givenup.item", payload: {} });
  await waitFor("the message dies", async () => (await world.api.get(`/hub/v1/dead-letters?subscriber_id=${id}`)).items.length === 1);
  const remove = async () => {
    await world.api.delete(`/hub/v1/subscribers/${id}`);
    await receiver.stop();
  };
  return { remove };
}

/** Every page with data: those of the navigation, and one object of each kind. */
async function allPages(world) {
  const first = async (path) => (await world.api.get(path)).items[0];
  const subscriber = await first("/hub/v1/subscribers");
  const event = await first("/hub/v1/events");
  const letter = await first("/hub/v1/dead-letters");
  const replay = await first("/hub/v1/replays");
  const gathering = await first("/event/v1/events");
  // It exists from the second theme on.
  await world.api.post("/hub/v1/streams", { name: "look", event_types: ["*"] }).catch(() => {});
  return [
    "#/", "#/events", `#/events/${event.event_id}`, "#/subscribers", "#/subscribers/new", `#/subscribers/${subscriber.id}`,
    `#/subscribers/${subscriber.id}?tab=health`, `#/subscribers/${subscriber.id}?tab=settings`, `#/subscribers/${subscriber.id}/edit`,
    "#/deliveries", "#/dead-letters", "#/dead-letters/consumers", `#/dead-letters/${letter.id}`, "#/replays", "#/replays/new", `#/replays/${replay.id}`,
    "#/streams", "#/streams/new", "#/streams/look",
    "#/event-types", "#/event-types/new", "#/log", "#/log/tail", "#/log/parked", "#/gatherings", `#/gatherings/${gathering.id}`,
    `#/gatherings/${gathering.id}/history`, "#/progress", "#/progress/streamed", "#/notifications", "#/notifications/mail", "#/notifications/announcements",
    "#/tenants", "#/tenants/new", "#/tenants/acme", "#/tenants/audit", "#/keys", "#/keys/portal",
  ];
}
