// One session in several tabs, and addresses that open the same page for a colleague.
import assert from "node:assert/strict";
import { test } from "node:test";
import { goTo, openInNewTab, signInAsUser } from "./support/browser.mjs";
import { registerOperator } from "./support/people.mjs";
import { waitFor } from "./support/wait.mjs";

export function tabTests(world) {
  test("a link that is opened in a new tab is signed in for the same tenant, and signing out ends all tabs", async () => {
    const { page, context, close } = await world.openSignedIn();
    await page.getByLabel("Tenant").selectOption("acme");
    await page.getByText("Webhooks of acme").or(page.getByText("The webhooks of acme")).waitFor();
    const tab = await openInNewTab(context, page.getByRole("link", { name: "Subscribers", exact: true }));
    await tab.getByText("acme-subscriber").waitFor();
    assert.equal(await tab.getByLabel("Tenant").inputValue(), "acme");

    // Also without a tenant in the address.
    const third = await context.newPage();
    await third.goto(`${world.console.url}/console/`);
    await waitFor("the third tab acts for acme", async () => (await third.getByLabel("Tenant").inputValue()) === "acme");
    assert.equal(await tab.evaluate(() => localStorage.length + document.cookie.length), 0);

    await tab.getByRole("button", { name: "Sign out" }).click();
    for (const other of [page, third]) {
      await other.getByText("You have signed out in another tab.").waitFor();
      assert.equal(await other.evaluate(() => sessionStorage.length), 0);
    }
    // There is nothing left to take over.
    await third.reload();
    await third.getByLabel("API key or portal token").waitFor();
    await close();
  });

  test("a portal link in another tab is a separate session", async () => {
    const portal = await world.api.post("/hub/v1/portal-tokens", { access: "read" });
    const { page, context, close } = await world.openSignedIn({ expectedStatuses: [403] });
    const customer = await context.newPage();
    await customer.goto(`${world.console.url}/console/#token=${portal.token}`);
    await customer.getByText("Portal token").waitFor();
    await customer.getByRole("button", { name: "Sign out" }).click();
    await customer.getByLabel("API key or portal token").waitFor();
    await page.getByText("The whole installation, live.").waitFor();
    await close();
  });

  test("only the tab where a user signed in has the refresh token, and the others get access tokens from it", async () => {
    const user = await registerOperator(world, "tabs@example.org");
    const { page, context, close } = await world.open({ expectedStatuses: [401, 429] });
    await signInAsUser(page, world.console.url, user);
    const tab = await openInNewTab(context, page.getByRole("link", { name: "Log and consumers" }));
    await tab.getByText("hub.fanout").waitFor();
    const [first, second] = await Promise.all([page, tab].map(savedCredentials));
    assert.equal(second.bearer, first.bearer);
    assert.ok(first.refreshToken && !("refreshToken" in second));

    // Both access tokens have to be replaced: the new tab asks, the first one refreshes once.
    const refreshes = [];
    context.on("request", (request) => request.url().endsWith("/identity/v1/refresh") && refreshes.push(request.frame().page()));
    await setRefreshTime(page, 0);
    await page.reload();
    await waitFor("the new tab has the new token", async () => (await savedCredentials(tab)).bearer !== first.bearer);
    assert.deepEqual(refreshes, [page]);
    await setRefreshTime(tab, 0);
    await tab.reload();
    await tab.getByText("hub.fanout").waitFor();
    assert.deepEqual(refreshes, [page]);
    assert.equal((await savedCredentials(tab)).bearer, (await savedCredentials(page)).bearer);

    // The session of the others ends with their access token when that tab is closed.
    await page.close();
    await setRefreshTime(tab, -60_000);
    await tab.reload();
    await tab.getByText("Your session has ended with the tab in which you signed in.").waitFor();
    await close();
  });

  test("the address names the tenant that the operator acts for, so a copied link works for a colleague", async () => {
    const { page, close } = await world.openSignedIn();
    await page.getByLabel("Tenant").selectOption("acme");
    await waitFor("the address names the tenant", () => page.url().endsWith("#/?tenant=acme"));
    await page.getByRole("link", { name: "Subscribers", exact: true }).click();
    await page.getByRole("table", { name: "Subscribers" }).getByRole("link", { name: "acme-subscriber" }).click();
    await page.getByRole("link", { name: "Settings" }).click();
    await page.getByText("acme.*").first().waitFor();
    assert.match(page.url(), /#\/subscribers\/[^?]+\?(tenant=acme&tab=settings)$/);
    const copied = page.url();
    // An address that was typed without it is completed.
    await goTo(page, "#/events");
    await waitFor("the address is completed", () => page.url().endsWith("#/events?tenant=acme"));
    await page.getByLabel("Time", { exact: true }).selectOption("24h");
    await waitFor("the filter is added", () => page.url().endsWith("#/events?tenant=acme&range=24h"));

    const colleague = await world.openSignedIn();
    await colleague.page.goto(copied);
    await colleague.page.getByText("acme.*").first().waitFor();
    assert.equal(await colleague.page.getByLabel("Tenant").inputValue(), "acme");
    assert.equal(colleague.page.url(), copied);
    await colleague.close();

    // Back leads to the tenant of that address.
    await page.getByLabel("Tenant").selectOption("");
    await waitFor("the address names no tenant", () => page.url().endsWith("#/events?range=24h"));
    await page.goBack();
    await page.getByText("acme.*").first().waitFor();
    assert.equal(page.url(), copied);
    await close();
  });

  test("keys that move through the tenants switch to the one where Enter is pressed or the focus leaves", async () => {
    const { page, close } = await world.openSignedIn();
    await goTo(page, "#/subscribers");
    const choice = page.getByLabel("Tenant");
    await choice.locator('option[value="globex"]').waitFor({ state: "attached" });
    const asked = [];
    page.on("request", (request) => asked.push(request.headers()["pillarbox-tenant"]));
    await choice.focus();
    await page.keyboard.press("ArrowDown");
    const marked = await choice.inputValue();
    assert.notEqual(marked, "");
    await page.waitForTimeout(300);
    assert.ok(!page.url().includes("tenant="));
    await page.keyboard.press("Escape");
    assert.equal(await choice.inputValue(), "");
    await page.keyboard.type("glo");
    assert.ok(asked.every((tenant) => tenant === undefined), "nothing was loaded for a tenant on the way");
    await page.keyboard.press("Enter");
    await waitFor("Enter switches", () => page.url().includes("tenant=globex"));
    await page.getByText("other-tenants-subscriber").waitFor();
    await choice.focus();
    await page.keyboard.type("acm");
    await page.keyboard.press("Tab");
    await waitFor("leaving switches", () => page.url().includes("tenant=acme"));
    await page.getByText("acme-subscriber").waitFor();
    await close();
  });
}

function savedCredentials(page) {
  return page.evaluate(() => JSON.parse(sessionStorage.getItem("pillarbox.credentials") ?? "{}"));
}

/** As if the access token had been issued longer ago. Read by the page when it is loaded. */
function setRefreshTime(page, fromNowMs) {
  return page.evaluate((offset) => {
    const saved = JSON.parse(sessionStorage.getItem("pillarbox.credentials"));
    sessionStorage.setItem("pillarbox.credentials", JSON.stringify({ ...saved, refreshAt: Date.now() + offset }));
  }, fromNowMs);
}
