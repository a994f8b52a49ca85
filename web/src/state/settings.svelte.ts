/** The settings as state: kept in this browser, and the theme put on the page. */
import { DEFAULTS, readOptions } from '../options';
import type { Options, Theme } from '../options';

const OPTIONS = 'mmserve.options';
/** Also read by `theme.js`, before anything is drawn. */
const THEME = 'mmserve.theme';

export class Settings {
  options = $state.raw<Options>(readOptions(localStorage.getItem(OPTIONS)));
  theme = $state<Theme>((localStorage.getItem(THEME) as Theme | null) ?? 'system');

  set(change: Partial<Options>): void {
    this.options = { ...this.options, ...change };
    localStorage.setItem(OPTIONS, JSON.stringify(this.options));
  }

  reset(): void {
    this.set(DEFAULTS);
  }

  useTheme(theme: Theme): void {
    this.theme = theme;
    if (theme === 'system') {
      localStorage.removeItem(THEME);
      delete document.documentElement.dataset.theme;
    } else {
      localStorage.setItem(THEME, theme);
      document.documentElement.dataset.theme = theme;
    }
  }
}

export const settings = new Settings();
