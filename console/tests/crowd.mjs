// More tenants and subscribers than a choice lists, and findings of another tenant. These tests are the last: their tenants stay.
import assert from "node:assert/strict";
import { test } from "node:test";
import { apiClient } from "./support/api.mjs";
import { goTo } from "./support/browser.mjs";
import { startReceiver } from "./support/receiver.mjs";
import { waitFor } from "./support/wait.mjs";

/** One more than a choice lists. */
const COUNT = 101;

export function crowdTests(world) {
  test("every tenant can be chosen and found, however many there are", async () => {
    for (let number = 1; number <= COUNT; number += 1) {
      await world.api.post("/admin/v1/tenants", { name: `crowd-${String(number).padStart(3, "0")}`, display_name: number === COUNT ? "The very last" : undefined });
    }
    const last = `crowd-${COUNT}`;
    const { page, close } = await world.openSignedIn();
    const choice = page.getByRole("combobox", { name: "Tenant" });
    await page.getByRole("searchbox", { name: "Search tenants" }).fill(last);
    await choice.locator(`option[value="${last}"]`).waitFor({ state: "attached" });
    await choice.selectOption(last);
    await page.getByText(`Webhooks of ${last}`).waitFor();

    await goTo(page, "#/tenants");
    await page.getByLabel("Search", { exact: true }).fill("VERY last");
    await page.getByRole("row", { name: new RegExp(last) }).waitFor();
    assert.equal(await page.getByRole("row", { name: /crowd-/ }).count(), 1);
    await close();
  });

  test("every subscriber can be chosen, and lists show the names of all", async () => {
    const receiver = await startReceiver();
    const tenant = apiClient(world.pillarbox.url, world.adminKey, { "pillarbox-tenant": "crowd-001" });
    // The list begins with the newest, so the first one is not in it.
    for (let number = 1; number <= COUNT; number += 1) {
      await tenant.post("/hub/v1/subscribers", { name: `endpoint-${number}`, url: receiver.url, event_types: [number === 1 ? "first.*" : "other.*"] });
    }
    await tenant.post("/hub/v1/events", { event_type: "first.posted", payload: {} });
    await waitFor("the event arrives", () => receiver.received.length === 1);
    const { page, close } = await world.openSignedIn();
    await goTo(page, "#/deliveries?tenant=crowd-001");
    await page.getByRole("row", { name: /first\.posted endpoint-1 delivered/ }).waitFor();
    await page.getByRole("searchbox", { name: "Search: Subscriber" }).fill("endpoint-1");
    const choice = page.getByRole("combobox", { name: "Subscriber" });
    await choice.locator("option", { hasText: /^endpoint-1$/ }).waitFor({ state: "attached" });
    await choice.selectOption({ label: "endpoint-1" });
    await page.getByRole("row", { name: /first\.posted endpoint-1 delivered/ }).waitFor();
    // A page that is opened by its address also shows the name.
    await page.reload();
    await waitFor("the name is shown", async () => (await choice.locator("option:checked").innerText()) === "endpoint-1");

    // The overview of the tenant claims nothing about those that it does not look at.
    await goTo(page, "#/?tenant=crowd-001");
    await page.getByText("This page is about the 10 newest subscribers").waitFor();
    await page.getByText("None of these subscribers fails").waitFor();
    assert.equal(await page.getByText("Everything works").count(), 0);
    await receiver.stop();
    await close();
  });

  test("a finding about another tenant leads to the pages of that tenant", async () => {
    const receiver = await startReceiver({ status: 422 });
    const tenant = apiClient(world.pillarbox.url, world.adminKey, { "pillarbox-tenant": "crowd-002" });
    await tenant.post("/hub/v1/subscribers", { name: "refuses", url: receiver.url, event_types: ["*"] });
    await tenant.post("/hub/v1/events/batch", { events: Array.from({ length: 60 }, (_, n) => ({ event_type: "crowd.refused", payload: { n } })) });
    await waitFor("all messages die", async () => (await tenant.get("/hub/v1/dead-letters?limit=100")).items.length === 60);
    const { page, close } = await world.openSignedIn();
    await page.getByRole("link", { name: "Dead letters of crowd-002 (60)" }).click();
    await page.getByRole("heading", { name: "Dead letters", level: 1 }).waitFor();
    await page.getByRole("row", { name: /crowd\.refused refuses/ }).first().waitFor();
    assert.equal(await page.getByRole("combobox", { name: "Tenant" }).inputValue(), "crowd-002");
    // The address names the tenant, so that a copied link opens the same page.
    assert.ok(page.url().includes("tenant=crowd-002"));
    await receiver.stop();
    await close();
  });

  test("a tenant with a stream alone is not told that its events have no recipient", async () => {
    await world.api.post("/admin/v1/tenants", { name: "pulls" });
    const tenant = apiClient(world.pillarbox.url, world.adminKey, { "pillarbox-tenant": "pulls" });
    await tenant.post("/hub/v1/streams", { name: "all", event_types: ["*"] });
    const { event_id: event } = await tenant.post("/hub/v1/events", { event_type: "pulled.posted", payload: {} });
    const { page, close } = await world.openSignedIn();
    await goTo(page, "#/?tenant=pulls");
    await page.getByRole("table", { name: "Streams" }).getByRole("row", { name: /all \* 1 0/ }).waitFor();
    await goTo(page, `#/events/${event}`);
    await page.getByText("Matched a stream, or subscribers that were deleted since").waitFor();
    await close();
  });

  test("an event whose subscriber was deleted is not said to have none", async () => {
    const receiver = await startReceiver({ status: 200 });
    const subscriber = await world.api.post("/hub/v1/subscribers", { name: "leaves", url: receiver.url, event_types: ["left.posted"] });
    const { event_id: event } = await world.api.post("/hub/v1/events", { event_type: "left.posted", payload: {} });
    await waitFor("the event is delivered", async () => (await world.api.get(`/hub/v1/events/${event}`)).status === "completed");
    await world.api.delete(`/hub/v1/subscribers/${subscriber.id}`);
    await waitFor("the subscriber is gone", async () => (await world.api.get(`/hub/v1/events/${event}`)).outcomes.length === 0);
    const { page, close } = await world.openSignedIn();
    await goTo(page, `#/events/${event}`);
    await page.getByText("No subscriber that still exists").waitFor();
    await receiver.stop();
    await close();
  });
}
