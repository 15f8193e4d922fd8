// Who sees what: keys, portal tokens, users.
import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { apiClient } from "./support/api.mjs";
import { goTo, signInAsUser } from "./support/browser.mjs";
import { registerOperator } from "./support/people.mjs";
import { startReceiver } from "./support/receiver.mjs";
import { waitFor } from "./support/wait.mjs";

const HUB_PAGES = ["#/", "#/events", "#/subscribers", "#/deliveries", "#/dead-letters", "#/replays", "#/streams", "#/event-types"];
const WRONG_KEY = "pbx_wrong_0123456789abcdefghijklmn";
const SECRET_NAME = "other-tenants-subscriber";

export function accessTests(world) {
  test("a manage key and a portal token see nothing of another tenant", async () => {
    const receiver = await startReceiver({ status: 422 });
    const { acme, globex } = await twoTenants(world, receiver.url);
    const manageKey = await world.api.post("/admin/v1/keys", { name: "acme console", role: "manage", tenant: "acme" });
    const portal = await acme.api.post("/hub/v1/portal-tokens", { access: "read" });
    for (const bearer of [manageKey.key, portal.token]) {
      const { page, close } = await world.openSignedIn({ bearer, expectedStatuses: [403, 404] });
      for (const address of HUB_PAGES) {
        await goTo(page, address);
        const text = await page.locator("body").innerText();
        assert.ok(!text.includes(SECRET_NAME) && !text.includes("globex"), `${address} shows another tenant`);
      }
      await goTo(page, "#/subscribers");
      await page.getByText("acme-subscriber").waitFor();
      for (const address of [`#/subscribers/${globex.subscriber}`, `#/events/${globex.event}`]) {
        await goTo(page, address);
        await page.getByRole("alert").first().waitFor();
        assert.ok(!(await page.locator("body").innerText()).includes(SECRET_NAME));
      }
      assert.equal(await page.getByRole("link", { name: "Tenants" }).count(), 0);
      await close();
    }
    await receiver.stop();
  });

  test("a portal link signs in, disappears from the address, and can be embedded", async () => {
    const acme = apiClient(world.pillarbox.url, world.adminKey, { "pillarbox-tenant": "acme" });
    const portal = await acme.post("/hub/v1/portal-tokens", { access: "read" });
    const { page, close } = await world.open({ expectedStatuses: [403] });
    await page.goto(`${world.console.url}/console/?embed=1#token=${portal.token}`);
    await page.getByRole("heading", { name: "Overview", level: 1 }).waitFor();
    assert.ok(!page.url().includes(portal.token));
    assert.equal(await page.locator(".sidebar").count(), 0);
    assert.equal(await page.evaluate(() => localStorage.length + document.cookie.length), 0);
    await close();
  });

  test("an operator acts for a tenant and sees its data only", async () => {
    const { page, close } = await world.openSignedIn();
    await goTo(page, "#/subscribers");
    await page.getByLabel("Tenant").selectOption("globex");
    await page.getByText(SECRET_NAME).waitFor();
    assert.equal(await page.getByText("acme-subscriber").count(), 0);
    await close();
  });

  test("a bulk action ends when another tenant is chosen, and never reaches that tenant", async () => {
    const { page, close } = await world.openSignedIn();
    const requests = [];
    await page.route("**/hub/v1/dead-letters/discard", async (route) => {
      requests.push({ tenant: route.request().headers()["pillarbox-tenant"], body: route.request().postDataJSON() });
      await pause(50);
      await route.fulfill({ json: { discarded: 1, more: true } }).catch(() => {});
    });
    await page.getByLabel("Tenant").selectOption("acme");
    await goTo(page, "#/dead-letters");
    await page.getByRole("button", { name: "Discard all that match" }).click();
    const openedBy = Date.now();
    await pause(200);
    await page.getByLabel("Type discard to confirm").fill("discard");
    await page.getByRole("dialog").getByRole("button", { name: "Discard all" }).click();
    await waitFor("several parts are discarded", () => requests.length > 3);
    await page.getByLabel("Tenant").selectOption("globex");
    await page.getByText(/Stopped: at least \d+ messages discarded/).waitFor();
    const count = requests.length;
    await pause(500);
    assert.equal(requests.length, count);
    assert.deepEqual([...new Set(requests.map(({ tenant }) => tenant))], ["acme"]);
    // Dead letters that came after the question was opened are not discarded.
    const bounds = [...new Set(requests.map(({ body }) => body.to))];
    assert.equal(bounds.length, 1);
    assert.ok(Date.parse(bounds[0]) <= openedBy);
    await close();
  });

  test("a portal link in an open tab replaces the session, and a late answer of the former one changes nothing", async () => {
    const acme = apiClient(world.pillarbox.url, world.adminKey, { "pillarbox-tenant": "acme" });
    const portal = await acme.post("/hub/v1/portal-tokens", { access: "read" });
    const { page, close } = await world.open({ expectedStatuses: [401, 403] });
    let release;
    const released = new Promise((resolve) => (release = resolve));
    await page.route("**/hub/v1/caller", async (route) => {
      if (route.request().headers().authorization === `Bearer ${WRONG_KEY}`) await released;
      await route.continue();
    });
    await page.goto(`${world.console.url}/console/`);
    await page.getByLabel("API key or portal token").fill(WRONG_KEY);
    const isAsked = page.waitForRequest("**/hub/v1/caller");
    await page.getByRole("button", { name: "Sign in", exact: true }).click();
    await isAsked;
    await page.evaluate((token) => (location.hash = `#token=${token}`), portal.token);
    await page.getByText("Portal token").waitFor();
    assert.ok(!page.url().includes(portal.token));
    const refusal = page.waitForResponse((response) => response.status() === 401);
    release();
    await refusal;
    await pause(300);
    assert.ok((await page.evaluate(() => sessionStorage.getItem("pillarbox.credentials"))).includes(portal.token));
    await page.getByText("Portal token").waitFor();
    await close();
  });

  test("a damaged link or damaged storage leads to the sign-in page", async () => {
    const { page, close } = await world.open();
    for (const token of ["%E0%A4%A", "", "pbx"]) {
      await page.goto(`${world.console.url}/console/?${Math.random()}#token=${token}`);
      await page.getByText("This portal link is not complete").waitFor();
      await page.getByLabel("API key or portal token").waitFor();
    }
    assert.ok(!page.url().includes("token="));
    await page.evaluate(() => sessionStorage.setItem("pillarbox.credentials", "{damaged"));
    await page.reload();
    await page.getByLabel("API key or portal token").waitFor();
    await close();
  });

  test("a portal link that was revoked says so, and whom to ask", async () => {
    const acme = apiClient(world.pillarbox.url, world.adminKey, { "pillarbox-tenant": "acme" });
    const portal = await acme.post("/hub/v1/portal-tokens", { access: "read" });
    await acme.delete(`/hub/v1/portal-tokens/${portal.id}`);
    const { page, close } = await world.open({ expectedStatuses: [401] });
    await page.goto(`${world.console.url}/console/#token=${portal.token}`);
    await page.getByText("This portal link has expired or was revoked. Ask its sender for a new one.").waitFor();
    assert.equal(await page.evaluate(() => sessionStorage.getItem("pillarbox.credentials")), null);
    await close();
  });

  test("a user with the role admin signs in with a password", async () => {
    const user = await registerOperator(world, "operator@example.org");
    const { page, close } = await world.open({ expectedStatuses: [401, 429] });
    await signInAsUser(page, world.console.url, user);
    await page.getByRole("link", { name: "Log and consumers" }).click();
    await page.getByText("hub.fanout").waitFor();

    // Only keys may act for a tenant.
    await goTo(page, "#/tenants");
    await page.getByRole("link", { name: "acme" }).waitFor();
    assert.equal(await page.getByRole("button", { name: "Switch to it" }).count(), 0);

    await signOutDuringRefresh(page);
    await close();
  });

  test("the policy of the page allows nothing but this server", async () => {
    const response = await fetch(`${world.console.url}/console/`);
    const policy = response.headers.get("content-security-policy");
    for (const part of ["default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'"]) {
      assert.ok(policy.includes(part), `${part} is missing in ${policy}`);
    }
    assert.ok(!policy.includes("unsafe"));
    assert.doesNotMatch(await response.text(), /<script(?![^>]*src=)|style=|https?:\/\//);
  });

  test("a wrong key is refused with what to do", async () => {
    const { page, close } = await world.open({ expectedStatuses: [401] });
    await page.goto(`${world.console.url}/console/`);
    await page.getByLabel("API key or portal token").fill(WRONG_KEY);
    await page.getByRole("button", { name: "Sign in", exact: true }).click();
    await page.getByText(/unknown, expired or revoked/).waitFor();
    assert.equal(await page.evaluate(() => sessionStorage.getItem("pillarbox.credentials")), null);
    await close();
  });
}

/** A refresh that is refused for now does not end the session, and one that succeeds after sign-out begins none. */
async function signOutDuringRefresh(page) {
  let answer = { status: 429, json: { title: "Too many requests" } };
  let asked = 0;
  let release;
  const released = new Promise((resolve) => (release = resolve));
  await page.route("**/identity/v1/refresh", async (route) => {
    asked += 1;
    if (answer.status === 200) await released;
    await route.fulfill(answer);
  });
  await page.evaluate(() => {
    const saved = JSON.parse(sessionStorage.getItem("pillarbox.credentials"));
    sessionStorage.setItem("pillarbox.credentials", JSON.stringify({ ...saved, refreshAt: Date.now() }));
  });
  await page.reload();
  await page.getByRole("link", { name: "acme" }).waitFor();
  assert.ok(asked > 0);

  answer = { status: 200, json: { access_token: "late", refresh_token: "late", expires_in: 600 } };
  asked = 0;
  await page.getByRole("link", { name: "Log and consumers" }).click();
  await waitFor("the token is being refreshed", () => asked > 0);
  const logout = page.waitForResponse("**/identity/v1/logout");
  await page.getByRole("button", { name: "Sign out" }).click();
  assert.equal((await logout).status(), 204);
  const revoked = page.waitForRequest((request) => request.url().endsWith("/logout") && request.headers().authorization === "Bearer late");
  release();
  await revoked;
  await page.getByLabel("API key or portal token").waitFor();
  assert.equal(await page.evaluate(() => sessionStorage.getItem("pillarbox.credentials")), null);
}

async function twoTenants(world, url) {
  const create = async (tenant, name) => {
    await world.api.post("/admin/v1/tenants", { name: tenant });
    const api = apiClient(world.pillarbox.url, world.adminKey, { "pillarbox-tenant": tenant });
    const subscriber = await api.post("/hub/v1/subscribers", { name, url, event_types: [`${tenant}.*`] });
    const { event_id: event } = await api.post("/hub/v1/events", { event_type: `${tenant}.happened`, payload: { tenant } });
    await waitFor(`${tenant} has a dead letter`, async () => (await api.get("/hub/v1/dead-letters")).items.length > 0);
    return { api, subscriber: subscriber.id, event };
  };
  return { acme: await create("acme", "acme-subscriber"), globex: await create("globex", SECRET_NAME) };
}
