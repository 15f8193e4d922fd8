// Browser tests in headless Chromium against one real server. The tests run one after the other.
import { test } from "node:test";
import { accessTests } from "./access.mjs";
import { crowdTests } from "./crowd.mjs";
import { descriptionTests } from "./description.mjs";
import { deliveryTests } from "./delivery.mjs";
import { formTests } from "./forms.mjs";
import { liveTests } from "./live.mjs";
import { lookTests } from "./look.mjs";
import { emptyTests, truthTests } from "./truth.mjs";
import { tabTests } from "./tabs.mjs";
import { performanceTests } from "./performance.mjs";
import { apiClient } from "./support/api.mjs";
import { openPage, signIn, startBrowser } from "./support/browser.mjs";
import { serveConsole } from "./support/page-server.mjs";
import { ADMIN_KEY, startPillarbox } from "./support/pillarbox.mjs";
import { stopReceivers } from "./support/receiver.mjs";

const stops = [stopReceivers];

// Not in the hooks of the test runner: Node.js 18 of Debian 12 does not call them outside of a suite.
const world = await startWorld().catch(async (cause) => {
  await stopAll();
  throw cause;
});

descriptionTests();
emptyTests(world);
deliveryTests(world);
liveTests(world);
formTests(world);
accessTests(world);
tabTests(world);
truthTests(world);
lookTests(world);
performanceTests(world);
crowdTests(world);
test("what the tests have started ends", { timeout: 60_000 }, stopAll);

/** What the tests share: the server, the page, the browser, and an API client of the operator. */
async function startWorld() {
  const pillarbox = await startPillarbox();
  stops.push(pillarbox.stop);
  const served = await serveConsole(pillarbox.url);
  stops.push(served.stop);
  const browser = await startBrowser();
  stops.push(() => browser.close());
  const open = (options) => openPage(browser, served, options);
  const openSignedIn = async (options) => {
    const opened = await open(options);
    await signIn(opened.page, served.url, options?.bearer ?? ADMIN_KEY);
    return opened;
  };
  return { adminKey: ADMIN_KEY, pillarbox, console: served, browser, api: apiClient(pillarbox.url, ADMIN_KEY), open, openSignedIn };
}

async function stopAll() {
  for (const stop of stops.reverse()) await stop();
}
