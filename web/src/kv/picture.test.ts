/** Messages replayed give the whole picture, and a picture that somebody holds stays as it is. */
import { describe, expect, it } from 'vitest';
import { apply, FREE, isActive, NOTHING, pagesByOwner, sessionOf, useOf } from './picture';
import type { ImageOwner, Owner, PagesMessage, Picture, PoolShape, PrefixOwner } from './picture';

const SHAPES: PoolShape[] = [
  { kind: 'text', window: null, pages: 40, page_bytes: 8 },
  { kind: 'vision', window: 64, pages: 12, page_bytes: 4 },
];

function prefix(id: number, rest: Partial<PrefixOwner> = {}): PrefixOwner {
  const base = {
    request: `resp_${id}`,
    session: null,
    parent: null,
    start: 0,
    tokens: 16,
    readers: 0,
  };
  return { id, kind: 'prefix', ...base, ...rest };
}

function image(id: number, rest: Partial<ImageOwner> = {}): ImageOwner {
  const base = { request: null, session: null, key: 'ab', tokens: 16, readers: 0, hits: 0 };
  return { id, kind: 'image', ...base, state: 'ready', pinned: false, ...rest };
}

/** A small generator with a seed (mulberry32): the same cases in every run. */
function random(seed: number): (below: number) => number {
  let a = seed;
  return (below) => {
    a = (a + 0x6d2b79f5) | 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) % below;
  };
}

interface World {
  owners: Map<number, Owner>;
  pages: number[][];
  figures: Record<string, number>;
  running: number;
}

function change(world: World, draw: (below: number) => number): World {
  const pages = world.pages.map((pool) => [...pool]);
  const owners = new Map(world.owners);
  for (let i = draw(6); i > 0; i--) {
    const id = draw(9);
    owners.set(id, id % 2 === 0 ? prefix(id, { readers: draw(3) }) : image(id, { hits: draw(9) }));
    const pool = pages[id % 2]!;
    const first = draw(pool.length);
    pool.fill(draw(3) === 0 ? FREE : id, first, first + draw(9));
  }
  const named = new Set(pages.flat());
  for (const id of owners.keys()) if (!named.has(id)) owners.delete(id);
  return {
    owners,
    pages,
    figures: { ...world.figures, [`f${draw(4)}`]: draw(100) },
    running: draw(5),
  };
}

/** As the server codes it. */
function message(version: number, before: World | null, after: World): PagesMessage {
  const runs: PagesMessage['runs'] = [];
  after.pages.forEach((pool, number) => {
    pool.forEach((owner, page) => {
      if (owner === (before === null ? FREE : before.pages[number]![page])) return;
      const last = runs.at(-1);
      if (
        last !== undefined &&
        last[0] === number &&
        last[1] + last[2] === page &&
        last[3] === owner
      )
        last[2]++;
      else runs.push([number, page, 1, owner]);
    });
  });
  const same = (id: number, owner: Owner): boolean =>
    JSON.stringify(before?.owners.get(id)) === JSON.stringify(owner);
  return {
    type: 'kv.pages',
    version,
    ...(before === null ? { page_size: 16, pools: SHAPES } : {}),
    runs,
    owners: [...after.owners].filter(([id, owner]) => !same(id, owner)).map(([, owner]) => owner),
    gone: [...(before?.owners.keys() ?? [])].filter((id) => !after.owners.has(id)),
    figures: Object.fromEntries(
      Object.entries(after.figures).filter(([name, value]) => before?.figures[name] !== value),
    ),
    running: after.running,
    waiting: 0,
  };
}

function plain(picture: Picture): unknown {
  const sorted = <T>(map: ReadonlyMap<unknown, T>): unknown =>
    [...map].sort(([a], [b]) => (String(a) < String(b) ? -1 : 1));
  const { owners, figures, pools, ...rest } = picture;
  const bare = pools.map((pool) => ({ ...pool, owners: [...pool.owners] }));
  return { ...rest, pools: bare, owners: sorted(owners), figures: sorted(figures) };
}

describe('a picture', () => {
  it('is the same from changes as from the whole, whatever changes', () => {
    for (let seed = 0; seed < 200; seed++) {
      const draw = random(seed);
      let world: World = {
        owners: new Map(),
        pages: SHAPES.map(({ pages }) => new Array<number>(pages).fill(FREE)),
        figures: {},
        running: 0,
      };
      let picture = apply(NOTHING, message(1, null, world));
      for (let version = 2; version < 12; version++) {
        const next = change(world, draw);
        const held = plain(picture);
        const later = apply(picture, message(version, world, next));
        expect(plain(picture)).toEqual(held);
        expect(plain(later)).toEqual(plain(apply(NOTHING, message(version, null, next))));
        expect(later.pools.map(({ owners }) => [...owners])).toEqual(next.pages);
        [world, picture] = [next, later];
      }
    }
  });

  it('is replaced by a whole one', () => {
    const empty = { owners: new Map(), pages: [[], []], figures: {}, running: 0 };
    const full: World = {
      ...empty,
      pages: [[3], [FREE]],
      owners: new Map([[3, prefix(3)]]),
      figures: { a: 1 },
    };
    const before = apply(NOTHING, message(1, null, full));
    const after = apply(before, message(2, null, { ...empty, pages: [[FREE], [FREE]] }));
    expect([after.owners.size, after.figures.size, after.pools[0]!.owners[0]]).toEqual([
      0,
      0,
      FREE,
    ]);
  });

  it('counts the pages of each owner, and what is read, kept and free', () => {
    const world: World = {
      pages: [[1, 1, 2, FREE], []],
      owners: new Map<number, Owner>([
        [1, prefix(1, { readers: 2 })],
        [2, prefix(2)],
      ]),
      figures: {},
      running: 1,
    };
    const body = message(1, null, world);
    body.pools = [{ ...SHAPES[0]!, pages: 4 }];
    const picture = apply(NOTHING, body);
    expect([...pagesByOwner(picture.pools[0]!)]).toEqual([
      [1, 2],
      [2, 1],
    ]);
    expect(useOf(picture.pools[0]!, picture.owners)).toEqual({ active: 2, cached: 1, free: 1 });
  });
});

it('an owner is active while a running answer reads it', () => {
  expect(isActive(prefix(1))).toBe(false);
  expect(isActive(image(1, { readers: 1 }))).toBe(true);
  const base = { request: 'chatcmpl_1', session: null, tokens: 3, computed: 2 };
  expect(isActive({ id: 1, kind: 'request', ...base })).toBe(true);
});

it('a session is the conversation, or the request where there is none', () => {
  expect(sessionOf(prefix(1, { session: 'resp_0' }))).toBe('resp_0');
  expect(sessionOf(prefix(1))).toBe('resp_1');
  expect(sessionOf(image(1))).toBe(null);
});
