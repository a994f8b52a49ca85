/** What is drawn of a long list. */
import { expect, it } from 'vitest';
import { visibleSpan } from './window';

const EVEN = Array.from({ length: 500 }, () => 100);

it('draws what is seen and a margin, and keeps the room of the rest', () => {
  const { start, end, before, after } = visibleSpan(EVEN, 20_000, 800);
  expect(start).toBeLessThanOrEqual(190);
  expect(end).toBeGreaterThan(208);
  expect(end - start).toBeLessThan(50);
  expect(before + (end - start) * 100 + after).toBe(50_000);
});

it('draws the beginning at the top and the end at the bottom', () => {
  expect(visibleSpan(EVEN, 0, 800)).toMatchObject({ start: 0, before: 0 });
  expect(visibleSpan(EVEN, 49_200, 800)).toMatchObject({ end: 500, after: 0 });
});

it('never draws nothing', () => {
  expect(visibleSpan(EVEN, 1e9, 800)).toEqual({ start: 499, end: 500, before: 49_900, after: 0 });
  expect(visibleSpan([], 0, 800)).toEqual({ start: 0, end: 0, before: 0, after: 0 });
});

it('draws all of a short list', () => {
  expect(visibleSpan([300, 50, 900], 0, 800)).toEqual({ start: 0, end: 3, before: 0, after: 0 });
});
