/**
 * Gives the focus back to an element that has lost it, such as a button that was disabled while a question was open. If the
 * element is gone, the heading of the page gets it. An element that has got the focus since keeps it.
 */
export function restoreFocus(element: Element | null | undefined): void {
  requestAnimationFrame(() => {
    if (document.activeElement !== document.body) return;
    const target = element?.isConnected ? element : document.querySelector("h1");
    if (target instanceof HTMLElement) target.focus({ preventScroll: true });
  });
}
