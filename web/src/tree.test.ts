/** Paths, versions and branches of a tree of turns. */
import { describe, expect, it } from 'vitest';
import { newAnswer } from './answer';
import type { Turn } from './store';
import { answerVersions, branchOf, newestLeaf, pathTo, questionVersions } from './tree';

function turn(id: string, parentId: string | null, createdAt: number, askId = id): Turn {
  return {
    ...{ id, conversationId: 'c', parentId, askId, createdAt },
    ...{ text: id, pictureIds: [], answer: newAnswer(0) },
  };
}

// a ─ b ─ d        b2 answers b's question again; c asks another one in its place.
//   ├ b2
//   └ c ─ e
const A = turn('a', null, 0);
const B = turn('b', 'a', 1);
const B2 = turn('b2', 'a', 2, 'b');
const C = turn('c', 'a', 3);
const D = turn('d', 'b', 4);
const E = turn('e', 'c', 5);
const TURNS = [A, B, B2, C, D, E];

const ids = (turns: readonly Turn[]): string[] => turns.map(({ id }) => id);

describe('a tree of turns', () => {
  it('shows the path to a leaf', () => {
    expect(ids(pathTo(TURNS, 'd'))).toEqual(['a', 'b', 'd']);
    expect(pathTo(TURNS, null)).toEqual([]);
    expect(pathTo(TURNS, 'gone')).toEqual([]);
  });

  it('ends although an imported turn is its own ancestor', () => {
    const loop = [turn('x', 'y', 0), turn('y', 'x', 1)];
    expect(pathTo(loop, 'x').length).toBeLessThanOrEqual(3);
    expect(newestLeaf(loop, 'x')).not.toBeNull();
  });

  it('goes on from a turn along the newest versions', () => {
    expect(newestLeaf(TURNS, null)).toBe('e');
    expect(newestLeaf(TURNS, 'b')).toBe('d');
    expect(newestLeaf([], null)).toBeNull();
  });

  it('tells versions of the answer from versions of the question', () => {
    expect(ids(answerVersions(TURNS, B2))).toEqual(['b', 'b2']);
    expect(ids(answerVersions(TURNS, C))).toEqual(['c']);
    expect(ids(questionVersions(TURNS, B))).toEqual(['b', 'c']);
    expect(ids(questionVersions(TURNS, B2))).toEqual(['b2', 'c']);
    expect(ids(questionVersions(TURNS, A))).toEqual(['a']);
  });

  it('finds all that builds on a turn', () => {
    expect([...branchOf(TURNS, 'c')].sort()).toEqual(['c', 'e']);
    expect(branchOf(TURNS, 'a').size).toBe(6);
  });
});
