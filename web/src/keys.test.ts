/** Which keys do what. */
import { expect, it } from 'vitest';
import { actionOf, keysOf } from './keys';

const NONE = { ctrlKey: false, metaKey: false, shiftKey: false, altKey: false, isComposing: false };

it('takes Ctrl, and ⌘ on a Mac', () => {
  expect(actionOf({ ...NONE, key: 'k', ctrlKey: true }, false)).toBe('search');
  expect(actionOf({ ...NONE, key: 'k', metaKey: true }, false)).toBeNull();
  expect(actionOf({ ...NONE, key: 'k', metaKey: true }, true)).toBe('search');
  expect(actionOf({ ...NONE, key: 'O', ctrlKey: true, shiftKey: true }, false)).toBe('newChat');
  expect(actionOf({ ...NONE, key: 'o', ctrlKey: true }, false)).toBeNull();
});

it('leaves plain keys and compositions alone', () => {
  expect(actionOf({ ...NONE, key: 'k' }, false)).toBeNull();
  expect(actionOf({ ...NONE, key: 'k', ctrlKey: true, isComposing: true }, false)).toBeNull();
  expect(actionOf({ ...NONE, key: '/', ctrlKey: true, altKey: true }, false)).toBeNull();
});

it('writes them as the system does', () => {
  expect(keysOf('newChat', false)).toEqual(['Ctrl', 'Shift', 'O']);
  expect(keysOf('newChat', true)).toEqual(['⌘', '⇧', 'O']);
});
