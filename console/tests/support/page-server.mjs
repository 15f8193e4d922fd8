// Serves the build at `/console/` like the binary does, and passes everything else to the API. It is used while the binary
// does not serve the console itself.
import { createServer, request } from "node:http";
import { readFile } from "node:fs/promises";
import { extname } from "node:path";
import { gzipSync } from "node:zlib";

export const POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'";
const DIST = new URL("../../dist/", import.meta.url);
const TYPES = { ".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml" };

/**
 * Returns the address of the console: that of the API if it serves the page, otherwise that of a server started here.
 * With CONSOLE_DIST=1 the build in `dist` is tested even if the binary contains another one.
 */
export async function serveConsole(apiUrl) {
  const own = await fetch(`${apiUrl}/console/`);
  // A binary that was built without the console answers with a page that says so.
  const isServed = own.ok && (await own.text()).includes("/console/assets/");
  if (isServed && process.env.CONSOLE_DIST !== "1") return { url: apiUrl, stop: async () => {} };
  const server = createServer((incoming, outgoing) => {
    const path = new URL(incoming.url, "http://localhost").pathname;
    if (path.startsWith("/console/") && path !== "/console/config.json") void serveFile(path, outgoing);
    else forward(apiUrl, incoming, outgoing);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const stop = async () => {
    server.closeAllConnections();
    await new Promise((resolve) => server.close(resolve));
  };
  return { url: `http://127.0.0.1:${server.address().port}`, stop };
}

async function serveFile(path, outgoing) {
  const name = path === "/console/" ? "index.html" : path.slice("/console/".length);
  const body = await readFile(new URL(name, DIST)).catch(() => null);
  if (body === null || name.includes("..")) return outgoing.writeHead(404).end();
  outgoing.writeHead(200, {
    "content-type": TYPES[extname(name)] ?? "application/octet-stream",
    "content-encoding": "gzip",
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
  });
  outgoing.end(gzipSync(body));
}

function forward(apiUrl, incoming, outgoing) {
  const target = new URL(incoming.url, apiUrl);
  const passed = request(target, { method: incoming.method, headers: incoming.headers }, (answer) => {
    outgoing.writeHead(answer.statusCode, answer.headers);
    answer.pipe(outgoing);
  });
  passed.on("error", () => outgoing.destroy());
  outgoing.on("close", () => passed.destroy());
  incoming.pipe(passed);
}
