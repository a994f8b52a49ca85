/**
 * The prefix tree as boxes: to the right with the tokens, downwards with the branches.
 *
 * Pure. Widths are in tokens, heights in lines; who draws scales them.
 */
import type { Owner, PrefixOwner } from './picture';

export interface Box {
  owner: PrefixOwner;
  /** The first line, and how many. */
  line: number;
  lines: number;
}

export interface Layout {
  boxes: Box[];
  lines: number;
  /** The deepest end. */
  tokens: number;
  /** Branches that are left out. */
  left: number;
}

/** At most `most` lines: those that are read now first, then the newest. */
export function layOut(owners: Iterable<Owner>, most: number): Layout {
  const nodes = [...owners].filter((owner) => owner.kind === 'prefix');
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const inner = new Set(nodes.map(({ parent }) => parent));
  const leaves = nodes.filter(({ id }) => !inner.has(id));
  leaves.sort((a, b) => b.readers - a.readers || b.id - a.id);
  const shown = new Set<number>();
  for (const leaf of leaves.slice(0, most)) {
    let node: PrefixOwner | undefined = leaf;
    while (node !== undefined && !shown.has(node.id)) {
      shown.add(node.id);
      node = node.parent === null ? undefined : byId.get(node.parent);
    }
  }
  const boxes: Box[] = [];
  const children = new Map<number | null, PrefixOwner[]>();
  for (const node of nodes) {
    if (!shown.has(node.id)) continue;
    const parent = node.parent !== null && shown.has(node.parent) ? node.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), node]);
  }
  const lines = place(null, 0, children, boxes);
  const tokens = boxes.reduce((end, { owner }) => Math.max(end, owner.start + owner.tokens), 0);
  return { boxes, lines, tokens, left: Math.max(leaves.length - most, 0) };
}

/** Places what is below a node; a conversation may be too deep to recurse. Returns its lines. */
function place(
  root: number | null,
  first: number,
  children: Map<number | null, PrefixOwner[]>,
  boxes: Box[],
): number {
  let line = first;
  const open: Box[] = [];
  const below = (id: number | null): PrefixOwner[] =>
    [...(children.get(id) ?? [])].sort((a, b) => b.id - a.id);
  const stack = below(root);
  while (stack.length > 0) {
    const owner = stack.pop()!;
    while (open.length > 0 && open.at(-1)!.owner.id !== owner.parent) open.pop();
    const box: Box = { owner, line, lines: 0 };
    boxes.push(box);
    open.push(box);
    const next = below(owner.id);
    stack.push(...next);
    if (next.length === 0) {
      line++;
      for (const each of open) each.lines++;
    }
  }
  return line - first;
}
