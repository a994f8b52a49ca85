/** Samples become figures: what is missing counts as nothing, and nothing is made up. */
import { describe, expect, it } from 'vitest';
import {
  energyOf,
  histogram,
  hitRate,
  momentOf,
  quantile,
  ratesOf,
  remember,
  sample,
  tiersOf,
} from './figures';

const of = (values: Record<string, number>): Map<string, number> => new Map(Object.entries(values));

it('a sample is found by its name and labels', () => {
  const figures = of({ 'mmserve:pages{pool="text",state="free"}': 3, 'mmserve:x_total': 2 });
  expect(sample(figures, 'pages', { state: 'free', pool: 'text' })).toBe(3);
  expect(sample(figures, 'x_total')).toBe(2);
  expect(sample(figures, 'y_total')).toBe(0);
  expect(hitRate(of({ 'mmserve:cache_hit_rate{cause="image"}': 0.5 }), 'image')).toBe(0.5);
});

it('a tier is shown where the server has it', () => {
  const figures = of({
    'mmserve:tier_objects{tier="disk"}': 2,
    'mmserve:tier_bytes{tier="disk"}': 100,
  });
  expect(tiersOf(figures)).toEqual([{ name: 'disk', objects: 2, bytes: 100 }]);
});

it('energy is shown where the device reports it, for a token and for an image', () => {
  expect(energyOf(of({ 'mmserve:energy_joules_total{part="idle"}': 0 }))).toBe(null);
  const figures = of({
    'mmserve:energy_joules_total{part="decode"}': 6,
    'mmserve:energy_joules_total{part="idle"}': 4,
    'mmserve:generation_tokens_total': 3,
  });
  expect(energyOf(figures)).toEqual({ joules: 10, perToken: 2, perImage: null });
});

describe('a histogram', () => {
  const figures = of({
    'mmserve:t_bucket{le="0.1"}': 2,
    'mmserve:t_bucket{le="1.0"}': 6,
    'mmserve:t_bucket{le="+Inf"}': 7,
    'mmserve:t_count': 7,
  });
  const bars = histogram(figures, 't');

  it('has a bar for each edge, with what lies between it and the one before', () => {
    expect(bars).toEqual([
      { edge: 0.1, count: 2 },
      { edge: 1, count: 4 },
      { edge: Infinity, count: 1 },
    ]);
  });

  it('tells about where a share of its samples lies', () => {
    expect(quantile(bars, 2 / 7)).toBeCloseTo(0.1);
    expect(quantile(bars, 4 / 7)).toBeCloseTo(0.55);
    expect(quantile(bars, 1)).toBe(1);
    expect(quantile([], 0.5)).toBe(null);
  });
});

describe('rates', () => {
  const at = (ms: number, generated: number, prefill: number, decode: number) =>
    momentOf(
      of({
        'mmserve:generation_tokens_total': generated,
        'mmserve:prefill_seconds_total': prefill,
        'mmserve:decode_seconds_total': decode,
      }),
      ms,
    );

  it('are those of the last minute', () => {
    let moments = remember([], at(0, 0, 0, 0));
    moments = remember(moments, at(1000, 500, 0, 0));
    moments = remember(moments, at(61_000, 1100, 3, 9));
    expect(moments.length).toBe(2);
    expect(ratesOf(moments)).toEqual({ tokensPerSecond: 10, prefillShare: 0.25 });
  });

  it('are none before there is a second moment, and no share of no work', () => {
    expect(ratesOf([])).toEqual({ tokensPerSecond: 0, prefillShare: null });
    expect(ratesOf([at(0, 0, 0, 0)]).prefillShare).toBe(null);
    expect(ratesOf([at(0, 5, 1, 1), at(9, 5, 1, 1)]).prefillShare).toBe(null);
  });
});
