// The small parts that every page uses: headings, cards, badges, texts.
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { formatExactTime, formatJson, formatRelativeTime } from "../lib/format";
import { useNow } from "../lib/live";
import { showToast } from "./toasts";
import { Icon } from "./icon";

export type Tone = "neutral" | "good" | "warn" | "bad" | "info";

interface PageProps {
  title: string;
  description?: ComponentChildren;
  actions?: ComponentChildren;
  parent?: { label: string; href: string };
  children: ComponentChildren;
}

/** A page with its heading, which gets the focus when the page is opened, so that screen readers announce it. */
export function Page({ title, description, actions, parent, children }: PageProps) {
  const heading = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    document.title = `${title} · Pillarbox console`;
  }, [title]);
  useEffect(() => heading.current?.focus({ preventScroll: true }), []);
  return (
    <>
      <header class="page-head">
        <div>
          {parent && <a class="breadcrumb" href={parent.href}>← {parent.label}</a>}
          <h1 tabIndex={-1} ref={heading}>{title}</h1>
          {description !== undefined && <p class="page-description">{description}</p>}
        </div>
        {actions !== undefined && <div class="page-actions">{actions}</div>}
      </header>
      {children}
    </>
  );
}

interface CardProps {
  title?: ComponentChildren;
  actions?: ComponentChildren;
  /** Without padding, for tables. */
  flush?: boolean;
  children: ComponentChildren;
}

export function Card({ title, actions, flush = false, children }: CardProps) {
  return (
    <section class="card">
      {(title !== undefined || actions !== undefined) && (
        <div class="card-head">
          {title !== undefined && <h2>{title}</h2>}
          {actions}
        </div>
      )}
      <div class={flush ? "card-body flush" : "card-body"}>{children}</div>
    </section>
  );
}

interface StatProps {
  label: string;
  value: ComponentChildren;
  hint?: ComponentChildren;
  tone?: Tone;
  href?: string;
}

export function Stat({ label, value, hint, tone = "neutral", href }: StatProps) {
  const content = (
    <>
      <div class="stat-label">{label}</div>
      <div class="stat-value">{value}</div>
      {hint !== undefined && <div class="stat-hint">{hint}</div>}
    </>
  );
  return href === undefined ? <div class={`stat ${tone}`}>{content}</div> : <a class={`stat ${tone}`} href={href}>{content}</a>;
}

export function Badge({ tone = "neutral", plain = false, children }: { tone?: Tone; plain?: boolean; children: ComponentChildren }) {
  return <span class={`badge ${tone}${plain ? " plain" : ""}`}>{children}</span>;
}

const OUTCOME_TONES: Record<string, Tone> = {
  delivered: "good", completed: "good", finished: "good", healthy: "good", published: "good", sent: "good", active: "good",
  done: "good", matched: "good", ready: "good",
  pending: "info", processing: "info", running: "info", waiting: "info", queued: "info", captured: "info",
  failed: "warn", failing: "warn", paused: "warn", waitlisted: "warn", parked: "warn", blocked: "warn", degraded: "warn",
  dead: "bad", breaker_open: "bad", disabled: "bad", suspended: "bad", lapsed: "bad", rejected: "bad", unready: "bad",
};

/** A state of the API as a badge: `breaker_open` is shown as "breaker open". */
export function StateBadge({ state, title }: { state: string; title?: string }) {
  const name = state.toLowerCase();
  return (
    <span class={`badge ${OUTCOME_TONES[name] ?? "neutral"}`} title={title}>{name.replace(/_/g, " ")}</span>
  );
}

/** The time of something that is to happen. It may be a moment late. */
export function DueTime({ at }: { at: string | null | undefined }) {
  const now = useNow();
  return at && new Date(at).getTime() <= now ? <span class="nowrap">now</span> : <Time at={at} />;
}

/** A relative time; the exact one is shown on hover. */
export function Time({ at }: { at: string | null | undefined }) {
  const now = useNow();
  if (at === null || at === undefined) return <span class="muted">–</span>;
  const time = new Date(at);
  return <time class="nowrap" dateTime={at} title={formatExactTime(time)}>{formatRelativeTime(time, now)}</time>;
}

export function CopyButton({ text, label }: { text: string; label: string }) {
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      showToast("Copied.");
    } catch {
      showToast("The browser refused access to the clipboard: select the text and copy it.", "bad");
    }
  };
  return (
    <button type="button" class="copy-button" aria-label={label} title={label} onClick={copy}>
      <Icon name="copy" size={13} />
    </button>
  );
}

/** An identifier in a fixed-width font that can be copied. */
export function Identifier({ value, href, label = "Copy" }: { value: string; href?: string; label?: string }) {
  const text = <code><MiddleTruncated text={value} /></code>;
  return (
    <span class="copy-text">
      {href === undefined ? text : <a href={href}>{text}</a>}
      <CopyButton text={value} label={`${label}: ${value}`} />
    </span>
  );
}

const TAIL_LENGTH = 6;

/** A text that is cut in its middle if it does not fit: ids that were created at the same time differ only at their ends. */
export function MiddleTruncated({ text }: { text: string }) {
  return (
    <span class="middle-truncated" title={text}>
      <span class="truncate">{text.slice(0, -TAIL_LENGTH)}</span>
      <span>{text.slice(-TAIL_LENGTH)}</span>
    </span>
  );
}

export function CodeBlock({ value, label }: { value: unknown; label: string }) {
  const text = formatJson(value);
  return (
    <div class="code-block">
      <pre tabIndex={0} aria-label={label}>{text}</pre>
      <span class="button quiet small"><CopyButton text={text} label={`Copy ${label}`} /></span>
    </div>
  );
}

export function Meter({ share, label, tone = "neutral" }: { share: number; label: string; tone?: Tone }) {
  const percent = Math.round(Math.min(1, Math.max(0, share)) * 1000) / 10;
  return (
    <div class={`meter ${tone}`} role="progressbar" aria-label={label} aria-valuemin={0} aria-valuemax={100} aria-valuenow={percent}>
      <span style={{ width: `${percent}%` }} />
    </div>
  );
}

export function Notice({ tone = "neutral", children }: { tone?: Tone; children: ComponentChildren }) {
  return (
    <div class={`notice ${tone}`} role={tone === "bad" ? "alert" : undefined}>
      <Icon name={tone === "good" ? "check" : "alert"} />
      <div>{children}</div>
    </div>
  );
}

/** A list of terms and values. Entries without a value (undefined, null or false) are left out. */
export function Details({ entries }: { entries: [string, ComponentChildren][] }) {
  return (
    <dl class="details">
      {entries.filter(([, value]) => value !== undefined && value !== null && value !== false).map(([name, value]) => (
        <>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </>
      ))}
    </dl>
  );
}

export function Tabs({ tabs, current, label }: { tabs: { id: string; label: string; href: string }[]; current: string; label: string }) {
  return (
    <nav class="tabs" aria-label={label}>
      {tabs.map((tab) => (
        <a key={tab.id} class="tab" href={tab.href} aria-current={tab.id === current ? "page" : undefined}>{tab.label}</a>
      ))}
    </nav>
  );
}
