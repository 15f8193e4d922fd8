// Writes a `.gz` beside each text file of the build, so that the server need not compress at run time.
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";

const dist = new URL("../dist/", import.meta.url).pathname;
let total = 0;
for (const entry of readdirSync(dist, { recursive: true })) {
  const name = String(entry);
  if (!/\.(html|js|css|svg|json)$/.test(name)) continue;
  const compressed = gzipSync(readFileSync(join(dist, name)), { level: 9 });
  writeFileSync(join(dist, `${name}.gz`), compressed);
  total += compressed.length;
  console.log(`${name}.gz  ${compressed.length} bytes`);
}
console.log(`first load: ${(total / 1024).toFixed(1)} KB compressed`);
