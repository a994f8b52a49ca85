/** Server-sent events, cut anywhere. */
import { describe, expect, it } from 'vitest';
import { readEvents } from './sse';

const TEXT =
  ': keep-alive\n\nevent: a\ndata: {"n":1,"t":"汉字🙂"}\n\ndata: {"n":2}\r\n\r\ndata: [DONE]\n\n';
const BYTES = new TextEncoder().encode(TEXT);

function streamOf(chunks: Uint8Array[]): ReadableStream<Uint8Array> {
  return new ReadableStream({
    start(controller) {
      for (const chunk of chunks) controller.enqueue(chunk);
      controller.close();
    },
  });
}

describe('an event stream', () => {
  it('reads the same events wherever its bytes are cut', async () => {
    for (let cut = 0; cut <= BYTES.length; cut++) {
      const events = [];
      const body = streamOf([BYTES.slice(0, cut), BYTES.slice(cut)]);
      for await (const event of readEvents(body)) events.push(event);
      expect(events).toEqual([{ n: 1, t: '汉字🙂' }, { n: 2 }]);
    }
  });

  it('drops an event that never ended', async () => {
    const events = [];
    const body = streamOf([new TextEncoder().encode('data: {"n":1}\n\ndata: {"n"')]);
    for await (const event of readEvents(body)) events.push(event);
    expect(events).toEqual([{ n: 1 }]);
  });
});
