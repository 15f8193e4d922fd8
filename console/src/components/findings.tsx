import type { ComponentChildren } from "preact";
import { Notice } from "./basics";
import { caller } from "../api/session";
import type { Finding } from "../api/types";
import { link } from "../lib/router";

/** The current findings with their next steps. `none`: the text without findings. It claims no more than was checked. */
export function Findings({ findings, none }: { findings: Finding[]; none: ComponentChildren }) {
  if (findings.length === 0) return <Notice tone="good">{none}</Notice>;
  return (
    <ul class="findings" aria-label="Findings">
      {findings.map((finding) => (
        <li key={`${finding.title} ${finding.detail}`}>
          <Notice tone={finding.severity === "critical" ? "bad" : "warn"}>
            <strong>{finding.title}</strong>
            <div>{withCode(finding.detail)}</div>
            <div><span class="muted">Next step: </span>{withCode(finding.what_to_do)}</div>
            {finding.links.length > 0 && (
              <div class="row">
                {finding.links.map((one) => <a key={`${one.label} ${one.tenant}`} href={consoleLink(one)}>{one.label}</a>)}
              </div>
            )}
          </Notice>
        </li>
      ))}
    </ul>
  );
}

/** The server writes commands between backticks. */
function withCode(text: string) {
  return text.split("`").map((part, index) => (index % 2 === 1 ? <code key={index}>{part}</code> : part));
}

/**
 * The server gives an address within the console (`#/log`); others are not followed. A page of a tenant is opened as that
 * tenant. Only API keys may act for another tenant: all others get to the page about it.
 */
function consoleLink({ address, tenant }: Finding["links"][number]): string {
  const hash = address.indexOf("#/");
  const page = hash >= 0 ? address.slice(hash) : "#/";
  const signedIn = caller.get();
  if (tenant === undefined || tenant === null || signedIn === null) return page;
  if (signedIn.kind !== "key" && tenant !== signedIn.tenant) return link("tenants", tenant);
  return `${page}${page.includes("?") ? "&" : "?"}tenant=${encodeURIComponent(tenant)}`;
}
