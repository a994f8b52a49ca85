/** The socket's life: asked for first, opened with the key, tried again, closed while nobody looks. */
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { Feed } from './feed';
import type { FeedState } from './feed';

class FakeSocket {
  static made: FakeSocket[] = [];
  onopen: (() => void) | null = null;
  onmessage: ((event: { data: string }) => void) | null = null;
  onclose: ((event: { code: number }) => void) | null = null;
  closed = false;

  constructor(
    readonly url: URL,
    readonly protocols: string[],
  ) {
    FakeSocket.made.push(this);
  }

  close(): void {
    this.closed = true;
    this.onclose?.({ code: 1005 });
  }
}

const ROOT = new URL('https://host.example/under/');
let answers: (number | 'lost')[] = [];
let asked: { url: string; init: RequestInit }[] = [];
let states: FeedState[] = [];
let told: number[] = [];

function feedWith(key: string | null): Feed {
  return new Feed(ROOT, key, {
    state: (state) => states.push(state),
    message: ({ version }) => told.push(version),
  });
}

/** Until what waits for `fetch` has gone on. */
const settle = (): Promise<void> => vi.advanceTimersByTimeAsync(0).then(() => undefined);

beforeEach(() => {
  vi.useFakeTimers();
  [answers, asked, states, told, FakeSocket.made] = [[], [], [], [], []];
  vi.stubGlobal('WebSocket', FakeSocket);
  vi.stubGlobal('fetch', (url: URL, init: RequestInit) => {
    asked.push({ url: url.href, init });
    const answer = answers.shift() ?? 200;
    if (answer === 'lost') return Promise.reject(new TypeError('lost'));
    return Promise.resolve({ status: answer, ok: answer === 200 });
  });
});

afterEach(() => {
  vi.unstubAllGlobals();
  vi.useRealTimers();
});

describe('the feed', () => {
  it('opens a socket beside the page, with the key as a sub-protocol', async () => {
    feedWith('secret').open();
    await settle();
    expect(asked[0]!.url).toBe('https://host.example/under/v1/kv/view');
    expect(asked[0]!.init.headers).toEqual({ Authorization: 'Bearer secret' });
    const [socket] = FakeSocket.made;
    expect(socket!.url.href).toBe('wss://host.example/under/v1/kv/view');
    expect(socket!.protocols).toEqual(['realtime', 'openai-insecure-api-key.secret']);
    socket!.onopen?.();
    socket!.onmessage?.({ data: JSON.stringify({ type: 'kv.pages', version: 3 }) });
    socket!.onmessage?.({ data: JSON.stringify({ type: 'error' }) });
    expect([states, told]).toEqual([['connecting', 'open'], [3]]);
  });

  it.each([
    [401, 'locked'],
    [403, 'refused'],
  ] as const)('asks nobody again who answers %i', async (status, state) => {
    answers = [status];
    feedWith(null).open();
    await vi.advanceTimersByTimeAsync(60_000);
    expect([states, asked.length, FakeSocket.made.length]).toEqual([['connecting', state], 1, 0]);
  });

  it('tries again while the model loads or the network is gone', async () => {
    answers = [503, 'lost', 200];
    feedWith(null).open();
    await vi.advanceTimersByTimeAsync(5000);
    expect(states).toEqual(['connecting', 'loading', 'retrying']);
    expect(FakeSocket.made.length).toBe(1);
    expect(FakeSocket.made[0]!.protocols).toEqual([]);
  });

  it('opens another socket when one is lost, and asks for a key when that was why', async () => {
    feedWith(null).open();
    await settle();
    FakeSocket.made[0]!.onclose?.({ code: 1006 });
    await vi.advanceTimersByTimeAsync(5000);
    expect(FakeSocket.made.length).toBe(2);
    FakeSocket.made[1]!.onclose?.({ code: 1008 });
    await vi.advanceTimersByTimeAsync(60_000);
    expect([states.at(-1), FakeSocket.made.length]).toEqual(['locked', 2]);
  });

  it('is closed while nobody looks, also where the answer comes late', async () => {
    const feed = feedWith(null);
    feed.open();
    feed.pause();
    await vi.advanceTimersByTimeAsync(60_000);
    expect(FakeSocket.made.length).toBe(0);
    feed.open();
    await settle();
    feed.open();
    await settle();
    expect(FakeSocket.made.length).toBe(1);
    feed.pause();
    await vi.advanceTimersByTimeAsync(60_000);
    expect([FakeSocket.made[0]!.closed, FakeSocket.made.length]).toEqual([true, 1]);
    expect(states.at(-1)).toBe('paused');
  });

  it('forgets an image with the key, and says when it could not', async () => {
    const feed = feedWith('secret');
    answers = [200, 404];
    expect(await feed.forget('ab')).toBe(true);
    expect(await feed.forget('ab')).toBe(false);
    expect(asked[0]!.url).toBe('https://host.example/under/v1/kv/view/images/ab');
    expect(asked[0]!.init).toEqual({
      method: 'DELETE',
      headers: { Authorization: 'Bearer secret' },
    });
  });
});
