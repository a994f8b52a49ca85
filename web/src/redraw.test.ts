/** Shrinking: only above a limit, and then below every limit. */
import { expect, it } from 'vitest';
import { shrinkFactor } from './redraw';

const LIMITS = { maxPixels: 1_000_000, maxSide: 4000, maxBytes: 1 };

it('leaves a picture within the limits as it is', () => {
  expect(shrinkFactor(1000, 1000, LIMITS)).toBe(1);
});

it.each([
  [2000, 2000],
  [9000, 10],
  [10, 9000],
  [1001, 1000],
])('brings %i x %i within the limits', (width, height) => {
  const factor = shrinkFactor(width, height, LIMITS);
  const [w, h] = [Math.floor(width * factor), Math.floor(height * factor)];
  expect(factor).toBeLessThan(1);
  expect(w * h).toBeLessThanOrEqual(LIMITS.maxPixels);
  expect(Math.max(w, h)).toBeLessThanOrEqual(LIMITS.maxSide);
});
