// Writes a `.gz` beside each text file of the build, so that the server need not compress at run time.
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const dist = new URL("../dist/", import.meta.url);
let total = 0;
for (const folder of ["./", "assets/"]) {
  for (const name of readdirSync(new URL(folder, dist))) {
    if (!/\.(html|js|css|svg|json)$/.test(name)) continue;
    const file = new URL(folder + name, dist);
    const compressed = gzipSync(readFileSync(file), { level: 9 });
    writeFileSync(new URL(`${file.href}.gz`), compressed);
    total += compressed.length;
    console.log(`${folder}${name}.gz: ${compressed.length} bytes`);
  }
}
console.log(`first load: ${(total / 1024).toFixed(1)} KB compressed`);
