/** What is set becomes request fields, what is not set stays away. */
import { describe, expect, it } from 'vitest';
import { DEFAULTS, inRange, readOptions, requestOptions } from './options';

describe('options', () => {
  it('send nothing that nobody has set, and let a long chat go on', () => {
    expect(requestOptions(DEFAULTS)).toEqual({ truncation: 'auto', session_policy: null });
  });

  it('are sent under the names of the API', () => {
    const set = { ...DEFAULTS, instructions: ' Be brief. ', temperature: 0, topK: 5, maxTokens: 9 };
    expect(requestOptions(set)).toMatchObject({
      instructions: 'Be brief.',
      temperature: 0,
      top_k: 5,
      max_output_tokens: 9,
    });
  });

  it('draw a second answer freely, unless told otherwise', () => {
    expect(requestOptions(DEFAULTS, 1)).toMatchObject({ temperature: 0.7 });
    expect(requestOptions({ ...DEFAULTS, temperature: 0.2 }, 1)).toMatchObject({
      temperature: 0.2,
    });
    expect(requestOptions({ ...DEFAULTS, seed: 4 }, 2)).toMatchObject({ seed: 6 });
  });

  it('keep a window of a session', () => {
    const set = { ...DEFAULTS, growth: 'session' as const, window: 512, images: 'pinned' as const };
    expect(requestOptions(set)).toEqual({
      truncation: 'disabled',
      session_policy: { window: 512, images: 'pinned', summary: false },
    });
  });

  it('survive whatever was stored', () => {
    for (const text of [null, '', '[]', 'null', '{"temperature":"hot","growth":7}']) {
      expect(readOptions(text)).toEqual(DEFAULTS);
    }
    expect(readOptions('{"temperature":9,"topK":2.4,"instructions":"x"}')).toMatchObject({
      temperature: 2,
      topK: 2,
      instructions: 'x',
    });
  });

  it('bring numbers into range', () => {
    expect(inRange('topP', 3)).toBe(1);
    expect(inRange('seed', Number.NaN)).toBeNull();
  });
});
