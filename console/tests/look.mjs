// Every page: accessible in both themes, no horizontal scrolling on a phone, usable by keyboard.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { test } from "node:test";
import { goTo } from "./support/browser.mjs";

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

  test("the keyboard reaches pages, dialogs and actions", async () => {
    const { page, close } = await world.openSignedIn();
    await page.keyboard.press("/");
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
