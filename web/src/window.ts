/**
 * Which of many messages are near enough to be drawn, and the room of those that are not.
 *
 * Pure: heights in pixels, measured where a message has been drawn before and else estimated.
 */

/** Messages `start` to `end` (exclusive) are drawn; `before` and `after` are pixels of the others. */
export interface Span {
  start: number;
  end: number;
  before: number;
  after: number;
}

/** How much is drawn above and below what is seen, in heights of the view. */
const MARGIN = 1.5;

export function visibleSpan(heights: readonly number[], top: number, view: number): Span {
  const from = top - MARGIN * view;
  const to = top + (1 + MARGIN) * view;
  let [start, end, before, after, y] = [0, 0, 0, 0, 0];
  for (const [index, height] of heights.entries()) {
    const bottom = y + height;
    if (bottom < from) {
      start = end = index + 1;
      before = bottom;
    } else if (y <= to) end = index + 1;
    else after += height;
    y = bottom;
  }
  // A view that was scrolled past the end still shows the last one.
  if (start >= heights.length && heights.length > 0) {
    start = heights.length - 1;
    end = heights.length;
    before -= heights[start] ?? 0;
  }
  return { start, end, before, after };
}
