/**
 * One socket for all conversations, and the promise that a listener sees every event once.
 *
 * Owns connecting, lanes and resuming: a call that had begun when the socket was lost goes on over
 * server-sent events from its last number; one that had not begun is sent again. Knows nothing of
 * turns, storage or the page.
 */
import { Api, ApiFault } from './api';
import { errorOf, isTerminal } from './protocol';
import type {
  ApiError,
  CreateBody,
  ErrorEvent,
  LifeEvent,
  ModelObject,
  ResponseEvent,
} from './protocol';
import type { ServerEvent } from './protocol';
import { readEvents } from './sse';
import { backoff, Sleepers } from './waiting';

/** `loading`: the server is there, its model is not yet. `locked`: it wants a key. */
export type LinkState = 'connecting' | 'open' | 'retrying' | 'loading' | 'locked';

/** Hears one response: its events in order, each once, or one fault that ends it. */
export interface Listener {
  event(event: ResponseEvent): void;
  fault(error: ApiError): void;
}

export type CallBody = Omit<CreateBody, 'model'>;

/** One request on its way: `queued` here, `sent` unanswered, `live` with an id, `ended`. */
export interface Call {
  readonly lane: string;
  readonly body: CallBody | null;
  readonly listener: Listener;
  phase: 'queued' | 'sent' | 'live' | 'ended';
  responseId: string | null;
  sequence: number;
  stopping: boolean;
  readonly abort: AbortController;
}

/** `models` hears what is served and says which of it to use. */
export interface Watcher {
  state(state: LinkState): void;
  models(models: ModelObject[]): ModelObject | null;
}

const AUTH_CLOSE = 1008;

export class Transport {
  private readonly lanes = new Map<string, Call[]>();
  private readonly sleepers = new Sleepers();
  private socket: WebSocket | null = null;
  private model: ModelObject | null = null;
  private closed = false;

  constructor(
    private readonly api: Api,
    private readonly watcher: Watcher,
  ) {}

  /** Connects and stays connected until `close`. */
  async run(): Promise<void> {
    this.watcher.state('connecting');
    for (let attempt = 0; !this.closed; attempt++) {
      const state = await this.connect();
      if (this.closed) return;
      if (state === 'open') attempt = 0;
      this.watcher.state(state === 'open' ? 'retrying' : state);
      await this.sleepers.sleep(backoff(attempt, Math.random()));
    }
  }

  close(): void {
    this.closed = true;
    this.socket?.close();
    this.sleepers.wake();
  }

  /** Tries again at once: the network came back, the tab was shown, a key was entered. */
  nudge(): void {
    this.sleepers.wake();
  }

  /** What is asked from now on goes to this model. */
  use(model: ModelObject): void {
    this.model = model;
  }

  create(lane: string, body: CallBody, listener: Listener): Call {
    const call = newCall(lane, body, listener);
    this.lanes.set(lane, [...(this.lanes.get(lane) ?? []), call]);
    this.send(call);
    return call;
  }

  /** Goes on listening to a response that began earlier, after event number `sequence`. */
  follow(responseId: string, sequence: number, listener: Listener): Call {
    const call = newCall('', null, listener);
    Object.assign(call, { phase: 'live', responseId, sequence });
    void this.tail(call);
    return call;
  }

  /** Asks the server to end a call; its last event still comes. False: it never began. */
  stop(call: Call): boolean {
    if (call.phase === 'queued') {
      this.end(call);
      return false;
    }
    call.stopping = true;
    if (call.phase === 'live') this.sendCancel(call);
    return call.phase !== 'ended';
  }

  /** Hears nothing more of a call. */
  drop(call: Call): void {
    this.end(call);
  }

  /** Resolves when the connection has ended, with what the page should show next. */
  private async connect(): Promise<LinkState> {
    try {
      const health = await this.api.health();
      if (health !== 'ok') return health === 'loading' ? 'loading' : 'retrying';
      this.model = this.watcher.models(await this.api.models());
      if (this.model === null) return 'retrying';
    } catch (reason) {
      return reason instanceof ApiFault && reason.status === 401 ? 'locked' : 'retrying';
    }
    return this.hold();
  }

