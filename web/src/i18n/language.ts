/** Which language the page speaks, and numbers and errors said in it. Pure. */
import type { ApiError } from '../protocol';
import { en } from './en';
import type { Dictionary, ErrorKey } from './en';
import { zh } from './zh';

export type Language = 'en' | 'zh';

export const DICTIONARIES: Record<Language, Dictionary> = { en, zh };
export const LANGUAGE_TAGS: Record<Language, string> = { en: 'en', zh: 'zh-CN' };
export const LANGUAGE_NAMES: Record<Language, string> = { en: 'English', zh: '中文' };

/** The stored choice if there is one, else the browser's first language we have. */
export function chooseLanguage(stored: string | null, preferred: readonly string[]): Language {
  if (stored === 'en' || stored === 'zh') return stored;
  const first = preferred.find((tag) => /^(en|zh)\b/i.test(tag));
  return first?.toLowerCase().startsWith('zh') ? 'zh' : 'en';
}

/** A known code in the page's words, else the server's own sentence. */
export function errorSentence(text: Dictionary, error: ApiError): string {
  if (error.code !== null && Object.hasOwn(text.errors, error.code))
    return text.errors[error.code as ErrorKey];
  return error.message === '' ? text.errors.unknown : error.message;
}

export function formatMs(ms: number, language: Language): string {
  const seconds = ms >= 1000;
  return new Intl.NumberFormat(LANGUAGE_TAGS[language], {
    style: 'unit',
    unit: seconds ? 'second' : 'millisecond',
    unitDisplay: 'short',
    maximumFractionDigits: seconds ? 1 : 0,
  }).format(seconds ? ms / 1000 : ms);
}

export function formatNumber(value: number, language: Language): string {
  const maximumFractionDigits = value < 10 ? 1 : 0;
  return new Intl.NumberFormat(LANGUAGE_TAGS[language], { maximumFractionDigits }).format(value);
}

export function formatPercent(share: number, language: Language): string {
  return new Intl.NumberFormat(LANGUAGE_TAGS[language], { style: 'percent' }).format(share);
}

/** Bytes in powers of 1024, as people know them. */
export function formatBytes(bytes: number, language: Language): string {
  const power = bytes < 1024 ? 0 : Math.min(3, Math.floor(Math.log2(bytes) / 10));
  const unit = ['B', 'KiB', 'MiB', 'GiB'][power] ?? 'B';
  return `${formatNumber(bytes / 1024 ** power, language)} ${unit}`;
}
