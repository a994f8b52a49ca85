/** An answer goes on from its own words. */
import { expect, it } from 'vitest';
import { newAnswer } from './answer';
import type { Answer } from './answer';
import { continueBody, goOn, halt } from './continuing';
import { DEFAULTS } from './options';
import type { Turn } from './store';

function turn(id: string, parentId: string | null, text: string, pictureIds: string[]): Turn {
  const answer = { ...newAnswer(0), status: 'cut' as const, text: `re ${id}`, responseId: 'r' };
  return {
    ...{ id, conversationId: 'c', parentId, askId: id },
    createdAt: 0,
    text,
    pictureIds,
    answer,
  };
}

it('gives the model its own words as the beginning', () => {
  const context = [turn('a', null, 'what?', ['p'])];
  const options = { ...DEFAULTS, instructions: 'Be brief.', maxTokens: 9, topK: 3 };
  const body = continueBody(context, turn('b', 'a', 'go', []), new Map([['p', 'file_1']]), options);
  expect(body).toMatchObject({ continue_final_message: true, max_tokens: 9, top_k: 3 });
  expect(body).not.toHaveProperty('truncation');
  expect(body.messages).toEqual([
    { role: 'system', content: 'Be brief.' },
    {
      role: 'user',
      content: [
        { type: 'image_url', image_url: { url: 'file_1' } },
        { type: 'text', text: 'what?' },
      ],
    },
    { role: 'assistant', content: 're a' },
    { role: 'user', content: [{ type: 'text', text: 'go' }] },
    { role: 'assistant', content: 're b' },
  ]);
});

it('adds what comes and ends as the server says', () => {
  const begun: Answer = { ...newAnswer(0), status: 'streaming', text: 'one' };
  const usage = { prompt_tokens: 5, completion_tokens: 2 };
  const chunks = [
    { choices: [{ delta: { content: ' two' } }] },
    { choices: [{ delta: {}, finish_reason: 'stop' }] },
    { choices: [], usage },
  ];
  const ended = chunks.reduce((answer, chunk) => goOn(answer, chunk, 9), begun);
  expect(ended).toMatchObject({ status: 'done', text: 'one two', usage: { output_tokens: 2 } });
  expect(halt(ended, { code: 'network', message: '' })).toBe(ended);
  const long = goOn(begun, { choices: [{ finish_reason: 'length' }] }, 9);
  expect(long.status).toBe('cut');
});

it('keeps its words where it cannot go on', () => {
  const begun: Answer = { ...newAnswer(0), status: 'streaming', text: 'one' };
  const failed = goOn(begun, { error: { code: 'internal_error', message: 'no' } }, 9);
  expect(failed).toMatchObject({
    status: 'stopped',
    text: 'one',
    error: { code: 'internal_error' },
  });
});
