import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
  "--disable-sync", "--js-flags=--expose-gc",
];

export function startBrowser() {
  return chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", headless: true, args: FLAGS });
}

/**
 * Opens a page in a separate session. `close` fails if the browser's console had an error, a script failed, or the page
 * sent a request to another host.
 */
export async function openPage(browser, served, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options.context });
  const page = await context.newPage();
  page.setDefaultTimeout(15_000);
  const problems = [];
  page.on("console", (message) => {
    if (message.type() === "error" && !isExpected(message, options.expectedStatuses)) problems.push(`${message.text()} ${message.location().url}`);
  });
  page.on("pageerror", (error) => problems.push(error.message));
  page.on("request", (request) => {
    if (!request.url().startsWith(served.url)) problems.push(`request to another host: ${request.url()}`);
  });
  const close = async () => {
    await context.close();
    assert.deepEqual(problems, []);
  };
  return { page, context, problems, close };
}

/** The browser logs every failed request as an error. Tests that provoke some name their statuses. */
function isExpected(message, expectedStatuses = []) {
  return expectedStatuses.includes(Number(/status of (\d+)/.exec(message.text())?.[1]));
}

export async function signIn(page, url, bearer) {
  await page.goto(`${url}/console/`);
  await page.getByLabel("API key or portal token").fill(bearer);
  await page.getByRole("button", { name: "Sign in", exact: true }).click();
  await page.getByRole("heading", { name: "Overview", exact: true, level: 1 }).waitFor();
}

export async function signInAsUser(page, url, { email, password }) {
  await page.goto(`${url}/console/`);
  await page.getByRole("button", { name: "Sign in with e-mail and password" }).click();
  await page.getByLabel("E-mail").fill(email);
  await page.getByLabel("Password").fill(password);
  await page.getByRole("button", { name: "Sign in", exact: true }).click();
  await page.getByRole("heading", { name: "Overview", exact: true, level: 1 }).waitFor();
}

/** Opens a link in a new tab, as Ctrl+click does. */
export async function openInNewTab(context, locator) {
  const [tab] = await Promise.all([context.waitForEvent("page"), locator.click({ modifiers: ["Control"] })]);
  tab.setDefaultTimeout(15_000);
  return tab;
}

/** Opens an address within the console, and waits until its data is shown. */
export async function goTo(page, hash) {
  await page.evaluate((address) => new Promise((resolve) => {
    if (location.hash === address) return resolve();
    // The page has rendered the new address when the frame after the event begins.
    window.addEventListener("hashchange", () => requestAnimationFrame(() => setTimeout(resolve)), { once: true });
    location.hash = address;
  }), hash);
  await page.waitForFunction(() => document.querySelector("h1") !== null && document.querySelector(".skeleton") === null);
}
