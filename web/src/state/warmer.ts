/** Lets the server read pictures ahead while the question about them is still being written. */
import type { Call, CallBody, Transport } from '../transport';

const WARM_MS = 300;

/** What to read ahead, or null for nothing; `done` hears that it was read. */
export interface Warming {
  body: CallBody;
  done: () => void;
}

export class Warmer {
  private call: Call | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(
    private readonly transport: Transport,
    private readonly lane: string,
    private readonly next: () => Warming | null,
  ) {}

  /** After a moment without changes; what is being read for an older draft is given up. */
  soon(): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.begin(), WARM_MS);
  }

  cancel(): void {
    clearTimeout(this.timer);
  }

  discard(): void {
    clearTimeout(this.timer);
    if (this.call === null || this.call.phase === 'ended') return;
    this.transport.stop(this.call);
    this.transport.drop(this.call);
  }

  private begin(): void {
    if (this.call !== null && this.call.phase !== 'ended') this.transport.stop(this.call);
    const warming = this.next();
    if (warming === null) return;
    const body: CallBody = { ...warming.body, generate: false, store: false };
    this.call = this.transport.create(this.lane, body, {
      event: ({ type }) => {
        if (type === 'response.completed') warming.done();
      },
      fault: () => undefined,
    });
  }
}
