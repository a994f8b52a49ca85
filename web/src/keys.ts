/** Keys that act on the whole page. Pure: a key event in, what it asks for out. */

export type Action = 'search' | 'newChat' | 'copyLast' | 'settings' | 'shelf' | 'help';

interface Shortcut {
  action: Action;
  key: string;
  shift: boolean;
}

export const SHORTCUTS: readonly Shortcut[] = [
  { action: 'search', key: 'k', shift: false },
  { action: 'newChat', key: 'o', shift: true },
  { action: 'copyLast', key: 'c', shift: true },
  { action: 'shelf', key: 'i', shift: false },
  { action: 'settings', key: ',', shift: false },
  { action: 'help', key: '/', shift: false },
];

export const MAC = /mac|iphone|ipad/i.test(navigator.platform);

type Pressed = Pick<
  KeyboardEvent,
  'key' | 'ctrlKey' | 'metaKey' | 'shiftKey' | 'altKey' | 'isComposing'
>;

/** Ctrl, or ⌘ on a Mac, with the key of a shortcut. */
export function actionOf(event: Pressed, mac = MAC): Action | null {
  const [wanted, other] = mac ? [event.metaKey, event.ctrlKey] : [event.ctrlKey, event.metaKey];
  if (!wanted || other || event.altKey || event.isComposing) return null;
  const key = event.key.toLowerCase();
  const found = SHORTCUTS.find((each) => each.key === key && each.shift === event.shiftKey);
  return found?.action ?? null;
}

/** How a shortcut is written, key by key. */
export function keysOf(action: Action, mac = MAC): string[] {
  const shortcut = SHORTCUTS.find((each) => each.action === action);
  if (shortcut === undefined) return [];
  const shift = shortcut.shift ? [mac ? '⇧' : 'Shift'] : [];
  return [mac ? '⌘' : 'Ctrl', ...shift, shortcut.key.toUpperCase()];
}
