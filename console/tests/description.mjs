// The types of the console are generated from a committed copy of the API description.
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { reducedDescription } from "../scripts/api.mjs";
import { BINARY } from "./support/pillarbox.mjs";

export function descriptionTests() {
  test("the types of the console are those of the API", async () => {
    const committed = await readFile(new URL("../openapi.json", import.meta.url), "utf8");
    const isCurrent = committed === reducedDescription(BINARY);
    assert.ok(isCurrent, "openapi.json is not that of the server: run `npm run api:update` and commit the file");
  });
}
