/** Boxes of the prefix tree: children inside their parent's lines, behind its end, none twice. */
import { expect, it } from 'vitest';
import type { PrefixOwner } from './picture';
import { layOut } from './tree';

function node(
  id: number,
  parent: number | null,
  start: number,
  tokens = 16,
  readers = 0,
): PrefixOwner {
  return { id, kind: 'prefix', request: null, session: null, parent, start, tokens, readers };
}

const NODES = [
  node(1, null, 0, 32),
  node(2, 1, 32),
  node(3, 1, 32),
  node(4, 3, 48),
  node(5, 3, 48),
  node(6, null, 0),
];

it('a parent spans the lines of its children, which lie side by side', () => {
  const { boxes, lines, tokens, left } = layOut(NODES, 10);
  expect([lines, tokens, left]).toEqual([4, 64, 0]);
  const byId = new Map(boxes.map((box) => [box.owner.id, box]));
  expect(byId.size).toBe(NODES.length);
  for (const { owner, line, lines: own } of boxes) {
    const below = boxes.filter((box) => box.owner.parent === owner.id);
    if (below.length === 0) {
      expect(own).toBe(1);
      continue;
    }
    expect(below.reduce((sum, box) => sum + box.lines, 0)).toBe(own);
    for (const box of below) {
      expect(box.line).toBeGreaterThanOrEqual(line);
      expect(box.line + box.lines).toBeLessThanOrEqual(line + own);
    }
  }
});

it('where there are too many branches those in use stay, and the newest', () => {
  const { boxes, left } = layOut([...NODES, node(7, 6, 16, 16, 2)], 2);
  expect(boxes.map(({ owner }) => owner.id).sort()).toEqual([1, 3, 5, 6, 7]);
  expect(left).toBe(2);
});

it('a conversation of ten thousand turns is no deeper than it can be drawn', () => {
  const chain = Array.from({ length: 10_000 }, (_, i) => node(i, i === 0 ? null : i - 1, 16 * i));
  const { boxes, lines } = layOut(chain, 5);
  expect([boxes.length, lines]).toEqual([10_000, 1]);
});

it('of nothing there is nothing', () => {
  expect(layOut([], 5)).toEqual({ boxes: [], lines: 0, tokens: 0, left: 0 });
});
