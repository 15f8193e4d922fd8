import { ApiError } from "../api/client";

/** The value of a form's field. Fails with the place of the mistake, for the field at `pointer`. */
export function parseJsonField(text: string, pointer: string): unknown {
  try {
    return JSON.parse(text);
  } catch (cause) {
    throw fieldError(pointer, `must be JSON: ${describePlace(text, cause instanceof Error ? cause.message : "")}`);
  }
}

/** An error that a form shows beside one field, as if the API had found it. */
export function fieldError(pointer: string, detail: string): ApiError {
  return new ApiError(422, "A field is not valid", "", [{ in: "body", pointer, detail }]);
}

/** Browsers name the place differently or not at all; their other words are not shown. */
function describePlace(text: string, message: string): string {
  if (text.trim() === "") return "it is empty";
  const position = /position (\d+)/.exec(message)?.[1];
  const lineAndColumn = /line (\d+) column (\d+)/.exec(message);
  if (lineAndColumn !== null) return `check line ${lineAndColumn[1]}, column ${lineAndColumn[2]}`;
  if (position === undefined) return "check that all brackets and quotes are closed";
  const before = text.slice(0, Number(position)).split("\n");
  return `check line ${before.length}, column ${before[before.length - 1]!.length + 1}`;
}
