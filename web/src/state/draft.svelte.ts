/** A message being written: its text and its pictures, of a new turn or of one being edited. */
import type { Picture } from '../store';
import type { Tray } from './tray.svelte';

export interface Written {
  text: string;
  pictures: Picture[];
  sentAt: number;
}

export class Draft {
  text = $state('');
  sending = $state(false);

  constructor(readonly tray: Tray) {}

  get empty(): boolean {
    return this.text.trim() === '' && this.tray.attachments.length === 0;
  }

  get sendable(): boolean {
    return !this.empty && !this.sending && !this.tray.failed;
  }

  /** Waits for the uploads and empties the draft; null, and nothing is lost, where one failed. */
  async take(): Promise<Written | null> {
    if (!this.sendable) return null;
    const text = this.text.trim();
    const sentAt = Date.now();
    this.sending = true;
    this.text = '';
    const pictures = await this.tray.take();
    this.sending = false;
    if (pictures !== null) return { text, pictures, sentAt };
    this.text = text;
    return null;
  }
}
