/**
 * What the pools hold, as the server tells it: messages in, the next picture out.
 *
 * Pure: a picture is never changed, so whoever holds one may compare it with the next.
 */

export const FREE = -1;

export interface PrefixOwner {
  id: number;
  kind: 'prefix';
  request: string | null;
  session: string | null;
  parent: number | null;
  start: number;
  tokens: number;
  readers: number;
}

export interface RequestOwner {
  id: number;
  kind: 'request';
  request: string;
  session: string | null;
  tokens: number;
  computed: number;
}

export interface ImageOwner {
  id: number;
  kind: 'image';
  request: string | null;
  session: string | null;
  key: string;
  tokens: number;
  state: 'writing' | 'ready' | 'failed';
  readers: number;
  hits: number;
  pinned: boolean;
  kv_dtype?: string; // it has been held in, since it was computed
}

export type Owner = PrefixOwner | RequestOwner | ImageOwner;

export interface PoolShape {
  kind: 'text' | 'vision';
  window: number | null;
  pages: number;
  page_bytes: number;
}

/** `pools` and `page_size` come with a whole picture, which replaces all that is known. */
export interface PagesMessage {
  type: 'kv.pages';
  version: number;
  page_size?: number;
  pools?: PoolShape[];
  /** Pool, first page, number of pages, their owner. */
  runs: [number, number, number, number][];
  owners: Owner[];
  gone: number[];
  figures: Record<string, number>;
  running: number;
  waiting: number;
}

/** `owners`: by page. */
export interface Pool extends PoolShape {
  owners: Int32Array;
}

export interface Picture {
  version: number;
  pageSize: number;
  pools: readonly Pool[];
  owners: ReadonlyMap<number, Owner>;
  figures: ReadonlyMap<string, number>;
  running: number;
  waiting: number;
}

export const NOTHING: Picture = {
  version: 0,
  pageSize: 0,
  pools: [],
  owners: new Map(),
  figures: new Map(),
  running: 0,
  waiting: 0,
};

export function apply(before: Picture, message: PagesMessage): Picture {
  const whole = message.pools !== undefined;
  const pools = whole
    ? message.pools!.map((shape) => ({ ...shape, owners: new Int32Array(shape.pages).fill(FREE) }))
    : [...before.pools];
  const owners = new Map(whole ? [] : before.owners);
  const figures = new Map(whole ? [] : before.figures);
  const copied = new Set<number>();
  for (const [number, first, count, owner] of message.runs) {
    const pool = pools[number];
    if (pool === undefined) continue;
    if (!whole && !copied.has(number)) {
      copied.add(number);
      pools[number] = { ...pool, owners: pool.owners.slice() };
    }
    pools[number]!.owners.fill(owner, first, first + count);
  }
  for (const owner of message.owners) owners.set(owner.id, owner);
  for (const id of message.gone) owners.delete(id);
  for (const [name, value] of Object.entries(message.figures)) figures.set(name, value);
  return {
    version: message.version,
    pageSize: message.page_size ?? before.pageSize,
    pools,
    owners,
    figures,
    running: message.running,
    waiting: message.waiting,
  };
}

const counted = new WeakMap<Pool, ReadonlyMap<number, number>>();

/** Pages of a pool by owner, the most first. Counted once: a pool never changes. */
export function pagesByOwner(pool: Pool): ReadonlyMap<number, number> {
  const known = counted.get(pool);
  if (known !== undefined) return known;
  const counts = new Map<number, number>();
  for (const owner of pool.owners) {
    if (owner !== FREE) counts.set(owner, (counts.get(owner) ?? 0) + 1);
  }
  const sorted = new Map([...counts].sort(([a, n], [b, m]) => m - n || a - b));
  counted.set(pool, sorted);
  return sorted;
}

/** Whether a running answer reads it. */
export function isActive(owner: Owner): boolean {
  return owner.kind === 'request' || owner.readers > 0;
}

/** A conversation where it is known, else the request by itself. */
export function sessionOf(owner: Owner): string | null {
  return owner.session ?? owner.request;
}

export interface Use {
  active: number;
  cached: number;
  free: number;
}

export function useOf(pool: Pool, owners: Picture['owners']): Use {
  const use: Use = { active: 0, cached: 0, free: pool.pages };
  for (const [id, count] of pagesByOwner(pool)) {
    const owner = owners.get(id);
    use.free -= count;
    use[owner !== undefined && isActive(owner) ? 'active' : 'cached'] += count;
  }
  return use;
}
