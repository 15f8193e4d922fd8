// Starts a Pillarbox with its own data folder on a free port, and ends it.
import { spawn, execFile } from "node:child_process";
import { chmod, mkdtemp, rm } from "node:fs/promises";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";
import { waitFor } from "./wait.mjs";

export const ADMIN_KEY = "pbx_console_tests_0123456789abcdef";
export const BINARY = process.env.PILLARBOX_BIN ?? new URL("../../../target/debug/pillarbox", import.meta.url).pathname;
const START_MS_MAX = 60_000;
const STOP_MS_MAX = 20_000;

export async function startPillarbox() {
  const folder = await mkdtemp(join(tmpdir(), "pillarbox-console-"));
  // The embedded PostgreSQL runs as another user when the tests run as root.
  await chmod(folder, 0o755);
  const port = await freePort();
  const dataDir = join(folder, "data");
  const env = environment();
  const child = spawn(BINARY, ["--data-dir", dataDir, "--listen", `127.0.0.1:${port}`], { env, stdio: ["ignore", "pipe", "pipe"] });
  const output = collectOutput(child);
  const url = `http://127.0.0.1:${port}`;
  try {
    await waitFor(`${BINARY} is ready`, () => isReady(child, url), START_MS_MAX);
  } catch (cause) {
    child.kill("SIGKILL");
    throw new Error(`${cause.message}\n${output()}`);
  }
  return {
    url,
    pid: child.pid,
    /** Runs a command of the same binary, such as `token`, and returns what it prints. */
    command: async (...args) => (await promisify(execFile)(BINARY, [...args, "--data-dir", dataDir], { env })).stdout.trim(),
    /** Executes a statement with psql, as an application does, and returns the value that it selects. */
    sql: async (statement) => {
      const { stdout: status } = await promisify(execFile)(BINARY, ["status", "--data-dir", dataDir], { env });
      const database = /^database\s+(\S+)/m.exec(status)[1];
      return (await promisify(execFile)("psql", [database, "--no-psqlrc", "--tuples-only", "--no-align", "--command", statement])).stdout.trim();
    },
    stop: async () => {
      const ended = new Promise((resolve) => child.once("exit", resolve));
      child.kill("SIGTERM");
      const timer = setTimeout(() => child.kill("SIGKILL"), STOP_MS_MAX);
      await ended;
      clearTimeout(timer);
      await rm(folder, { recursive: true, force: true });
    },
  };
}

/** What the binary, or a library in it, reads: the settings of the developer must not affect a test. */
const OF_DEVELOPER = /^(PILLARBOX_|PG|REDIS_|XDG_|ENABLE_DUAL_PUBLISH$|SSL_CERT_|HOME$)/;

/** The settings of the tests only, and a home in which nothing can be found or created. */
function environment() {
  const inherited = Object.entries(process.env).filter(([name]) => !OF_DEVELOPER.test(name));
  // The receivers of the tests are on loopback.
  const settings = { HOME: "/dev/null/home", PILLARBOX_LISTEN: "127.0.0.1:0", PILLARBOX_ADMIN_KEY: ADMIN_KEY, PILLARBOX_HUB__ALLOWED_NETWORKS: '["127.0.0.0/8"]' };
  return { ...Object.fromEntries(inherited), ...settings };
}

async function isReady(child, url) {
  if (child.exitCode !== null) throw new Error(`pillarbox ended with code ${child.exitCode}`);
  const response = await fetch(`${url}/readyz`).catch(() => null);
  return response !== null && response.ok;
}

function collectOutput(child) {
  const lines = [];
  const append = (chunk) => {
    lines.push(String(chunk));
    if (lines.length > 200) lines.shift();
  };
  child.stdout.on("data", append);
  child.stderr.on("data", append);
  return () => lines.join("");
}

export function freePort() {
  return new Promise((resolve, reject) => {
    const server = createServer();
    server.once("error", reject);
    server.listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => resolve(port));
    });
  });
}
