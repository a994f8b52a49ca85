/**
 * The socket that tells of the pools: opened, opened again, closed while nobody looks.
 *
 * Owns the admin key on the wire and the waits between two tries. Knows nothing of what is told.
 */
import type { PagesMessage } from './picture';

export type FeedState =
  'connecting' | 'open' | 'retrying' | 'loading' | 'paused' | 'locked' | 'refused';

export interface Listener {
  state(state: FeedState): void;
  message(message: PagesMessage): void;
}

const RETRY_MS = 1000;
const AUTH_CLOSE = 1008;
const STATES: Partial<Record<number, FeedState>> = {
  401: 'locked',
  403: 'refused',
  503: 'loading',
};

export class Feed {
  private socket: WebSocket | null = null;
  private timer = 0;
  private wanted = false;

  /** `root`: the page's own folder. */
  constructor(
    private readonly root: URL,
    public key: string | null,
    private readonly listener: Listener,
  ) {}

  /** Harmless while it is open. */
  open(): void {
    this.wanted = true;
    if (this.socket !== null) return;
    clearTimeout(this.timer);
    this.listener.state('connecting');
    void this.connect();
  }

  /** Until `open`: nobody looks, and so the server need not either. */
  pause(): void {
    this.wanted = false;
    clearTimeout(this.timer);
    this.listener.state('paused');
    this.socket?.close();
  }

  /** Forgets an image's KV; false: it is not there, or an answer reads it. */
  async forget(key: string): Promise<boolean> {
    const url = new URL(`v1/kv/view/images/${key}`, this.root);
    return (await fetch(url, { method: 'DELETE', headers: this.headers })).ok;
  }

  private get headers(): HeadersInit {
    return this.key === null ? {} : { Authorization: `Bearer ${this.key}` };
  }

  /** A browser cannot read why a handshake was refused: it is asked for over HTTP before. */
  private async connect(): Promise<void> {
    const url = new URL('v1/kv/view', this.root);
    let status = 0;
    try {
      const probe = { method: 'HEAD', headers: this.headers, cache: 'no-store' } as const;
      status = (await fetch(url, probe)).status;
    } catch {
      /* the network is gone: tried again */
    }
    if (!this.wanted || this.socket !== null) return;
    if (status !== 200) return this.rest(STATES[status] ?? 'retrying');
    url.protocol = url.protocol === 'https:' ? 'wss:' : 'ws:';
    const protocols = this.key === null ? [] : ['realtime', `openai-insecure-api-key.${this.key}`];
    const socket = (this.socket = new WebSocket(url, protocols));
    socket.onopen = () => this.listener.state('open');
    socket.onmessage = ({ data }) => {
      const message = JSON.parse(String(data)) as { type: string };
      if (message.type === 'kv.pages') this.listener.message(message as PagesMessage);
    };
    socket.onclose = ({ code }) => {
      this.socket = null;
      if (this.wanted) this.rest(code === AUTH_CLOSE ? 'locked' : 'retrying');
    };
  }

  private rest(state: FeedState): void {
    this.listener.state(state);
    if (state === 'locked' || state === 'refused') return;
    this.timer = window.setTimeout(() => void this.connect(), RETRY_MS);
  }
}