  /** Opens the socket; resolves when it is closed: `open` says that it had been open. */
  private hold(): Promise<LinkState> {
    return new Promise((resolve) => {
      let opened = false;
      const socket = new WebSocket(this.api.socketUrl, this.api.socketProtocols);
      socket.onopen = () => {
        opened = true;
        this.socket = socket;
        this.watcher.state('open');
        for (const call of [...this.lanes.values()].flat()) this.send(call);
      };
      socket.onmessage = ({ data }) => this.dispatch(JSON.parse(String(data)) as ServerEvent);
      socket.onclose = ({ code }) => {
        this.socket = null;
        this.recover();
        resolve(code === AUTH_CLOSE ? 'locked' : opened ? 'open' : 'retrying');
      };
    });
  }

  private send(call: Call): void {
    if (call.phase !== 'queued' || this.socket === null || this.model === null) return;
    call.phase = 'sent';
    const frame = {
      type: 'response.create',
      stream_id: call.lane,
      model: this.model.id,
      ...call.body,
    };
    this.socket.send(JSON.stringify(frame));
  }

  private sendCancel(call: Call): void {
    const id = call.responseId;
    if (id === null) return;
    if (this.socket === null) void this.api.cancel(id).catch(() => undefined);
    else this.socket.send(JSON.stringify({ type: 'response.cancel', response_id: id }));
  }

  /** A lane is first in, first out: what comes belongs to its first call of the right phase. */
  private dispatch(event: ServerEvent): void {
    const calls = this.lanes.get(event.stream_id ?? '') ?? [];
    const begins = event.type === 'response.created' || event.type === 'error';
    const call = calls.find(({ phase }) => phase === (begins ? 'sent' : 'live'));
    if (call === undefined) return;
    if (event.type === 'error') this.refuse(call, event);
    else this.deliver(call, event);
  }

  private refuse(call: Call, event: ErrorEvent): void {
    this.end(call);
    call.listener.fault(errorOf(event, ''));
  }

  private deliver(call: Call, event: ResponseEvent): void {
    if (call.phase === 'ended' || event.sequence_number <= call.sequence) return;
    call.sequence = event.sequence_number;
    if (event.type === 'response.created') {
      call.phase = 'live';
      call.responseId = event.response.id;
      if (call.stopping) this.sendCancel(call);
    }
    if (isTerminal(event)) this.end(call);
    call.listener.event(event);
  }

  private end(call: Call): void {
    call.phase = 'ended';
    call.abort.abort();
    this.leave(call);
  }

  private leave(call: Call): void {
    const rest = (this.lanes.get(call.lane) ?? []).filter((other) => other !== call);
    if (rest.length > 0) this.lanes.set(call.lane, rest);
    else this.lanes.delete(call.lane);
  }

  private recover(): void {
    for (const call of [...this.lanes.values()].flat()) {
      if (call.phase === 'sent') call.phase = 'queued';
      if (call.phase !== 'live') continue;
      this.leave(call);
      void this.tail(call);
    }
  }

  private async tail(call: Call): Promise<void> {
    const { abort, responseId } = call;
    for (let attempt = 0; call.phase === 'live' && responseId !== null; attempt++) {
      try {
        const body = await this.api.tail(responseId, call.sequence, abort.signal);
        for await (const event of readEvents(body) as AsyncGenerator<ServerEvent>) {
          attempt = 0;
          if (event.type === 'error') this.refuse(call, event);
          else this.deliver(call, event);
        }
      } catch (reason) {
        if (reason instanceof ApiFault) await this.tailRefused(call, responseId, reason);
      }
      if (call.phase === 'live') await this.sleepers.sleep(backoff(attempt, Math.random()));
    }
  }

  /** The event log may be gone while the response is still stored: then take it whole. */
  private async tailRefused(call: Call, id: string, fault: ApiFault): Promise<void> {
    if (fault.status === 404) return this.refuse(call, { type: 'error', error: fault.error });
    if (fault.status === 401) this.watcher.state('locked');
    if (fault.status !== 400) return;
    const response = await this.api.retrieve(id);
    const type = ENDED[response.status];
    if (type === undefined) return;
    this.deliver(call, { type, response, sequence_number: Number.MAX_SAFE_INTEGER });
  }
}

const ENDED: Partial<Record<string, LifeEvent['type']>> = {
  completed: 'response.completed',
  incomplete: 'response.incomplete',
  cancelled: 'response.incomplete',
  failed: 'response.failed',
};

function newCall(lane: string, body: CallBody | null, listener: Listener): Call {
  const abort = new AbortController();
  return {
    lane,
    body,
    listener,
    phase: 'queued',
    responseId: null,
    sequence: -1,
    stopping: false,
    abort,
  };
}
