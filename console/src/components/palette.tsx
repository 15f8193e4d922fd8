import { useEffect, useRef, useState } from "preact/hooks";
import { caller } from "../api/session";
import { isUuid, parseEventId } from "../lib/event-id";
import { link, navigate } from "../lib/router";
import { useStore } from "../lib/store";
import { PAGES } from "../pages";
import { Dialog } from "./dialog";

interface Target {
  label: string;
  href: string;
}

/** Opens a page by its name, or an object by its id. */
export function Palette({ onClose }: { onClose: () => void }) {
  const signedIn = useStore(caller);
  const [text, setText] = useState("");
  const [selected, setSelected] = useState(0);
  const pages = PAGES.filter((page) => signedIn !== null && page.isFor(signedIn))
    .map((page) => ({ label: page.label, href: link(page.path) }))
    .filter((page) => page.label.toLowerCase().includes(text.trim().toLowerCase()));
  const targets = [...targetsOfId(text.trim()), ...pages];
  const selectedLink = useRef<HTMLAnchorElement>(null);
  useEffect(() => selectedLink.current?.scrollIntoView({ block: "nearest" }), [selected]);
  const open = (target: Target | undefined) => {
    if (target === undefined) return;
    navigate(target.href);
    onClose();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (step !== 0) {
      event.preventDefault();
      setSelected((selected + step + targets.length) % Math.max(1, targets.length));
    } else if (event.key === "Enter") {
      event.preventDefault();
      open(targets[selected]);
    }
  };
  return (
    <Dialog title="Go to" onClose={onClose} class="palette">
      <input class="input" aria-label="A page or an id" placeholder="A page, or an id such as evt_…" autofocus autocomplete="off" spellcheck={false}
        value={text} onKeyDown={onKeyDown} onInput={(event) => { setText(event.currentTarget.value); setSelected(0); }} />
      <ul>
        {targets.map((target, index) => (
          <li key={target.href}>
            <a href={target.href} class={index === selected ? "selected" : ""} ref={index === selected ? selectedLink : undefined} onClick={onClose}>{target.label}</a>
          </li>
        ))}
        {targets.length === 0 && <li class="empty">No page has this name.</li>}
      </ul>
    </Dialog>
  );
}

function targetsOfId(text: string): Target[] {
  const event = parseEventId(text);
  const events = event === null ? [] : [{ label: `Event ${event}`, href: link("events", event) }];
  if (isUuid(text)) {
    return [
      ...events,
      { label: `Subscriber ${text}`, href: link("subscribers", text) },
      { label: `Replay ${text}`, href: link("replays", text) },
      { label: `Dead letter ${text}`, href: link("dead-letters", text) },
    ];
  }
  return events;
}
