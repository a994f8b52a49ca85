/**
 * The HTTP half of the protocol: models, files, a stored response.
 *
 * Owns the key and how it is presented. Every refusal is an `ApiFault` with the server's code; a
 * lost network stays the `TypeError` of `fetch`.
 */
import type { ChatBody } from './continuing';
import { errorOf } from './protocol';
import type {
  ApiError,
  FileObject,
  HeldImage,
  ImageAction,
  ModelObject,
  ResponseObject,
  StoredItem,
} from './protocol';

/** A server that takes longer than this to name its model counts as not there. */
const PROBE_MS = 15_000;

export class ApiFault extends Error {
  constructor(
    readonly status: number,
    readonly error: ApiError,
  ) {
    super(error.message);
  }
}

export interface UploadOptions {
  signal?: AbortSignal;
  progress?: (share: number) => void;
}

export class Api {
  /** `root` is the page's own folder, so the page works under any path prefix. */
  constructor(
    private readonly root: URL,
    public key: string | null,
  ) {}

  get socketUrl(): string {
    const url = new URL('v1/responses', this.root);
    url.protocol = url.protocol === 'https:' ? 'wss:' : 'ws:';
    return url.href;
  }

  /** A browser cannot set headers on a socket: the key travels as a sub-protocol. */
  get socketProtocols(): string[] {
    return this.key === null ? [] : ['realtime', `openai-insecure-api-key.${this.key}`];
  }

  /** Whether generations can start: `ok`, `loading`, or why not. */
  async health(): Promise<string> {
    const signal = AbortSignal.timeout(PROBE_MS);
    const response = await fetch(new URL('health', this.root), { signal, cache: 'no-store' });
    return ((await response.json()) as { status: string }).status;
  }

  async models(): Promise<ModelObject[]> {
    const response = await this.call('v1/models', { signal: AbortSignal.timeout(PROBE_MS) });
    return ((await response.json()) as { data: ModelObject[] }).data;
  }

  /** `progress` hears the share of the bytes sent. Throws `ApiFault`s; `TypeError`: no network. */
  upload(blob: Blob, name: string, { signal, progress }: UploadOptions = {}): Promise<string> {
    const form = new FormData();
    form.append('purpose', 'vision');
    form.append('file', blob, name);
    // `fetch` does not tell how much of a body has gone.
    const request = new XMLHttpRequest();
    return new Promise<string>((resolve, reject) => {
      request.open('POST', new URL('v1/files', this.root));
      if (this.key !== null) request.setRequestHeader('Authorization', `Bearer ${this.key}`);
      request.responseType = 'json';
      request.upload.onprogress = ({ loaded, total }) => progress?.(loaded / total);
      request.onload = () => {
        const { status, response } = request;
        if (status === 200) resolve((response as FileObject).id);
        else reject(new ApiFault(status, errorOf(response, `HTTP ${status}`)));
      };
      request.onerror = () => reject(new TypeError('network'));
      request.onabort = () => reject(new DOMException('', 'AbortError'));
      signal?.addEventListener('abort', () => request.abort());
      request.send(form);
    });
  }

  async retrieve(id: string): Promise<ResponseObject> {
    const response = await this.call(`v1/responses/${id}`);
    return (await response.json()) as ResponseObject;
  }

  /** What the request of a response added, pictures with their bytes. */
  async inputItems(id: string): Promise<StoredItem[]> {
    const query = 'order=asc&limit=100&include[]=message.input_image.image_url';
    const response = await this.call(`v1/responses/${id}/input_items?${query}`);
    return ((await response.json()) as { data: StoredItem[] }).data;
  }

  /** The images of the conversation that a response ends, oldest first. */
  async images(id: string): Promise<HeldImage[]> {
    const response = await this.call(`v1/responses/${id}/images`);
    return ((await response.json()) as { data: HeldImage[] }).data;
  }

  /** `image` is its SHA-256. */
  async changeImage(id: string, image: string, action: ImageAction): Promise<void> {
    await this.call(`v1/responses/${id}/images/${image}/${action}`, { method: 'POST' });
  }

  /** The events of a response after number `after`: what was missed, then live. */
  async tail(id: string, after: number, signal: AbortSignal): Promise<ReadableStream<Uint8Array>> {
    const from = after < 0 ? '' : `&starting_after=${after}`;
    const response = await this.call(`v1/responses/${id}?stream=true${from}`, { signal });
    return response.body ?? new ReadableStream();
  }

  /** The chunks of a chat completion. */
  async chat(body: ChatBody, signal: AbortSignal): Promise<ReadableStream<Uint8Array>> {
    const response = await this.call('v1/chat/completions', {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: JSON.stringify(body),
      signal,
    });
    return response.body ?? new ReadableStream();
  }

  async cancel(id: string): Promise<void> {
    await this.call(`v1/responses/${id}/cancel`, { method: 'POST' });
  }

  private async call(path: string, init: RequestInit = {}): Promise<Response> {
    const headers = new Headers(init.headers);
    if (this.key !== null) headers.set('Authorization', `Bearer ${this.key}`);
    const response = await fetch(new URL(path, this.root), { ...init, headers, cache: 'no-store' });
    if (response.ok) return response;
    const body: unknown = await response.json().catch(() => null);
    throw new ApiFault(response.status, errorOf(body, `HTTP ${response.status}`));
  }
}
