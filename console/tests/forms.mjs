// Streams, the catalogue, and forms: what is entered arrives at the API, and mistakes are shown where they are.
import assert from "node:assert/strict";
import { test } from "node:test";
import { goTo } from "./support/browser.mjs";
import { waitFor } from "./support/wait.mjs";

export function formTests(world) {
  test("a stream is created, read, moved and deleted from its page", async () => {
    const { page, close } = await world.openSignedIn({ expectedStatuses: [409] });
    await goTo(page, "#/streams");
    await page.getByRole("link", { name: "Create a stream" }).first().click();
    await page.getByLabel("Name").fill("orders");
    await page.getByLabel("Event types").fill("streamed.*");
    await page.getByLabel("Filter").fill('[{"pointer": "/n", "op": "gte"');
    await page.getByRole("button", { name: "Create" }).click();
    await page.getByText(/must be JSON: check line 1, column \d+/).waitFor();
    await page.getByLabel("Filter").fill("");
    await page.getByRole("button", { name: "Create" }).click();
    await page.getByText("No reader", { exact: true }).waitFor();

    await world.api.post("/hub/v1/events/batch", { events: [1, 2, 3].map((n) => ({ event_type: "streamed.item", payload: { n } })) });
    const toRead = page.locator(".stat", { hasText: "Messages to read" });
    await toRead.getByText("3", { exact: true }).waitFor();
    const pulled = await world.api.post("/hub/v1/streams/orders/pull", { reader: "worker-1" });
    await world.api.post("/hub/v1/streams/orders/acknowledge", { reader: "worker-1", cursor: pulled.cursor });
    await page.getByRole("row", { name: /worker-1/ }).first().waitFor();
    await toRead.getByText("0", { exact: true }).waitFor();

    await page.getByLabel("To", { exact: true }).selectOption("oldest");
    await page.getByRole("button", { name: "Move" }).click();
    await page.getByText(/leases/).first().waitFor();
    await page.getByLabel("End the leases of readers").check();
    await page.getByRole("button", { name: "Move" }).click();
    await page.getByText("Moved: 3 messages to read.").waitFor();

    await page.getByRole("button", { name: "Delete" }).click();
    await page.getByLabel("Type orders to confirm").fill("orders");
    await page.getByRole("dialog").getByRole("button", { name: "Delete" }).click();
    await page.getByText("No stream", { exact: true }).waitFor();
    await close();
  });

  test("batches, retry rules and credentials are set in the form, and a stored secret stays", async () => {
    const { page, close } = await world.openSignedIn({ expectedStatuses: [422] });
    await goTo(page, "#/subscribers/new");
    await page.getByLabel("Name").fill("everything");
    await page.getByLabel("URL", { exact: true }).fill("https://127.0.0.1:1/hook");
    await page.getByLabel("Event types").fill("never.*");
    await page.getByLabel("Messages per request").fill("20");
    await page.getByLabel("Wait for more messages (ms)").fill("250");
    await page.getByLabel("Retry rules").fill("404: retry\nnonsense");
    await page.getByLabel("Authentication").selectOption("oauth2");
    await page.getByLabel("Token URL").fill("https://127.0.0.1:1/token");
    await page.getByLabel("Client id").fill("console");
    await page.getByLabel("Client secret").fill("very secret");
    await page.getByLabel("Scope").fill("webhooks");
    await page.getByRole("button", { name: "Create", exact: true }).click();
    await page.getByText("line 2 must be a status and what to do").waitFor();
    await page.getByLabel("Retry rules").fill("404: retry\n4xx: sometimes");
    await page.getByRole("button", { name: "Create", exact: true }).click();
    await page.locator(".field-error", { hasText: "dead_letter" }).waitFor();
    await page.getByLabel("Retry rules").fill("404: retry\n422: dead_letter");
    await page.getByRole("button", { name: "Create", exact: true }).click();
    await page.getByRole("button", { name: "I have stored it" }).click();
    await page.getByRole("heading", { name: "everything", exact: true, level: 1 }).waitFor();
    const find = async () => (await world.api.get("/hub/v1/subscribers?q=everything")).items[0];
    const made = await find();
    assert.deepEqual(made.batch, { max: 20, wait_ms: 250 });
    assert.deepEqual(made.retry_rules, { 404: "retry", 422: "dead_letter" });
    assert.deepEqual(made.auth, { type: "oauth2", token_url: "https://127.0.0.1:1/token", client_id: "console", client_secret: "***", scope: "webhooks" });

    await page.getByRole("link", { name: "Edit" }).click();
    assert.equal(await page.getByLabel("Client secret").inputValue(), "***");
    await page.getByLabel("Scope").fill("others");
    await page.getByLabel("Messages per request").fill("");
    await page.getByRole("button", { name: "Save" }).click();
    await page.getByRole("heading", { name: "everything", exact: true, level: 1 }).waitFor();
    const changed = await find();
    assert.equal(changed.auth.scope, "others");
    assert.equal(changed.batch ?? null, null);

    await page.getByRole("link", { name: "Edit" }).click();
    await page.getByLabel("Authentication").selectOption("mtls");
    await page.getByLabel("Certificate").fill("no certificate");
    await page.getByLabel("Private key").fill("no key");
    await page.getByRole("button", { name: "Save" }).click();
    await page.locator(".field-error", { hasText: /PEM/ }).first().waitFor();
    await page.getByLabel("Authentication").selectOption("");
    await page.getByRole("button", { name: "Save" }).click();
    await page.getByRole("heading", { name: "everything", exact: true, level: 1 }).waitFor();
    assert.equal((await find()).auth ?? null, null);
    await world.api.delete(`/hub/v1/subscribers/${made.id}`);
    await close();
  });

  test("the catalogue of main is shared and no longer shared from its page", async () => {
    const { page, close } = await world.openSignedIn();
    await goTo(page, "#/event-types/new");
    await page.getByLabel("Name").fill("shared.type");
    await page.getByLabel("Schema").fill('{\n  "type": "object",\n  nonsense\n}');
    await page.getByRole("button", { name: "Add", exact: true }).click();
    await page.getByText("must be JSON: check line 3, column 3").waitFor();
    assert.equal(await page.getByLabel("Schema").getAttribute("aria-invalid"), "true");
    await page.getByLabel("Schema").fill('{"type": "object"}');
    await page.getByRole("button", { name: "Add", exact: true }).click();
    await page.getByRole("heading", { name: "shared.type", level: 1 }).waitFor();

    await goTo(page, "#/event-types");
    const isShared = async () => (await world.api.get("/hub/v1/catalogue")).shared;
    for (const [button, confirm, expected] of [["Share it with all tenants", "Share", true], ["Stop sharing it", "Stop sharing", false]]) {
      await page.getByRole("button", { name: button }).click();
      await page.getByRole("dialog").getByRole("button", { name: confirm }).click();
      await waitFor(`shared is ${expected}`, async () => (await isShared()) === expected);
    }
    await page.getByRole("button", { name: "Share it with all tenants" }).waitFor();
    await world.api.delete("/hub/v1/event-types/shared.type");
    await close();
  });
}
