/** The page's language as state: the dictionary in use, and switching it. */
import {
  chooseLanguage,
  DICTIONARIES,
  errorSentence,
  formatBytes,
  formatMs,
  formatNumber,
  formatPercent,
  LANGUAGE_TAGS,
} from '../i18n/language';
import type { Language } from '../i18n/language';
import type { ApiError } from '../protocol';

const KEY = 'mmserve.language';

export class Words {
  language = $state<Language>(chooseLanguage(localStorage.getItem(KEY), navigator.languages));
  readonly text = $derived(DICTIONARIES[this.language]);
  readonly tag = $derived(LANGUAGE_TAGS[this.language]);

  use(language: Language): void {
    this.language = language;
    localStorage.setItem(KEY, language);
  }

  error(error: ApiError): string {
    return errorSentence(this.text, error);
  }

  ms(value: number): string {
    return formatMs(value, this.language);
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
