// The routes that exist for the console. A server that is older than this page answers 404, and the page goes on with less.
import { ApiError, api, request } from "./client";
import type { Caller } from "./session";
import type { DeadLetter, HubMessage } from "./types";

export interface Finding {
  severity: "critical" | "warning";
  title: string;
  detail: string;
  what_to_do: string;
  link?: string | null;
}

export interface Overview {
  at: string;
  posted_total: number;
  delivered_total: number;
  failed_attempts_total: number;
  dead_letters: { webhooks: number; consumers: number; mail: number; notifications: number };
  latency_ms: { p50: number; p99: number } | null;
  findings: Finding[];
}

export interface Branding {
  name: string;
  colour: string;
}

/** Returns who the credentials belong to. Fails with an `ApiError` if they are not accepted. */
export async function loadCaller(): Promise<Caller> {
  try {
    return await request<Caller>("GET", "/hub/v1/caller");
  } catch (cause) {
    if (!(cause instanceof ApiError) || cause.status !== 404) throw cause;
    return await probeCaller();
  }
}

/** For servers without `/hub/v1/caller`: what the caller may read tells what it is. */
async function probeCaller(): Promise<Caller> {
  const isOperator = await api.get("/admin/v1/consumers").then(() => true, isRefused);
  if (!isOperator) await api.get("/hub/v1/subscribers", { query: { limit: 1 } });
  return {
    kind: "key",
    name: isOperator ? "operator" : "",
    tenant: isOperator ? "main" : "",
    roles: [isOperator ? "admin" : "manage"],
    is_operator: isOperator,
    read_only: false,
  };
}

function isRefused(cause: unknown): boolean {
  if (cause instanceof ApiError && cause.status === 403) return false;
  throw cause;
}

/** Returns null if the server does not have the route yet. */
export async function loadOverview(signal: AbortSignal): Promise<Overview | null> {
  try {
    return await request<Overview>("GET", "/admin/v1/overview", { signal });
  } catch (cause) {
    if (cause instanceof ApiError && cause.status === 404) return null;
    throw cause;
  }
}

export async function loadBranding(): Promise<Branding | null> {
  const response = await fetch("/console/config.json", { credentials: "omit" }).catch(() => null);
  if (response === null || !response.ok) return null;
  return (await response.json().catch(() => null)) as Branding | null;
}

interface MessageFilter {
  subscriber_id?: string;
  outcome?: string;
  limit: number;
  cursor?: string;
}

/** The newest deliveries, of one subscriber or of all. */
export function listMessages(query: MessageFilter, signal: AbortSignal): Promise<{ items: HubMessage[]; next_cursor?: string }> {
  return request("GET", "/hub/v1/messages", { query, signal });
}

export interface DeadLetterSelection {
  subscriber_id?: string;
  event_type?: string;
  reason?: DeadLetter["reason"];
  from?: string;
  to?: string;
  all?: boolean;
}

export function discardDeadLetter(id: string): Promise<void> {
  return request("POST", "/hub/v1/dead-letters/{id}/discard", { path: { id } });
}

export function discardDeadLetters(body: DeadLetterSelection): Promise<{ discarded: number; more: boolean }> {
  return request("POST", "/hub/v1/dead-letters/discard", { body });
}

export function retryDeadLetters(body: DeadLetterSelection): Promise<{ retried: number; more: boolean }> {
  return request("POST", "/hub/v1/dead-letters/retry", { body });
}
