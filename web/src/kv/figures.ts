/** The server's samples (`/metrics`, by name) as the figures that are shown. Pure. */

export type Figures = ReadonlyMap<string, number>;

const PREFIX = 'mmserve:';

/** Labels in any order; the server writes them sorted. */
export function sample(
  figures: Figures,
  name: string,
  labels: Record<string, string> = {},
): number {
  const inner = Object.keys(labels)
    .sort()
    .map((label) => `${label}="${labels[label]}"`)
    .join(',');
  return figures.get(`${PREFIX}${name}${inner === '' ? '' : `{${inner}}`}`) ?? 0;
}

export const CAUSES = ['prefix', 'image', 'tier'] as const;
export const TIERS = ['host', 'disk', 'object_store'] as const;
export const PARTS = ['decode', 'prompt', 'image_miss', 'image_hit', 'idle'] as const;

export function hitRate(figures: Figures, cause: (typeof CAUSES)[number]): number {
  return sample(figures, 'cache_hit_rate', { cause });
}

export interface Tier {
  name: (typeof TIERS)[number];
  objects: number;
  bytes: number;
}

/** Those that the server has. */
export function tiersOf(figures: Figures): Tier[] {
  const has = (name: string): boolean => figures.has(`${PREFIX}tier_objects{tier="${name}"}`);
  return TIERS.filter(has).map((name) => ({
    name,
    objects: sample(figures, 'tier_objects', { tier: name }),
    bytes: sample(figures, 'tier_bytes', { tier: name }),
  }));
}

export interface Energy {
  joules: number;
  perToken: number | null;
  perImage: number | null;
}

/** null: the device does not report any. */
export function energyOf(figures: Figures): Energy | null {
  const of = (part: (typeof PARTS)[number]): number =>
    sample(figures, 'energy_joules_total', { part });
  const joules = PARTS.reduce((sum, part) => sum + of(part), 0);
  if (joules === 0) return null;
  const tokens = sample(figures, 'generation_tokens_total');
  const images = sample(figures, 'vision_encoder_runs_total');
  return {
    joules,
    perToken: tokens === 0 ? null : of('decode') / tokens,
    perImage: images === 0 ? null : of('image_miss') / images,
  };
}

/** One bar: samples of at most `edge` seconds, and more than the edge before. */
export interface Bar {
  edge: number;
  count: number;
}

export function histogram(figures: Figures, name: string): Bar[] {
  const start = `${PREFIX}${name}_bucket{le="`;
  const cumulative = [...figures]
    .filter(([key]) => key.startsWith(start))
    .map(([key, count]) => ({
      edge: Number(key.slice(start.length, -2).replace('+Inf', 'Infinity')),
      count,
    }))
    .sort((a, b) => a.edge - b.edge);
  return cumulative.map(({ edge, count }, i) => ({
    edge,
    count: count - (cumulative[i - 1]?.count ?? 0),
  }));
}

/** About; within a bar samples count as evenly spread. null: there are none. */
export function quantile(bars: readonly Bar[], share: number): number | null {
  const total = bars.reduce((sum, bar) => sum + bar.count, 0);
  if (total === 0) return null;
  let before = 0;
  for (const [i, { edge, count }] of bars.entries()) {
    const least = bars[i - 1]?.edge ?? 0;
    if (before + count >= share * total) {
      if (edge === Infinity) return least;
      return least + ((edge - least) * (share * total - before)) / count;
    }
    before += count;
  }
  return bars.at(-1)?.edge ?? null;
}

/** What grows with time, to tell rates from. */
export interface Moment {
  at: number;
  prompt: number;
  generated: number;
  prefillS: number;
  decodeS: number;
}

export function momentOf(figures: Figures, at: number): Moment {
  return {
    at,
    prompt: sample(figures, 'prompt_tokens_total'),
    generated: sample(figures, 'generation_tokens_total'),
    prefillS: sample(figures, 'prefill_seconds_total'),
    decodeS: sample(figures, 'decode_seconds_total'),
  };
}

export const REMEMBERED_MS = 60_000;

/** The moments of the last minute, one more. */
export function remember(moments: readonly Moment[], next: Moment): Moment[] {
  return [...moments.filter(({ at }) => next.at - at <= REMEMBERED_MS), next];
}

export interface Rates {
  tokensPerSecond: number;
  /** Of the time in which anything was computed; null: nothing was. */
  prefillShare: number | null;
}

export function ratesOf(moments: readonly Moment[]): Rates {
  const first = moments[0];
  const last = moments.at(-1);
  if (first === undefined || last === undefined || last.at === first.at) {
    return { tokensPerSecond: 0, prefillShare: null };
  }
  const prefill = last.prefillS - first.prefillS;
  const busy = prefill + last.decodeS - first.decodeS;
  return {
    tokensPerSecond: (1000 * (last.generated - first.generated)) / (last.at - first.at),
    prefillShare: busy > 0 ? prefill / busy : null,
  };
}
