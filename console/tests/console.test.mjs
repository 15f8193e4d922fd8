// Browser tests in headless Chromium against one real server. The tests run one after the other.
import { after, before } from "node:test";
import { accessTests } from "./access.mjs";
import { descriptionTests } from "./description.mjs";
import { deliveryTests } from "./delivery.mjs";
import { liveTests } from "./live.mjs";
import { lookTests } from "./look.mjs";
import { performanceTests } from "./performance.mjs";
import { apiClient } from "./support/api.mjs";
import { openPage, signIn, startBrowser } from "./support/browser.mjs";
import { serveConsole } from "./support/page-server.mjs";
import { ADMIN_KEY, startPillarbox } from "./support/pillarbox.mjs";
import { stopReceivers } from "./support/receiver.mjs";

/** What the tests share. It is filled before the first of them. */
const world = { adminKey: ADMIN_KEY };
const stops = [];

before(async () => {
  world.pillarbox = await startPillarbox();
  stops.push(world.pillarbox.stop);
  world.console = await serveConsole(world.pillarbox.url);
  stops.push(world.console.stop);
  world.browser = await startBrowser();
  stops.push(() => world.browser.close());
  world.api = apiClient(world.pillarbox.url, ADMIN_KEY);
  world.open = (options) => openPage(world.browser, world.console, options);
  world.openSignedIn = async (options) => {
    const opened = await world.open(options);
    await signIn(opened.page, world.console.url, options?.bearer ?? ADMIN_KEY);
    return opened;
  };
}, { timeout: 90_000 });

after(async () => {
  await stopReceivers();
  for (const stop of stops.reverse()) await stop();
}, { timeout: 60_000 });

descriptionTests();
deliveryTests(world);
liveTests(world);
accessTests(world);
lookTests(world);
performanceTests(world);
