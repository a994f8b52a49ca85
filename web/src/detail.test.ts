/** Which details a person is offered, and which are kept of what somebody wrote. */
import { describe, expect, it } from 'vitest';
import { detailIn, detailsOf } from './detail';

const NESTED = { auto: 64, low: 16, high: 64, original: 64 };

describe('the details of a model', () => {
  it('are none where it looks at every picture alike', () => {
    expect(detailsOf(null)).toEqual([]);
    expect(detailsOf({ id: 'plain' })).toEqual([]);
    expect(detailsOf({ id: 'even', image_details: { auto: 64, low: 64, high: 64 } })).toEqual([]);
  });

  it('are those that make a difference', () => {
    expect(detailsOf({ id: 'nested', image_details: NESTED })).toEqual(['auto', 'low']);
    const halved = { ...NESTED, auto: 32 };
    expect(detailsOf({ id: 'halved', image_details: halved })).toEqual(['auto', 'low', 'high']);
  });

  it('are high, too, where that cuts pictures up', () => {
    const crops = { above: 448, most: 4 };
    const model = { id: 'crops', image_details: NESTED, image_crops: crops };
    expect(detailsOf(model)).toEqual(['auto', 'low', 'high']);
  });
});

describe('a detail that somebody wrote', () => {
  it('is kept where it says more than none', () => {
    expect(detailIn('low')).toEqual({ detail: 'low' });
    for (const other of ['auto', 'finest', 3, null, undefined]) expect(detailIn(other)).toEqual({});
  });
});
