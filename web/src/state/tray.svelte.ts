/**
 * The pictures attached to a message being written, in the order they will be sent.
 *
 * Owns preparing and uploading each as soon as it is attached; bytes that were sent before are not
 * sent again. Knows nothing of turns.
 */
import { Api, ApiFault } from '../api';
import { newId } from '../ids';
import { hashOf, prepare, UnreadablePicture } from '../pictures';
import type { PictureLimits } from '../pictures';
import type { ApiError } from '../protocol';
import type { Picture } from '../store';
import type { Album, View } from './album.svelte';
import { settings } from './settings.svelte';

/** Files below this are shown at once; of larger ones a small picture is made first. */
const SHOWN_BYTES = 2 * 1024 * 1024;

/** `progress` is the share of the bytes that were sent; `warm`: the server has read it ahead. */
export interface Attachment {
  id: string;
  name: string;
  url: string | null;
  state: 'uploading' | 'ready' | 'failed';
  progress: number;
  warm: boolean;
  error: ApiError | null;
}

interface Work {
  file: File | null;
  picture: Picture | null;
  done: Promise<void>;
  abort: AbortController;
}

export class Tray {
  attachments = $state.raw<Attachment[]>([]);
  private readonly work = new Map<string, Work>();

  constructor(
    private readonly api: Api,
    private readonly conversationId: string,
    private readonly album: Album,
    /** The server's, as soon as it has told them. */
    private readonly limits: () => Promise<PictureLimits>,
    private readonly changed: () => void,
  ) {}

  get failed(): boolean {
    return this.attachments.some(({ state }) => state === 'failed');
  }

  get ready(): boolean {
    return this.attachments.every(({ state }) => state === 'ready');
  }

  add(files: Iterable<File>): void {
    for (const file of files) {
      const id = newId();
      const url = file.size < SHOWN_BYTES ? URL.createObjectURL(file) : null;
      this.show({ id, name: file.name, url, state: 'uploading' });
      this.start(id, file);
    }
  }

  /** Attaches pictures of the album once more; their bytes stay where they are. */
  addKnown(pictures: readonly Picture[]): void {
    for (const picture of pictures) {
      const { id, name } = picture;
      const url = this.album.urls.get(id);
      if (this.work.has(id) || url === undefined) continue;
      const done = Promise.resolve();
      this.work.set(id, { file: null, picture, done, abort: new AbortController() });
      this.show({ id, name, url, state: 'ready' });
    }
    this.changed();
  }

  retry(id: string): void {
    const file = this.work.get(id)?.file;
    if (file) this.start(id, file);
  }

  remove(id: string): void {
    this.forget(id);
    this.changed();
  }

  /** Puts a picture at place `index` (from 0) among the others. */
  move(id: string, index: number): void {
    const moved = this.attachments.find((attachment) => attachment.id === id);
    if (moved === undefined) return;
    const others = this.attachments.filter((attachment) => attachment !== moved);
    this.attachments = others.toSpliced(Math.max(0, index), 0, moved);
    this.changed();
  }

  views(): View[] {
    return this.attachments.flatMap(({ url, name }) => (url === null ? [] : [{ url, name }]));
  }

  /** The prepared pictures in their order, uploaded or not, without waiting. */
  pictures(): Picture[] {
    return this.attachments.flatMap(({ id }) => this.work.get(id)?.picture ?? []);
  }

  /** Waits for every upload and empties the tray; null, and nothing is lost, when one failed. */
  async take(): Promise<Picture[] | null> {
    await Promise.all([...this.work.values()].map(({ done }) => done));
    if (!this.ready) return null;
    const pictures = this.pictures();
    this.clear();
    return pictures;
  }

  clear(): void {
    for (const { id } of this.attachments) this.forget(id);
  }

  /** The server has read these pictures ahead. */
  markWarm(ids: readonly string[]): void {
    for (const id of ids) this.mark(id, { warm: true });
  }

  private show(fresh: Pick<Attachment, 'id' | 'name' | 'url' | 'state'>): void {
    this.attachments = [...this.attachments, { ...fresh, progress: 0, warm: false, error: null }];
  }

  private forget(id: string): void {
    const gone = this.attachments.find((attachment) => attachment.id === id);
    if (gone?.url && this.work.get(id)?.file) URL.revokeObjectURL(gone.url);
    this.work.get(id)?.abort.abort();
    this.work.delete(id);
    this.attachments = this.attachments.filter((attachment) => attachment.id !== id);
  }

  private start(id: string, file: File): void {
    this.mark(id, { state: 'uploading', progress: 0, error: null });
    const work: Work = {
      file,
      picture: null,
      done: Promise.resolve(),
      abort: new AbortController(),
    };
    this.work.set(id, work);
    work.done = this.upload(id, file, work).catch((reason: unknown) => {
      this.mark(id, { state: 'failed', error: attachmentError(reason) });
    });
  }

  private async upload(id: string, file: File, work: Work): Promise<void> {
    const prepared = await prepare(file, await this.limits());
    const { preview } = prepared;
    const shown = this.attachments.find((attachment) => attachment.id === id);
    if (shown?.url === null) {
      this.mark(id, { url: URL.createObjectURL(preview ?? prepared.blob) });
    }
    const { conversationId } = this;
    const hash = await hashOf(prepared.blob);
    const known = hash === null ? undefined : await this.album.withHash(hash);
    const fileId =
      known?.fileId ??
      (await this.api.upload(prepared.blob, file.name, {
        signal: work.abort.signal,
        progress: (progress) => this.mark(id, { progress }),
      }));
    const shrunk = prepared.blob !== file && prepared.blob.size !== file.size;
    const original = shrunk && settings.options.keepOriginals ? file : null;
    const names = { id, conversationId, name: file.name, fileId, hash };
    work.picture = { ...names, ...prepared, original };
    this.mark(id, { state: 'ready' });
    this.changed();
  }

  private mark(id: string, change: Partial<Attachment>): void {
    this.attachments = this.attachments.map((attachment) =>
      attachment.id === id ? { ...attachment, ...change } : attachment,
    );
  }
}

/** The error a person can act on, whatever went wrong with a picture. */
export function attachmentError(reason: unknown): ApiError {
  if (reason instanceof UnreadablePicture) return { code: 'unreadable', message: '' };
  if (reason instanceof ApiFault) return reason.error;
  return { code: 'network', message: '' };
}
