/**
 * The pictures attached to the message being written.
 *
 * Owns preparing and uploading each as soon as it is attached. Knows nothing of turns.
 */
import { Api, ApiFault } from '../api';
import { newId } from '../ids';
import { prepare, UnreadablePicture } from '../pictures';
import type { PictureLimits } from '../pictures';
import type { ApiError } from '../protocol';
import type { Picture } from '../store';

export interface Attachment {
  id: string;
  name: string;
  url: string;
  state: 'uploading' | 'ready' | 'failed';
  error: ApiError | null;
}

interface Work {
  file: File;
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
    private readonly limits: () => PictureLimits,
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
      const url = URL.createObjectURL(file);
      const fresh: Attachment = { id, name: file.name, url, state: 'uploading', error: null };
      this.attachments = [...this.attachments, fresh];
      this.start(id, file);
    }
  }

  retry(id: string): void {
    const work = this.work.get(id);
    if (work !== undefined) this.start(id, work.file);
  }

  remove(id: string): void {
    this.forget(id);
    this.changed();
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
    for (const { id } of this.attachments) this.forget(id);
    return pictures;
  }

  private forget(id: string): void {
    const gone = this.attachments.find((attachment) => attachment.id === id);
    if (gone !== undefined) URL.revokeObjectURL(gone.url);
    this.work.get(id)?.abort.abort();
    this.work.delete(id);
    this.attachments = this.attachments.filter((attachment) => attachment.id !== id);
  }

  private start(id: string, file: File): void {
    this.mark(id, { state: 'uploading', error: null });
    const work: Work = {
      file,
      picture: null,
      done: Promise.resolve(),
      abort: new AbortController(),
    };
    this.work.set(id, work);
    work.done = this.upload(id, work).catch((reason: unknown) => {
      this.mark(id, { state: 'failed', error: attachmentError(reason) });
    });
  }

  private async upload(id: string, work: Work): Promise<void> {
    const { file, abort } = work;
    const prepared = await prepare(file, this.limits());
    const fileId = await this.api.upload(prepared.blob, file.name, abort.signal);
    const conversationId = this.conversationId;
    work.picture = { id, conversationId, name: file.name, ...prepared, fileId };
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
