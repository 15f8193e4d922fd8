// A receiver of webhooks on loopback whose answer can be changed.
import { createServer } from "node:http";

const RECEIVED_MAX = 10_000;
const running = new Set();

/** Stops the receivers of tests that failed before they could: an open server would keep the process alive. */
export async function stopReceivers() {
  for (const stop of running) await stop();
}

export async function startReceiver({ status = 200, delayMs = 0, text = "the receiver is broken" } = {}) {
  const received = [];
  const state = { status, delayMs };
  const server = createServer((request, response) => {
    request.resume();
    request.on("end", () => {
      const answer = typeof state.status === "function" ? state.status() : state.status;
      received.push({ id: request.headers["webhook-id"], type: request.headers["webhook-event-type"], status: answer });
      if (received.length > RECEIVED_MAX) received.shift();
      setTimeout(() => response.writeHead(answer).end(answer < 300 ? "ok" : text), state.delayMs);
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const stop = async () => {
    running.delete(stop);
    server.closeAllConnections();
    await new Promise((resolve) => server.close(resolve));
  };
  running.add(stop);
  return { url: `http://127.0.0.1:${server.address().port}/hook`, received, answerWith: (next) => (state.status = next), stop };
}
