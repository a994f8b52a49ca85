/**
 * The pictures of the conversation that is shown, as the server keeps them.
 *
 * Owns asking for the list and changing what is done with a picture. What is changed holds for what
 * is asked next on this branch.
 */
import type { Api } from '../api';
import { ApiFault } from '../api';
import type { ApiError, HeldImage, ImageAction } from '../protocol';
import type { Picture } from '../store';
import type { Thread } from './thread.svelte';

/** An image of the server's list with our picture of it, where we have one. */
export interface Shelved {
  held: HeldImage;
  picture: Picture | undefined;
}

export class Shelf {
  shelved = $state.raw<Shelved[] | null>(null);
  error = $state.raw<ApiError | null>(null);
  busy = $state<string | null>(null);

  constructor(
    private readonly api: Api,
    private readonly thread: Thread,
  ) {}

  /** The response that what is asked next goes on from. */
  get responseId(): string | null {
    const last = this.thread.path.findLast(({ answer }) => answer.responseId !== null);
    return last?.answer.responseId ?? null;
  }

  async refresh(): Promise<void> {
    const id = this.responseId;
    try {
      this.take(id === null ? [] : await this.api.images(id));
      this.error = null;
    } catch (reason) {
      this.fail(reason);
    }
  }

  async change(held: HeldImage, action: ImageAction): Promise<void> {
    const id = this.responseId;
    if (id === null || this.busy !== null) return;
    this.busy = held.sha256;
    this.error = null;
    try {
      await this.api.changeImage(id, held.sha256, action);
      this.take(await this.api.images(id));
    } catch (reason) {
      this.fail(reason);
    } finally {
      this.busy = null;
    }
  }

  private take(images: HeldImage[]): void {
    const { album } = this.thread;
    this.shelved = images.map((held) => ({
      held,
      picture: album.withFile(held.file_id) ?? album.ofHash(held.sha256),
    }));
  }

  private fail(reason: unknown): void {
    this.shelved ??= [];
    this.error = reason instanceof ApiFault ? reason.error : { code: 'network', message: '' };
  }
}
