import { Notice } from "./basics";
import type { Finding } from "../api/types";

/** What is wrong now, and what to do about it. */
export function Findings({ findings }: { findings: Finding[] }) {
  if (findings.length === 0) {
    return <Notice tone="good"><strong>Everything works.</strong> Nothing needs your attention.</Notice>;
  }
  return (
    <ul class="findings" aria-label="What is wrong now">
      {findings.map((finding) => (
        <li key={`${finding.title} ${finding.detail}`}>
          <Notice tone={finding.severity === "critical" ? "bad" : "warn"}>
            <strong>{finding.title}</strong>
            <div>{withCode(finding.detail)}</div>
            <div>
              <span class="muted">What to do: </span>{withCode(finding.what_to_do)}
              {finding.link && <> <a href={consoleLink(finding.link)}>Open</a></>}
            </div>
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

/** The server may give an address within the console (`/console/#/log`, `#/log`); others are not followed. */
function consoleLink(address: string): string {
  const hash = address.indexOf("#/");
  return hash >= 0 ? address.slice(hash) : "#/";
}
