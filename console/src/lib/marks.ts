// Marks that change the direction of the text after them would show a payload, an answer of a receiver or a key in another
// order than it has. Every text on the page passes here, so no page can forget it; what is copied still has the marks.
import { options } from "preact";

const DIRECTION_MARKS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Shows an escape in place of each mark, in all texts of the page. */
export function showDirectionMarks(): void {
  const next = options.vnode;
  options.vnode = (node) => {
    // A text is a node without a type whose properties are the text, which the types of Preact do not tell.
    const text = node as unknown as { type: unknown; props: unknown };
    if (text.type === null && typeof text.props === "string") text.props = withVisibleMarks(text.props);
    next?.(node);
  };
}

function withVisibleMarks(text: string): string {
  return text.replace(DIRECTION_MARKS, (mark) => `\\u${mark.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
