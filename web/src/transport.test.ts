/** The transport over a false socket and a false server: lanes, resuming, refusing, stopping. */
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { Api } from './api';
import type { ApiError, ModelObject, ResponseEvent } from './protocol';
import { Transport } from './transport';
import type { CallBody, LinkState } from './transport';

class FalseSocket {
  static all: FalseSocket[] = [];
  sent: Record<string, unknown>[] = [];
  onopen: () => void = () => undefined;
  onmessage: (message: { data: string }) => void = () => undefined;
  onclose: (close: { code: number }) => void = () => undefined;

  constructor(
    readonly url: string,
    readonly protocols: string[],
  ) {
    FalseSocket.all.push(this);
  }

  send(text: string): void {
    this.sent.push(JSON.parse(text) as Record<string, unknown>);
  }

  close(): void {
    this.onclose({ code: 1000 });
  }

  say(event: object): void {
    this.onmessage({ data: JSON.stringify(event) });
  }
}

class Ear {
  events: ResponseEvent[] = [];
  faults: ApiError[] = [];
  event(event: ResponseEvent): void {
    this.events.push(event);
  }
  fault(error: ApiError): void {
    this.faults.push(error);
  }
  get text(): string {
    return this.events.map((event) => ('delta' in event ? event.delta : '')).join('');
  }
}

const BODY: CallBody = { input: [], previous_response_id: null, store: true };
const TEXT = ['a', 'b', 'c', 'd'];

/** The events of one whole response: created, four deltas, completed. */
function wholeResponse(id: string): object[] {
  const response = { id, status: 'in_progress' };
  return [
    { type: 'response.created', sequence_number: 0, response },
    ...TEXT.map((delta, i) => ({
      type: 'response.output_text.delta',
      sequence_number: i + 1,
      delta,
    })),
    { type: 'response.completed', sequence_number: 5, response: { id, status: 'completed' } },
  ];
}

type Reply = () => Response;
let routes: Record<string, Reply>;
let asked: string[];
let states: LinkState[];
let transport: Transport;

function json(body: unknown, status = 200): Reply {
  return () => new Response(JSON.stringify(body), { status });
}

function lastSocket(): FalseSocket {
  const socket = FalseSocket.all.at(-1);
  if (socket === undefined) throw new Error('no socket was opened');
  return socket;
}

async function connect(): Promise<FalseSocket> {
  void transport.run();
  await vi.advanceTimersByTimeAsync(0);
  lastSocket().onopen();
  return lastSocket();
}

beforeEach(() => {
  vi.useFakeTimers();
  FalseSocket.all = [];
  asked = [];
  states = [];
  routes = {
    '/health': json({ status: 'ok' }),
    '/v1/models': json({ data: [{ id: 'tiny' }] }),
  };
  vi.stubGlobal('WebSocket', FalseSocket);
  vi.stubGlobal('fetch', (url: URL) => {
    asked.push(url.pathname + url.search);
    const reply = routes[url.pathname];
    return reply === undefined
      ? Promise.reject(new TypeError('no network'))
      : Promise.resolve(reply());
  });
  const watcher = {
    state: (state: LinkState) => void states.push(state),
    models: (models: ModelObject[]) => models[0] ?? null,
  };
  transport = new Transport(new Api(new URL('http://server/'), 'key-1'), watcher);
});

