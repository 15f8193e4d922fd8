import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { createStore, useStore } from "../lib/store";

interface DialogProps {
  title: string;
  onClose: () => void;
  children: ComponentChildren;
  class?: string;
}

/** A modal dialog. The browser keeps the focus inside, closes it with Escape and returns the focus afterwards. */
export function Dialog({ title, onClose, children, class: className }: DialogProps) {
  const element = useRef<HTMLDialogElement>(null);
  // Before the browser paints, so that keys which are typed at once reach the dialog.
  useLayoutEffect(() => {
    const dialog = element.current;
    if (dialog !== null && !dialog.open) dialog.showModal();
    return () => dialog?.close();
  }, []);
  const closeOnBackdrop = (event: MouseEvent) => {
    if (event.target === element.current) onClose();
  };
  return (
    <dialog ref={element} class={className} aria-label={title} onClose={onClose} onClick={closeOnBackdrop}>
      {children}
    </dialog>
  );
}

export interface Question {
  title: string;
  body: ComponentChildren;
  confirm: string;
  isDangerous?: boolean;
  /** Asks for a text, such as the reason of a ban. */
  textLabel?: string;
  /** The button is enabled when this text has been typed. */
  typeToConfirm?: string;
}

interface Pending extends Question {
  answer: (text: string | null) => void;
}

const pending = createStore<Pending | null>(null);

/** Asks the user. Returns null if the user declines, otherwise the text (empty if none was asked for). */
export function ask(question: Question): Promise<string | null> {
  return new Promise((resolve) => {
    const answer = (text: string | null) => {
      pending.set(null);
      resolve(text);
    };
    pending.set({ ...question, answer });
  });
}

/** Declines the open question, if there is one. */
export function dismissQuestion(): void {
  pending.get()?.answer(null);
}

/** Shows the question of `ask`. Rendered once, at the root. */
export function QuestionHost() {
  const question = useStore(pending);
  return question === null ? null : <QuestionDialog key={question.title} question={question} />;
}

function QuestionDialog({ question }: { question: Pending }) {
  const [text, setText] = useState("");
  const expected = question.typeToConfirm;
  const label = expected === undefined ? question.textLabel : `Type ${expected} to confirm`;
  const submit = (event: Event) => {
    event.preventDefault();
    question.answer(text);
  };
  return (
    <Dialog title={question.title} onClose={() => question.answer(null)}>
      <form onSubmit={submit}>
        <h2 class="dialog-head">{question.title}</h2>
        <div class="dialog-body stack">
          <div>{question.body}</div>
          {label !== undefined && (
            <div class="field">
              <label for="question-text">{label}</label>
              <input id="question-text" class="input" value={text} autocomplete="off" onInput={(event) => setText(event.currentTarget.value)} />
            </div>
          )}
        </div>
        <div class="dialog-foot">
          <button type="button" class="button" onClick={() => question.answer(null)}>Cancel</button>
          <button type="submit" class={`button primary${question.isDangerous ? " danger" : ""}`}
            disabled={expected !== undefined && text !== expected}>
            {question.confirm}
          </button>
        </div>
      </form>
    </Dialog>
  );
}
