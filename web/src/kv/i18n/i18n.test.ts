/** The view's dictionaries are equal in shape, and no text is empty. */
import { expect, it } from 'vitest';
import { en } from './en';
import { zh } from './zh';

function keysOf(value: unknown, path = ''): string[] {
  if (typeof value !== 'object' || value === null) return [`${path}:${typeof value}`];
  return Object.entries(value).flatMap(([key, inner]) => keysOf(inner, `${path}.${key}`));
}

function textsOf(value: unknown): string[] {
  if (typeof value === 'string') return [value];
  if (typeof value === 'function')
    return [(value as (...n: string[]) => string)('1', '2', '3', '4')];
  return Object.values(value as object).flatMap(textsOf);
}

it('the dictionaries have the same keys', () => {
  expect(keysOf(zh).sort()).toEqual(keysOf(en).sort());
});

it('no text is empty', () => {
  expect([en, zh].flatMap(textsOf).every((text) => text.trim() !== '')).toBe(true);
});
