/** The language that a page speaks as state, and switching it; both pages have the same choice. */
import { chooseLanguage, formatMs, LANGUAGE_TAGS } from './language';
import type { Language } from './language';

const KEY = 'mmserve.language';

export class Speech<Dictionary> {
  language = $state<Language>(chooseLanguage(localStorage.getItem(KEY), navigator.languages));
  readonly tag = $derived(LANGUAGE_TAGS[this.language]);
  readonly #dictionaries: Record<Language, Dictionary>;

  constructor(dictionaries: Record<Language, Dictionary>) {
    this.#dictionaries = dictionaries;
  }

  get text(): Dictionary {
    return this.#dictionaries[this.language];
  }

  use(language: Language): void {
    this.language = language;
    localStorage.setItem(KEY, language);
  }

  ms(value: number): string {
    return formatMs(value, this.language);
  }
}
