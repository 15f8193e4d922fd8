// Writes a picture of each page, light and dark and at 390 px, to `screenshots/`. Arguments select pages by name.
import { mkdir } from "node:fs/promises";
import { ADMIN_KEY, startPillarbox } from "../tests/support/pillarbox.mjs";
import { goTo, openPage, signIn, startBrowser } from "../tests/support/browser.mjs";
import { serveConsole } from "../tests/support/page-server.mjs";
import { seed } from "./seed.mjs";

const FOLDER = new URL("../screenshots/", import.meta.url).pathname;
const LOOKS = [
  { suffix: "light", options: { colorScheme: "light" } },
  { suffix: "dark", options: { colorScheme: "dark" } },
  { suffix: "narrow", options: { colorScheme: "light", viewport: { width: 390, height: 844 } } },
];

function pagesOf(ids) {
  return {
    overview: "#/", events: "#/events", event: `#/events/${ids.event}`,
    subscribers: "#/subscribers", subscriber: `#/subscribers/${ids.failing}`, health: `#/subscribers/${ids.subscriber}?tab=health`,
    settings: `#/subscribers/${ids.subscriber}?tab=settings`, "new-subscriber": "#/subscribers/new", deliveries: "#/deliveries",
    "dead-letters": "#/dead-letters", "dead-letter": `#/dead-letters/${ids.deadLetter}`, replays: "#/replays", replay: `#/replays/${ids.replay}`, "new-replay": "#/replays/new",
    "event-types": "#/event-types", "event-type": "#/event-types/order.paid", log: "#/log", tail: "#/log/tail", gatherings: "#/gatherings",
    gathering: `#/gatherings/${ids.gathering}`, progress: "#/progress", project: `#/progress/${ids.project}`, notifications: "#/notifications",
    mail: "#/notifications/mail", tenants: "#/tenants", keys: "#/keys", portal: "#/keys/portal",
  };
}

async function takePictures(browser, served, ids, wanted) {
  for (const { suffix, options } of LOOKS) {
    const { page, close } = await openPage(browser, served, { context: options });
    await page.goto(`${served.url}/console/`);
    await page.screenshot({ path: `${FOLDER}sign-in-${suffix}.png` });
    await signIn(page, served.url, ADMIN_KEY);
    for (const [name, address] of Object.entries(pagesOf(ids))) {
      if (wanted.length > 0 && !wanted.includes(name)) continue;
      await goTo(page, address);
      // Charts need some polls before they show a line.
      await page.waitForTimeout(name === "overview" || name === "gathering" ? 8_000 : 400);
      await page.screenshot({ path: `${FOLDER}${name}-${suffix}.png`, fullPage: true });
    }
    await close();
  }
}

await mkdir(FOLDER, { recursive: true });
const started = [];
try {
  const pillarbox = await startPillarbox();
  started.push(pillarbox.stop);
  const served = await serveConsole(pillarbox.url);
  started.push(served.stop);
  const browser = await startBrowser();
  started.push(() => browser.close());
  const ids = await seed(pillarbox, ADMIN_KEY);
  started.push(ids.stop);
  await takePictures(browser, served, ids, process.argv.slice(2));
} finally {
  for (const stop of started.reverse()) await stop();
}
