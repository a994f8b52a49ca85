/**
 * What a person may set for all chats, and the request fields it becomes.
 *
 * Pure. A field that is not set is not sent, so that the server's own defaults hold.
 */
import type { CreateBody, SessionPolicy } from './protocol';

export type Theme = 'system' | 'light' | 'dark';

/** `truncate`: drop what does not fit; `session`: a window that is kept; `refuse`: say so. */
export type Growth = 'truncate' | 'session' | 'refuse';

export interface Options {
  model: string | null;
  instructions: string;
  temperature: number | null;
  topP: number | null;
  topK: number | null;
  minP: number | null;
  repetitionPenalty: number | null;
  maxTokens: number | null;
  seed: number | null;
  growth: Growth;
  window: number | null;
  images: 'all' | 'pinned';
  summary: boolean;
  keepOriginals: boolean;
}

export const DEFAULTS: Options = {
  model: null,
  instructions: '',
  temperature: null,
  topP: null,
  topK: null,
  minP: null,
  repetitionPenalty: null,
  maxTokens: null,
  seed: null,
  growth: 'truncate',
  window: null,
  images: 'all',
  summary: false,
  keepOriginals: false,
};

/** A field of numbers: what the server takes. */
export interface Range {
  min: number;
  max: number;
  step: number;
}

export const RANGES = {
  temperature: { min: 0, max: 2, step: 0.1 },
  topP: { min: 0, max: 1, step: 0.05 },
  topK: { min: 0, max: 1000, step: 1 },
  minP: { min: 0, max: 1, step: 0.05 },
  repetitionPenalty: { min: 0.5, max: 2, step: 0.05 },
  maxTokens: { min: 1, max: 1_000_000, step: 1 },
  seed: { min: 0, max: 2 ** 31 - 1, step: 1 },
} satisfies Record<string, Range>;

export type NumberOption = keyof typeof RANGES;

/** How freely a second answer is drawn where the person has set nothing: the first may be greedy. */
const ANOTHER = 0.7;

export type RequestOptions = Partial<Omit<CreateBody, 'model' | 'input'>>;

/** `variation`: how many answers to the same question there are already. */
export function requestOptions(options: Options, variation = 0): RequestOptions {
  const { instructions, growth } = options;
  const temperature = options.temperature ?? (variation > 0 ? ANOTHER : null);
  const seed = options.seed === null ? null : options.seed + variation;
  return {
    ...(instructions.trim() === '' ? {} : { instructions: instructions.trim() }),
    ...set('temperature', temperature),
    ...set('top_p', options.topP),
    ...set('top_k', options.topK),
    ...set('min_p', options.minP),
    ...set('repetition_penalty', options.repetitionPenalty),
    ...set('max_output_tokens', options.maxTokens),
    ...set('seed', seed),
    truncation: growth === 'truncate' ? 'auto' : 'disabled',
    session_policy: growth === 'session' ? policyOf(options) : null,
  };
}

function policyOf({ window, images, summary }: Options): SessionPolicy {
  return { ...(window === null ? {} : { window }), images, summary };
}

function set<Name extends string>(name: Name, value: number | null): Partial<Record<Name, number>> {
  return value === null ? {} : ({ [name]: value } as Record<Name, number>);
}

/** Stored options, field by field where they are of the right kind; numbers brought into range. */
export function readOptions(stored: string | null): Options {
  const found = parse(stored);
  const read = (name: keyof Options): unknown => {
    const value = found[name];
    if (name in RANGES) return inRange(name as NumberOption, value);
    const fits = typeof value === typeof DEFAULTS[name] || name === 'model' || name === 'window';
    return value === undefined || !fits ? DEFAULTS[name] : value;
  };
  const names = Object.keys(DEFAULTS) as (keyof Options)[];
  return Object.fromEntries(names.map((name) => [name, read(name)])) as unknown as Options;
}

/** The number as the server takes it, or null for none. */
export function inRange(name: NumberOption, value: unknown): number | null {
  if (typeof value !== 'number' || !Number.isFinite(value)) return null;
  const { min, max, step } = RANGES[name];
  const bounded = Math.min(max, Math.max(min, value));
  return Number.isInteger(step) ? Math.round(bounded) : bounded;
}

function parse(stored: string | null): Record<string, unknown> {
  try {
    const value: unknown = JSON.parse(stored ?? '{}');
    return typeof value === 'object' && value !== null ? (value as Record<string, unknown>) : {};
  } catch {
    return {};
  }
}
