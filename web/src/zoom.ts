/**
 * How a picture lies under a window: scale and offset of its centre, in pixels. Pure.
 *
 * A picture at scale 1 fits the window; it cannot be pulled away from the middle so far that
 * nothing of it is seen.
 */
export interface Lie {
  scale: number;
  x: number;
  y: number;
}

export const FITTING: Lie = { scale: 1, x: 0, y: 0 };
export const MAX_SCALE = 16;

interface Size {
  width: number;
  height: number;
}

/** Zooms by `factor` so that the point (px, py), counted from the window's centre, stays. */
export function zoomed(lie: Lie, factor: number, px: number, py: number, fitted: Size): Lie {
  const scale = Math.min(MAX_SCALE, Math.max(1, lie.scale * factor));
  const real = scale / lie.scale;
  return bounded({ scale, x: px - (px - lie.x) * real, y: py - (py - lie.y) * real }, fitted);
}

export function moved(lie: Lie, dx: number, dy: number, fitted: Size): Lie {
  return bounded({ ...lie, x: lie.x + dx, y: lie.y + dy }, fitted);
}

/** `fitted`: the size at scale 1. */
function bounded({ scale, x, y }: Lie, { width, height }: Size): Lie {
  const most = (side: number): number => (side * (scale - 1)) / 2;
  return { scale, x: clamp(x, most(width)), y: clamp(y, most(height)) };
}

function clamp(value: number, most: number): number {
  return Math.min(most, Math.max(-most, value)) + 0;
}
