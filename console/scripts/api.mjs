// Writes openapi.json: what the console needs of the API description of the server, from which its types are generated.
//
//   npm run api:update         with the server $PILLARBOX_BIN (default: ../target/debug/pillarbox)
import { execFileSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

/** Texts for readers, which would make the file eight times as large. */
const TEXTS = new Set(["description", "summary", "example", "examples", "externalDocs", "headers", "tags", "security"]);
/** Objects whose keys are names that the API defines. */
const NAMED = new Set(["properties", "schemas", "paths"]);

/** The description of this server, reduced to the types of requests and successful responses, as the text of the file. */
export function reducedDescription(binary) {
  const printed = execFileSync(binary, ["openapi"], { encoding: "utf8", maxBuffer: 64 * 1024 * 1024 });
  const { openapi, info, paths, components } = JSON.parse(printed);
  const document = { openapi, info: { title: info.title, version: info.version }, paths, components: { schemas: components.schemas } };
  return `${JSON.stringify(reduced(document, false), null, 1)}\n`;
}

function reduced(value, isNamed) {
  if (Array.isArray(value)) {
    return value.map((item) => reduced(item, false));
  }
  if (value === null || typeof value !== "object") {
    return value;
  }
  const entries = Object.entries(value).filter(([key]) => isNamed || !TEXTS.has(key));
  const isSuccess = ([status]) => !/^[345]\d\d$/.test(status);
  const kept = entries.map(([key, inner]) => {
    const responses = key === "responses" && !isNamed;
    const object = responses ? Object.fromEntries(Object.entries(inner).filter(isSuccess)) : inner;
    return [key, reduced(object, !isNamed && NAMED.has(key))];
  });
  return Object.fromEntries(kept);
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const binary = process.env.PILLARBOX_BIN ?? fileURLToPath(new URL("../../target/debug/pillarbox", import.meta.url));
  writeFileSync(new URL("../openapi.json", import.meta.url), reducedDescription(binary));
}
