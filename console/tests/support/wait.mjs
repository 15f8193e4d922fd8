import { setTimeout as pause } from "node:timers/promises";

const POLL_MS = 50;

/** Waits until `condition` returns something true, and returns it. Fails after `timeMsMax` with the name of the condition. */
export async function waitFor(name, condition, timeMsMax = 15_000) {
  const end = Date.now() + timeMsMax;
  for (;;) {
    const result = await condition();
    if (result) return result;
    if (Date.now() > end) throw new Error(`not within ${timeMsMax} ms: ${name}`);
    await pause(POLL_MS);
  }
}
