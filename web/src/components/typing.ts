/** What every box for writing a message has in common. */

/** The key code of every key that belongs to an input method's composition. */
const COMPOSING = 229;

export const touch = matchMedia('(hover: none) and (pointer: coarse)').matches;

/** Whether a key is part of a composition: such a key chooses letters and does nothing else. */
export function isComposing(event: KeyboardEvent): boolean {
  return event.isComposing || event.keyCode === COMPOSING;
}

/** Whether a key sends; on a touch screen Enter starts a new line. */
export function isSending(event: KeyboardEvent): boolean {
  return event.key === 'Enter' && !event.shiftKey && !isComposing(event) && !touch;
}

/** As high as its text. */
export function grow(area: HTMLTextAreaElement, text: string): void {
  if (area.value !== text) area.value = text;
  area.style.height = 'auto';
  area.style.height = `${area.scrollHeight}px`;
}
