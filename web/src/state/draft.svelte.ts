/**
 * A message being written: its text, its pictures and how finely they are looked at, of a new turn or
 * of one being edited.
 */
import type { Detail } from '../protocol';
import type { Picture } from '../store';
import type { Tray } from './tray.svelte';

export interface Written {
  text: string;
  pictures: Picture[];
  detail: Detail;
  sentAt: number;
}

const PREFIX = 'mmserve.draft.';

export class Draft {
  sending = $state(false);
  detail = $state<Detail>('auto');
  private written = $state('');

  /** `key` names what is kept over a reload of the tab; null: it is not kept. */
  constructor(
    readonly tray: Tray,
    private readonly key: () => string | null = () => null,
  ) {
    const name = key();
    this.written = name === null ? '' : (sessionStorage.getItem(PREFIX + name) ?? '');
  }

  get text(): string {
    return this.written;
  }

  set text(text: string) {
    this.written = text;
    const name = this.key();
    if (name === null) return;
    if (text === '') sessionStorage.removeItem(PREFIX + name);
    else sessionStorage.setItem(PREFIX + name, text);
  }

  get empty(): boolean {
    return this.text.trim() === '' && this.tray.attachments.length === 0;
  }

  get sendable(): boolean {
    return !this.empty && !this.sending && !this.tray.failed;
  }

  /** Waits for the uploads and empties the draft; null, and nothing is lost, where one failed. */
  async take(): Promise<Written | null> {
    if (!this.sendable) return null;
    const { detail } = this;
    const text = this.text.trim();
    const sentAt = Date.now();
    this.sending = true;
    this.text = '';
    const pictures = await this.tray.take();
    this.sending = false;
    if (pictures !== null) return { text, pictures, detail, sentAt };
    this.text = text;
    return null;
  }
}
