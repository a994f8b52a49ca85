/** Dictionaries are equal in shape; the language is chosen as people expect. */
import { describe, expect, it } from 'vitest';
import { en } from './en';
import { chooseLanguage, errorSentence, formatBytes, formatMs } from './language';
import { zh } from './zh';

function keysOf(value: unknown, path = ''): string[] {
  if (typeof value !== 'object' || value === null) return [`${path}:${typeof value}`];
  return Object.entries(value).flatMap(([key, inner]) => keysOf(inner, `${path}.${key}`));
}

describe('the dictionaries', () => {
  it('have the same keys', () => {
    expect(keysOf(zh).sort()).toEqual(keysOf(en).sort());
  });

  it('leave no text empty', () => {
    const texts = [en, zh]
      .flatMap((text) => Object.values(text))
      .filter((v) => typeof v === 'string');
    expect(texts.every((text) => text.trim() !== '')).toBe(true);
  });
});

describe('the language', () => {
  it('is the stored one, else the first known of the browser, else English', () => {
    expect(chooseLanguage('en', ['zh-CN'])).toBe('en');
    expect(chooseLanguage(null, ['fr', 'zh-Hans-CN', 'en'])).toBe('zh');
    expect(chooseLanguage('xx', ['en-GB', 'zh'])).toBe('en');
    expect(chooseLanguage(null, ['fr'])).toBe('en');
  });
});

describe('an error', () => {
  it("is said in the page's words when its code is known", () => {
    const sentence = errorSentence(zh, { code: 'queue_full', message: 'busy' });
    expect(sentence).toBe(zh.errors.queue_full);
  });

  it("is said in the server's words otherwise, and never as nothing", () => {
    expect(errorSentence(en, { code: 'odd', message: 'So it is.' })).toBe('So it is.');
    expect(errorSentence(en, { code: 'toString', message: 'No.' })).toBe('No.');
    expect(errorSentence(en, { code: null, message: '' })).toBe(en.errors.unknown);
  });
});

it('times are short', () => {
  expect(formatMs(83.4, 'en')).toBe('83 ms');
  expect(formatMs(2345, 'en')).toBe('2.3 sec');
});

it('bytes are in the units people know', () => {
  expect([0, 1023, 1536, 5 * 2 ** 20, 2 ** 41].map((bytes) => formatBytes(bytes, 'en'))).toEqual([
    '0 B',
    '1,023 B',
    '1.5 KiB',
    '5 MiB',
    '2,048 GiB',
  ]);
});
