// A thin typed wrapper of `fetch`: paths, parameters, bodies and answers are those of `openapi.json`.
import { randomId } from "../lib/ids";
import type { paths } from "./schema";
import { refreshIfNeeded } from "./refresh";
import { credentials, currentScope, refuseSession, type RequestScope } from "./session";

/** Who the credentials belong to, not the tenant that they act for. */
const CALLER_PATH = "/hub/v1/caller";

export interface FieldError {
  in: string;
  pointer: string;
  detail: string;
}

/** An error response of the API, or the failure to get a response (status 0). */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly title: string,
    readonly detail: string,
    readonly fields: FieldError[] = [],
    readonly traceId = "",
  ) {
    super(detail === "" ? title : `${title}: ${detail}`);
  }
}

type Method = "get" | "post" | "put" | "patch" | "delete";
type PathsWith<M extends Method> = { [P in keyof paths]: paths[P][M] extends object ? P : never }[keyof paths];
type Operation<P extends keyof paths, M extends Method> = NonNullable<paths[P][M]>;
type Parameters<Op> = Op extends { parameters: infer Found } ? Found : never;
type PathOf<Op> = Parameters<Op> extends { path: infer Found } ? { path: Found } : { path?: undefined };
type QueryOf<Op> = Parameters<Op> extends { query?: infer Found } ? { query?: Found } : { query?: undefined };
type Content<T> = T extends { content: { "application/json": infer Body } } ? Body : undefined;
type BodyOf<Op> = Op extends { requestBody: infer Body }
  ? { body: Content<Body> }
  : Op extends { requestBody?: infer Body }
    ? { body?: Content<NonNullable<Body>> }
    : { body?: undefined };
type Success = 200 | 201 | 202;
type Responses<Op> = Op extends { responses: infer Found } ? Found : never;
type Answer<Op> = Content<Responses<Op>[Success & keyof Responses<Op>]>;
type Options<Op> = PathOf<Op> & QueryOf<Op> & BodyOf<Op> & { signal?: AbortSignal; ifMatch?: string; scope?: RequestScope };
/** The options may be left out if none of them is required. */
type Arguments<Op> = object extends Options<Op> ? [options?: Options<Op>] : [options: Options<Op>];

interface AnyOptions {
  path?: unknown;
  query?: unknown;
  body?: unknown;
  signal?: AbortSignal;
  ifMatch?: string;
  /** Without it, the request acts for the tenant that is chosen now. */
  scope?: RequestScope;
}

export const api = {
  get: <P extends PathsWith<"get">>(path: P, ...[options]: Arguments<Operation<P, "get">>) =>
    request<Answer<Operation<P, "get">>>("GET", path, options),
  post: <P extends PathsWith<"post">>(path: P, ...[options]: Arguments<Operation<P, "post">>) =>
    request<Answer<Operation<P, "post">>>("POST", path, options),
  put: <P extends PathsWith<"put">>(path: P, ...[options]: Arguments<Operation<P, "put">>) =>
    request<Answer<Operation<P, "put">>>("PUT", path, options),
  patch: <P extends PathsWith<"patch">>(path: P, ...[options]: Arguments<Operation<P, "patch">>) =>
    request<Answer<Operation<P, "patch">>>("PATCH", path, options),
  delete: <P extends PathsWith<"delete">>(path: P, ...[options]: Arguments<Operation<P, "delete">>) =>
    request<Answer<Operation<P, "delete">>>("DELETE", path, options),
};

async function request<T>(method: string, path: string, options: AnyOptions = {}): Promise<T> {
  const headers = await requestHeaders(path, options.scope);
  if (method !== "GET") headers.set("idempotency-key", randomId());
  if (options.body !== undefined) headers.set("content-type", "application/json");
  if (options.ifMatch !== undefined) headers.set("if-match", options.ifMatch);
  const response = await send(buildUrl(path, options), {
    method,
    headers,
    body: options.body === undefined ? undefined : JSON.stringify(options.body),
    signal: options.signal,
  });
  // Some successful answers have no body: 204, and 202 of what is done later.
  const text = await response.text();
  return (text === "" ? undefined : JSON.parse(text)) as T;
}

/**
 * The headers of every request: the credentials, and the tenant that an operator acts for on routes of the hub. Fails if
 * the session of `scope` has ended, or if its access token has expired and could not be replaced.
 */
export async function requestHeaders(path: string, scope: RequestScope = currentScope()): Promise<Headers> {
  const isUsable = await refreshIfNeeded();
  if (scope.sessionEnded.aborted) throw new ApiError(401, "Your session has ended", "Sign in again.");
  if (!isUsable) throw new ApiError(0, "Your session could not be renewed", "The server does not answer as expected. Try again in a moment.");
  const headers = new Headers();
  const session = credentials.get();
  if (session !== null) headers.set("authorization", `Bearer ${session.bearer}`);
  if (scope.tenant !== "" && path.startsWith("/hub/") && path !== CALLER_PATH) headers.set("pillarbox-tenant", scope.tenant);
  return headers;
}

/** Sends a request and returns a successful response; everything else is thrown as an `ApiError`. */
export async function send(url: string, init: RequestInit & { headers: Headers }): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(url, { ...init, credentials: "omit", cache: "no-store" });
  } catch (cause) {
    if (cause instanceof DOMException && cause.name === "AbortError") throw cause;
    throw new ApiError(0, "The server does not respond", "Check your connection. The page tries again by itself.");
  }
  if (response.ok) return response;
  const error = await readProblem(response);
  if (response.status === 401 && hasCurrentBearer(init.headers)) refuseSession(error.detail || error.title);
  throw error;
}

/** False for a request of a former session or with a replaced token: its refusal says nothing about the current session. */
function hasCurrentBearer(headers: Headers): boolean {
  const session = credentials.get();
  return session !== null && headers.get("authorization") === `Bearer ${session.bearer}`;
}

async function readProblem(response: Response): Promise<ApiError> {
  const body: unknown = await response.json().catch(() => null);
  if (body === null || typeof body !== "object") {
    return new ApiError(response.status, `The server answered with status ${response.status}`, "");
  }
  const problem = body as { title?: string; detail?: string; errors?: FieldError[]; trace_id?: string };
  const title = problem.title ?? `The server answered with status ${response.status}`;
  return new ApiError(response.status, title, problem.detail ?? "", problem.errors ?? [], problem.trace_id ?? "");
}

function buildUrl(path: string, options: AnyOptions): string {
  const values = new Map(Object.entries((options.path ?? {}) as object));
  const filled = path.replace(/\{(\w+)\}/g, (_, name: string) => encodeURIComponent(String(values.get(name))));
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries((options.query ?? {}) as object)) {
    if (value !== undefined && value !== null && value !== "") query.set(name, String(value));
  }
  const search = query.toString();
  return search === "" ? filled : `${filled}?${search}`;
}
