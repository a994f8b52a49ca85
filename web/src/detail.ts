/**
 * How finely pictures may be looked at: what a model offers. Pure.
 */
import type { Detail, ModelObject } from './protocol';

/** The details between which there is a difference; none where a model has no choice. */
export function detailsOf(model: ModelObject | null): Detail[] {
  const { auto, low, high } = model?.image_details ?? {};
  if (auto === undefined) return [];
  const coarser: Detail[] = low !== undefined && low < auto ? ['low'] : [];
  const finer = (high ?? auto) > auto || model?.image_crops !== undefined;
  const offered: Detail[] = finer ? [...coarser, 'high'] : coarser;
  return offered.length === 0 ? [] : ['auto', ...offered];
}

/** What somebody wrote, if it is a detail that can be asked for. */
export function detailIn(value: unknown): { detail?: Detail } {
  return value === 'low' || value === 'high' ? { detail: value } : {};
}
