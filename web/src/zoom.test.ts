/** Zooming keeps the point under the finger, and the picture under the window. */
import { expect, it } from 'vitest';
import { FITTING, MAX_SCALE, moved, zoomed } from './zoom';

const FITTED = { width: 800, height: 400 };

it('keeps the point under the finger where it is', () => {
  const [px, py] = [100, 50];
  const lie = zoomed(FITTING, 2, px, py, FITTED);
  // The point was at (100, 50) of the picture; at twice the scale it is at 2·(100, 50) + offset.
  expect([2 * px + lie.x, 2 * py + lie.y]).toEqual([px, py]);
});

it('stays between fitting and its largest', () => {
  expect(zoomed(FITTING, 0.1, 0, 0, FITTED)).toEqual(FITTING);
  expect(zoomed(FITTING, 1e9, 0, 0, FITTED).scale).toBe(MAX_SCALE);
});

it('cannot be pulled out of sight, and comes home when it fits again', () => {
  expect(moved(FITTING, 500, 500, FITTED)).toEqual(FITTING);
  const near = zoomed(FITTING, 3, 0, 0, FITTED);
  expect(moved(near, 1e6, -1e6, FITTED)).toEqual({ scale: 3, x: 800, y: -400 });
  const pulled = moved(near, 1e6, 0, FITTED);
  expect(zoomed(pulled, 1e-3, 0, 0, FITTED)).toEqual(FITTING);
});
