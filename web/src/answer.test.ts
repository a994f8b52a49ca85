/** The reducer: what each event does to an answer, and that replays do nothing. */
import { describe, expect, it } from 'vitest';
import { isContext, newAnswer, reduce, statsOf } from './answer';
import type { Answer } from './answer';
import type { ResponseEvent, ResponseObject } from './protocol';

function response(
  status: ResponseObject['status'],
  rest: Partial<ResponseObject> = {},
): ResponseObject {
  return { id: 'resp_1', status, ...rest };
}

function delta(sequence_number: number, text: string): ResponseEvent {
  return { type: 'response.output_text.delta', sequence_number, delta: text };
}

const CREATED: ResponseEvent = {
  type: 'response.created',
  sequence_number: 0,
  response: response('in_progress'),
};
const USAGE = {
  input_tokens: 50,
  output_tokens: 11,
  input_tokens_details: { cached_tokens: 32, image_tokens: 32 },
  cache: { vision_hits: 1 },
};
const COMPLETED: ResponseEvent = {
  type: 'response.completed',
  sequence_number: 3,
  response: response('completed', { usage: USAGE }),
};

function play(events: ResponseEvent[], from: Answer = newAnswer(1000)): Answer {
  return events.reduce((answer, event, index) => reduce(answer, event, 1100 + 100 * index), from);
}

describe('an answer', () => {
  it('joins deltas and ends done with usage', () => {
    const answer = play([CREATED, delta(1, '两'), delta(2, '只猫'), COMPLETED]);
    expect(answer).toMatchObject({
      status: 'done',
      responseId: 'resp_1',
      text: '两只猫',
      sequence: 3,
    });
  });

  it('is the same however often its events are replayed', () => {
    const events = [CREATED, delta(1, 'a'), delta(2, 'b'), COMPLETED];
    for (let cut = 0; cut <= events.length; cut++) {
      const resumed = play(events, play(events.slice(0, cut)));
      expect(resumed.text).toBe('ab');
      expect(resumed.status).toBe('done');
    }
  });

  it('keeps its text when cancelled and can be built on', () => {
    const cancelled = response('cancelled');
    const end: ResponseEvent = {
      type: 'response.incomplete',
      sequence_number: 2,
      response: cancelled,
    };
    const answer = play([CREATED, delta(1, 'part'), end]);
    expect(answer).toMatchObject({ status: 'stopped', text: 'part' });
    expect(isContext(answer)).toBe(true);
  });

  it('says that a length limit cut it', () => {
    const end: ResponseEvent = {
      type: 'response.incomplete',
      sequence_number: 2,
      response: response('incomplete', { incomplete_details: { reason: 'max_output_tokens' } }),
    };
    expect(play([CREATED, delta(1, 'x'), end]).status).toBe('cut');
  });

  it('fails with the error of the response and is no context', () => {
    const error = { code: 'internal_error', message: 'broken' };
    const end: ResponseEvent = {
      type: 'response.failed',
      sequence_number: 1,
      response: response('failed', { error }),
    };
    const answer = play([CREATED, end]);
    expect(answer).toMatchObject({ status: 'failed', error });
    expect(isContext(answer)).toBe(false);
  });

  it('takes the whole text of the final object over its deltas', () => {
    const output = [{ type: 'message', content: [{ type: 'output_text', text: 'whole' }] }];
    const end: ResponseEvent = {
      type: 'response.completed',
      sequence_number: 99,
      response: response('completed', { output }),
    };
    expect(play([CREATED, delta(1, 'wh'), end]).text).toBe('whole');
  });
});

describe('the figures under an answer', () => {
  it('are absent until usage is known', () => {
    expect(statsOf(play([CREATED, delta(1, 'a')]))).toBeNull();
  });

  it('measure the first token from sending and the speed between tokens', () => {
    const stats = statsOf(play([CREATED, delta(1, 'a'), delta(2, 'b'), COMPLETED]));
    expect(stats).toMatchObject({ prompt: 50, cached: 32, image: 32, visionHits: 1, ttftMs: 200 });
    expect(stats?.tokensPerSecond).toBeCloseTo(100);
  });

  it("prefer the server's own timing of the decoding", () => {
    const timings = { predicted_n: 11, predicted_ms: 220, prompt_ms: 5 };
    const end = { ...COMPLETED, response: response('completed', { usage: USAGE, timings }) };
    expect(statsOf(play([CREATED, delta(1, 'a'), end as ResponseEvent]))?.tokensPerSecond).toBe(50);
  });
});
