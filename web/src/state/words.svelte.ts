/** The page's language as state: the dictionary in use, and switching it. */
import {
  DICTIONARIES,
  errorSentence,
  formatBytes,
  formatNumber,
  formatPercent,
} from '../i18n/language';
import type { Dictionary } from '../i18n/en';
import { Speech } from '../i18n/speech.svelte';
import type { ApiError } from '../protocol';

export class Words extends Speech<Dictionary> {
  constructor() {
    super(DICTIONARIES);
  }

  error(error: ApiError): string {
    return errorSentence(this.text, error);
  }

  percent(share: number): string {
    return formatPercent(share, this.language);
  }

  bytes(value: number): string {
    return formatBytes(value, this.language);
  }

  number(value: number): string {
    return formatNumber(value, this.language);
  }
}

export const words = new Words();