afterEach(() => {
  transport.close();
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

describe('connecting', () => {
  it('offers the key as a sub-protocol', async () => {
    const socket = await connect();
    expect(socket.url).toBe('ws://server/v1/responses');
    expect(socket.protocols).toEqual(['realtime', 'openai-insecure-api-key.key-1']);
    expect(states).toEqual(['connecting', 'open']);
  });

  it('asks for a key on 401 and goes on when nudged', async () => {
    routes['/v1/models'] = json({ error: { code: 'invalid_api_key', message: 'no' } }, 401);
    void transport.run();
    await vi.advanceTimersByTimeAsync(0);
    expect(states.at(-1)).toBe('locked');
    routes['/v1/models'] = json({ data: [{ id: 'tiny' }] });
    transport.nudge();
    await vi.advanceTimersByTimeAsync(0);
    expect(FalseSocket.all).toHaveLength(1);
  });

  it('waits while the model loads', async () => {
    routes['/health'] = json({ status: 'loading' }, 503);
    routes['/v1/models'] = json({ error: { code: 'model_loading', message: 'loading' } }, 503);
    void transport.run();
    await vi.advanceTimersByTimeAsync(0);
    expect(states.at(-1)).toBe('loading');
    routes['/health'] = json({ status: 'ok' });
    routes['/v1/models'] = json({ data: [{ id: 'tiny' }] });
    await vi.advanceTimersByTimeAsync(10_000);
    expect(FalseSocket.all).toHaveLength(1);
  });

  it('asks for a key when the socket is closed for policy', async () => {
    (await connect()).onclose({ code: 1008 });
    await vi.advanceTimersByTimeAsync(0);
    expect(states.at(-1)).toBe('locked');
  });
});

describe('a call', () => {
  it('waits for the socket and names model and lane', async () => {
    transport.create('lane', BODY, new Ear());
    const socket = await connect();
    expect(socket.sent).toEqual([
      { type: 'response.create', stream_id: 'lane', model: 'tiny', ...BODY },
    ]);
  });

  it('hears only its own lane, in order', async () => {
    const socket = await connect();
    const [one, two] = [new Ear(), new Ear()];
    transport.create('1', BODY, one);
    transport.create('2', BODY, two);
    const events = wholeResponse('resp_1').map((event) => ({ ...event, stream_id: '1' }));
    const others = wholeResponse('resp_2').map((event) => ({ ...event, stream_id: '2' }));
    events.forEach((event, index) => {
      socket.say(event);
      if (index < 3) socket.say(others[index] ?? {});
    });
    expect(one.text).toBe('abcd');
    expect(two.text).toBe('ab');
  });

  it('queued second in a lane hears nothing of the first', async () => {
    const socket = await connect();
    const [one, two] = [new Ear(), new Ear()];
    transport.create('1', BODY, one);
    transport.create('1', BODY, two);
    for (const id of ['resp_1', 'resp_2']) {
      for (const event of wholeResponse(id)) socket.say({ ...event, stream_id: '1' });
    }
    expect([one.events.length, two.events.length]).toEqual([6, 6]);
    expect(two.events[0]).toMatchObject({ response: { id: 'resp_2' } });
  });

  it('that is refused gets the error while the one before it goes on', async () => {
    const socket = await connect();
    const [one, two] = [new Ear(), new Ear()];
    transport.create('1', BODY, one);
    transport.create('1', BODY, two);
    socket.say({ ...wholeResponse('resp_1')[0], stream_id: '1' });
    const error = { code: 'file_not_found', message: 'gone' };
    socket.say({ type: 'error', stream_id: '1', error });
    expect(two.faults).toEqual([error]);
    expect(one.faults).toEqual([]);
  });
});

describe('a lost socket', () => {
  function tailFrom(id: string): Reply {
    return () => {
      const after = Number(/starting_after=(\d+)/.exec(asked.at(-1) ?? '')?.[1]);
      const missed = wholeResponse(id).slice(after + 1);
      return new Response(missed.map((event) => `data: ${JSON.stringify(event)}\n\n`).join(''));
    };
  }

  it.each([0, 1, 2, 3, 4])('after event %i costs no text and doubles none', async (seen) => {
    routes['/v1/responses/resp_1'] = tailFrom('resp_1');
    const socket = await connect();
    const ear = new Ear();
    transport.create('1', BODY, ear);
    for (const event of wholeResponse('resp_1').slice(0, seen + 1)) {
      socket.say({ ...event, stream_id: '1' });
    }
    socket.onclose({ code: 1006 });
    await vi.advanceTimersByTimeAsync(10);
    expect(asked).toContain(`/v1/responses/resp_1?stream=true&starting_after=${seen}`);
    expect(ear.text).toBe('abcd');
    expect(ear.events).toHaveLength(6);
  });

  it('sends again what had not begun', async () => {
    const socket = await connect();
    transport.create('1', BODY, new Ear());
    expect(socket.sent).toHaveLength(1);
    socket.onclose({ code: 1006 });
    await vi.advanceTimersByTimeAsync(10_000);
    lastSocket().onopen();
    expect(lastSocket()).not.toBe(socket);
    expect(lastSocket().sent).toHaveLength(1);
  });

  it('is tried again until the network is back', async () => {
    const socket = await connect();
    const ear = new Ear();
    transport.create('1', BODY, ear);
    socket.say({ ...wholeResponse('resp_1')[0], stream_id: '1' });
    socket.onclose({ code: 1006 });
    await vi.advanceTimersByTimeAsync(3000);
    expect(ear.text).toBe('');
    routes['/v1/responses/resp_1'] = tailFrom('resp_1');
    await vi.advanceTimersByTimeAsync(8000);
    expect(ear.text).toBe('abcd');
  });

  it('ends the call when the response is gone', async () => {
    const error = { code: 'response_not_found', message: 'gone' };
    routes['/v1/responses/resp_9'] = json({ error }, 404);
    const ear = new Ear();
    transport.follow('resp_9', 3, ear);
    await vi.advanceTimersByTimeAsync(10);
    expect(ear.faults).toEqual([error]);
  });

  it('takes the response whole when its log is gone', async () => {
    const output = [{ type: 'message', content: [{ type: 'output_text', text: 'abcd' }] }];
    const whole = json({ id: 'resp_9', status: 'completed', output });
    const refusal = json({ error: { code: 'invalid_value', message: 'evicted' } }, 400);
    routes['/v1/responses/resp_9'] = () =>
      (asked.at(-1) ?? '').includes('stream') ? refusal() : whole();
    const ear = new Ear();
    transport.follow('resp_9', 3, ear);
    await vi.advanceTimersByTimeAsync(10);
    expect(ear.events).toMatchObject([{ type: 'response.completed', response: { output } }]);
  });
});

describe('stopping', () => {
  it('cancels by response id and still hears the end', async () => {
    const socket = await connect();
    const ear = new Ear();
    const call = transport.create('1', BODY, ear);
    socket.say({ ...wholeResponse('resp_1')[0], stream_id: '1' });
    expect(transport.stop(call)).toBe(true);
    expect(socket.sent.at(-1)).toEqual({ type: 'response.cancel', response_id: 'resp_1' });
    const response = { id: 'resp_1', status: 'cancelled' };
    socket.say({ type: 'response.incomplete', sequence_number: 1, response, stream_id: '1' });
    expect(ear.events.at(-1)).toMatchObject({ type: 'response.incomplete' });
  });

  it('before the response has an id cancels it as soon as it has one', async () => {
    const socket = await connect();
    const call = transport.create('1', BODY, new Ear());
    transport.stop(call);
    expect(socket.sent).toHaveLength(1);
    socket.say({ ...wholeResponse('resp_1')[0], stream_id: '1' });
    expect(socket.sent.at(-1)).toMatchObject({ type: 'response.cancel' });
  });

  it('a call that was never sent leaves no trace', async () => {
    const call = transport.create('1', BODY, new Ear());
    expect(transport.stop(call)).toBe(false);
    expect((await connect()).sent).toEqual([]);
  });
});
