// A choice among names of the server. It lists the first ones; if there are more, a field searches all of them on the server.
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { useLive } from "../lib/live";
import { Field } from "./form";

export interface Option {
  value: string;
  label: string;
}

export interface Found {
  options: Option[];
  hasMore: boolean;
}

/** Names that a choice lists at once. */
export const OPTIONS_MAX = 100;
const TYPING_MS = 250;

interface SearchProps {
  /** Distinguishes what is searched from other searches. */
  name: string;
  load: (text: string, signal: AbortSignal) => Promise<Found>;
}

/** The names that match the text of a search field, which is shown once there are more than a choice lists. */
export function useSearch({ name, load }: SearchProps) {
  const [typed, setTyped] = useState("");
  const [text, setText] = useState("");
  useEffect(() => {
    const timer = window.setTimeout(() => setText(typed.trim()), TYPING_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  const live = useLive(`search ${name} ${text}`, (signal) => load(text, signal));
  const [last, setLast] = useState<Found>({ options: [], hasMore: false });
  const [isLong, setLong] = useState(false);
  useEffect(() => {
    if (live.data === undefined) return;
    setLast(live.data);
    if (live.data.hasMore) setLong(true);
  }, [live.data]);
  return { typed, setTyped, found: last, isLong, reload: live.reload, error: live.error };
}

interface SearchSelectProps extends SearchProps {
  label: string;
  value: string;
  /** The label of the value, if it is not among the names that were found. */
  valueLabel?: string;
  /** The label of no choice. Absent: one has to be chosen. */
  all?: string;
  onChange: (value: string) => void;
  hint?: ComponentChildren;
  error?: string;
}

export function SearchSelect({ name, load, label, value, valueLabel, all, onChange, hint, error }: SearchSelectProps) {
  const { typed, setTyped, found, isLong, reload, error: searchError } = useSearch({ name, load });
  const isListed = value === "" || found.options.some((option) => option.value === value);
  const note = hint ?? (found.hasMore ? `The first ${found.options.length}: search for others.` : undefined);
  return (
    <Field label={label} hint={note} error={error ?? (searchError && `The list cannot be loaded: ${searchError.message}`)}>
      {(attributes) => (
        <>
          {isLong && (
            <input class="input" type="search" aria-label={`Search: ${label}`} placeholder="Search by name" value={typed}
              onInput={(event) => setTyped(event.currentTarget.value)} />
          )}
          <select {...attributes} value={value} onFocus={reload} onChange={(event) => onChange(event.currentTarget.value)}>
            {all !== undefined && <option value="">{all}</option>}
            {!isListed && <option value={value}>{valueLabel ?? value}</option>}
            {found.options.map((option) => <option key={option.value} value={option.value}>{option.label}</option>)}
          </select>
        </>
      )}
    </Field>
  );
}
