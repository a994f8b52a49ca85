/**
 * A conversation as a tree of turns, of which one path is shown.
 *
 * Two turns with one parent are versions of each other: of the answer where they share `askId`, of
 * the question where they do not. Pure; knows nothing of storage or the server.
 */
import type { Turn } from './store';

/** The turns from the first to `leafId`, or none where it is not there. */
export function pathTo(turns: readonly Turn[], leafId: string | null): Turn[] {
  const byId = new Map(turns.map((turn) => [turn.id, turn]));
  const path: Turn[] = [];
  let turn = leafId === null ? undefined : byId.get(leafId);
  while (turn !== undefined && path.length <= turns.length) {
    path.push(turn);
    turn = turn.parentId === null ? undefined : byId.get(turn.parentId);
  }
  return path.reverse();
}

/** Where one gets from a turn by always taking the newest version; null: from the beginning. */
export function newestLeaf(turns: readonly Turn[], from: string | null): string | null {
  const newest = new Map<string | null, Turn>();
  for (const turn of turns) {
    const other = newest.get(turn.parentId);
    if (other === undefined || other.createdAt <= turn.createdAt) newest.set(turn.parentId, turn);
  }
  let leaf = from;
  for (let steps = 0; steps <= turns.length; steps++) {
    const next = newest.get(leaf);
    if (next === undefined) break;
    leaf = next.id;
  }
  return leaf;
}

/** All answers to the question of `turn`, oldest first. */
export function answerVersions(turns: readonly Turn[], turn: Turn): Turn[] {
  return sorted(turns.filter((other) => isSibling(other, turn) && other.askId === turn.askId));
}

/** One turn for each version of the question, oldest first; `turn` stands for its own. */
export function questionVersions(turns: readonly Turn[], turn: Turn): Turn[] {
  const versions = new Map<string, Turn>();
  for (const other of sorted(turns.filter((each) => isSibling(each, turn)))) {
    versions.set(other.askId, other.askId === turn.askId ? turn : other);
  }
  return [...versions.values()];
}

/** A turn and all that builds on it. */
export function branchOf(turns: readonly Turn[], id: string): Set<string> {
  const found = new Set([id]);
  // A child is never older than its parent, so one pass in order finds them all.
  for (const turn of sorted([...turns])) {
    if (turn.parentId !== null && found.has(turn.parentId)) found.add(turn.id);
  }
  return found;
}

function isSibling(a: Turn, b: Turn): boolean {
  return a.parentId === b.parentId;
}

function sorted(turns: Turn[]): Turn[] {
  return turns.sort((a, b) => a.createdAt - b.createdAt);
}
