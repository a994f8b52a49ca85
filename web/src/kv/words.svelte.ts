/** The view's language as state, the same choice as the chat page's, and numbers said in it. */
import { Speech } from '../i18n/speech.svelte';
import { en } from './i18n/en';
import type { Dictionary } from './i18n/en';
import { zh } from './i18n/zh';

const UNITS = ['byte', 'kilobyte', 'megabyte', 'gigabyte', 'terabyte'] as const;

class Words extends Speech<Dictionary> {
  constructor() {
    super({ en, zh });
  }

  number(value: number): string {
    const maximumFractionDigits = Math.abs(value) < 10 ? 1 : 0;
    return new Intl.NumberFormat(this.tag, { maximumFractionDigits }).format(value);
  }

  /** Two figures, also of what is small. */
  short(value: number): string {
    return new Intl.NumberFormat(this.tag, { maximumSignificantDigits: 2 }).format(value);
  }

  percent(share: number): string {
    const options = { style: 'percent', maximumFractionDigits: 0 } as const;
    return new Intl.NumberFormat(this.tag, options).format(share);
  }

  seconds(value: number): string {
    return this.ms(1000 * value);
  }

  /** In powers of 1024. */
  bytes(value: number): string {
    let power = 0;
    while (value >= 1024 && power < UNITS.length - 1) {
      value /= 1024;
      power++;
    }
    const unit = UNITS[power]!;
    const options = {
      style: 'unit',
      unit,
      unitDisplay: 'short',
      maximumFractionDigits: 1,
    } as const;
    return new Intl.NumberFormat(this.tag, options).format(value);
  }
}

export const words = new Words();
