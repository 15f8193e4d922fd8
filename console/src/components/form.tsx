// Fields that show the errors of the API beside them.
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";
import { ApiError } from "../api/client";
import { restoreFocus } from "../lib/focus";
import { toApiError } from "../lib/live";
import { ErrorBox } from "./async";
import { showToast } from "./toasts";

interface FieldProps {
  label: string;
  hint?: ComponentChildren;
  error?: string;
  children: (attributes: { id: string; "aria-describedby"?: string; "aria-invalid"?: boolean; class: string }) => ComponentChildren;
}

export function Field({ label, hint, error, children }: FieldProps) {
  const id = useId();
  const hasNote = hint !== undefined || error !== undefined;
  return (
    <div class="field">
      <label for={id}>{label}</label>
      {children({ id, class: "input", "aria-describedby": hasNote ? `${id}-note` : undefined, "aria-invalid": error !== undefined || undefined })}
      {hasNote && (
        <div id={`${id}-note`}>
          {error !== undefined && <div class="field-error">{error}</div>}
          {hint !== undefined && <div class="field-hint">{hint}</div>}
        </div>
      )}
    </div>
  );
}

type TextFieldProps = Omit<FieldProps, "children"> & {
  value: string;
  onChange: (value: string) => void;
  type?: string;
  placeholder?: string;
  required?: boolean;
  multiline?: boolean;
  autocomplete?: string;
  min?: number;
  /** The height of a text with several lines. */
  rows?: number;
};

export function TextField({ value, onChange, type = "text", multiline = false, label, hint, error, ...rest }: TextFieldProps) {
  const onInput = (event: JSX.TargetedInputEvent<HTMLInputElement | HTMLTextAreaElement>) => onChange(event.currentTarget.value);
  return (
    <Field label={label} hint={hint} error={error}>
      {(attributes) => multiline
        ? <textarea {...attributes} {...rest} spellcheck={false} value={value} onInput={onInput} />
        : <input {...attributes} {...rest} type={type} spellcheck={false} value={value} onInput={onInput} />}
    </Field>
  );
}

type SelectFieldProps = Omit<FieldProps, "children"> & {
  value: string;
  onChange: (value: string) => void;
  options: { value: string; label: string }[];
};

export function SelectField({ value, onChange, options, ...field }: SelectFieldProps) {
  return (
    <Field {...field}>
      {(attributes) => (
        <select {...attributes} value={value} onChange={(event) => onChange(event.currentTarget.value)}>
          {options.map((option) => <option key={option.value} value={option.value}>{option.label}</option>)}
        </select>
      )}
    </Field>
  );
}

export function Checkbox({ label, checked, onChange }: { label: string; checked: boolean; onChange: (checked: boolean) => void }) {
  return (
    <label class="checkbox">
      <input type="checkbox" checked={checked} onChange={(event) => onChange(event.currentTarget.checked)} />
      {label}
    </label>
  );
}

export interface Action {
  isBusy: boolean;
  error: ApiError | undefined;
  /** The error of a field, by the beginning of its JSON pointer: `errorOf("/url")`. */
  errorOf: (pointer: string) => string | undefined;
  run: (work: () => Promise<void>) => Promise<void>;
}

/** Runs one request at a time and remembers its error for the form. */
export function useAction(): Action {
  const [state, setState] = useState<{ isBusy: boolean; error?: ApiError }>({ isBusy: false });
  const run = async (work: () => Promise<void>) => {
    // The button that was pressed: it loses the focus while the form is busy.
    const pressed = document.activeElement;
    setState({ isBusy: true });
    try {
      await work();
      setState({ isBusy: false });
    } catch (cause) {
      setState({ isBusy: false, error: toApiError(cause) });
    }
    restoreFocus(pressed);
  };
  const errorOf = (pointer: string) =>
    state.error?.fields.find((field) => field.pointer === pointer || field.pointer.startsWith(`${pointer}/`))?.detail;
  return { isBusy: state.isBusy, error: state.error, errorOf, run };
}

/** The error of a form, unless all of it is shown beside the fields in `shown`. */
export function FormError({ action, shown = [] }: { action: Action; shown?: string[] }) {
  const error = action.error;
  const box = useRef<HTMLDivElement>(null);
  // To the first field that is wrong: in a long form the errors may be out of sight.
  useEffect(() => {
    if (error === undefined || box.current === null) return;
    const invalid = box.current.closest("form")?.querySelector<HTMLElement>("[aria-invalid=true]");
    (invalid ?? box.current).focus();
  }, [error]);
  const isShown = (pointer: string) => shown.some((field) => pointer === field || pointer.startsWith(`${field}/`));
  const isBesideFields = error === undefined || (error.fields.length > 0 && error.fields.every((field) => isShown(field.pointer)));
  return <div ref={box} tabIndex={-1} class={isBesideFields ? "visually-hidden" : undefined}>{!isBesideFields && <ErrorBox error={error} />}</div>;
}

interface ActionButtonProps {
  label: string;
  onRun: () => Promise<void>;
  class?: string;
  disabled?: boolean;
  title?: string;
}

/** A button for one request outside of a form: busy while it runs, and a message if it fails. */
export function ActionButton({ label, onRun, class: className = "", disabled = false, title }: ActionButtonProps) {
  const [isBusy, setBusy] = useState(false);
  const button = useRef<HTMLButtonElement>(null);
  const run = async () => {
    setBusy(true);
    try {
      await onRun();
    } catch (cause) {
      showToast(toApiError(cause).message, "bad");
    }
    setBusy(false);
    restoreFocus(button.current);
  };
  return (
    <button ref={button} type="button" class={`button ${className}`} disabled={disabled || isBusy} aria-busy={isBusy} title={title} onClick={run}>
      {label}
    </button>
  );
}
