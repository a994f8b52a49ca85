/** A colour for each session or image: far apart for those that come one after the other. Pure. */

/** Degrees; neighbours in a golden-angle walk never look alike. */
const STEP = 137.508;

/** Names in the order in which they are first seen; a name keeps its place. */
export class Palette {
  private readonly places = new Map<string, number>();

  hue(name: string): number {
    let place = this.places.get(name);
    if (place === undefined) this.places.set(name, (place = this.places.size));
    return (place * STEP + 172) % 360;
  }
}

/** `active`: read by a running answer, else paler. */
export function shade(hue: number, active: boolean, dark: boolean): string {
  const lightness = dark ? (active ? 64 : 38) : active ? 46 : 74;
  const strength = active ? 68 : 42;
  return `hsl(${hue.toFixed(1)} ${strength}% ${lightness}%)`;
}
