/** What a turn sends: chained, or whole. */
import { describe, expect, it } from 'vitest';
import { newAnswer } from './answer';
import type { Answer } from './answer';
import { chainBody, contextOf, fullBody } from './path';
import type { Turn } from './store';

function turn(
  position: number,
  text: string,
  answer: Partial<Answer>,
  pictureIds: string[] = [],
): Turn {
  const id = `t${position}`;
  return {
    id,
    conversationId: 'c',
    parentId: position === 0 ? null : `t${position - 1}`,
    askId: id,
    createdAt: position,
    text,
    pictureIds,
    answer: { ...newAnswer(0), ...answer },
  };
}

const TURNS = [
  turn(0, 'what is it?', { status: 'done', responseId: 'resp_a', text: 'a cat' }, ['p0']),
  turn(1, 'and now?', { status: 'failed', responseId: 'resp_b', text: '' }),
  turn(2, 'hm', { status: 'stopped', responseId: 'resp_c', text: '' }),
];
const NEXT = turn(3, 'again', {}, ['p1']);
const FILES = new Map([
  ['p0', 'file_0'],
  ['p1', 'file_1'],
]);

describe('a turn', () => {
  it('builds on answers that ended well, not on failed ones', () => {
    expect(contextOf(TURNS, NEXT).map(({ id }) => id)).toEqual(['t0', 't2']);
  });

  it('sends only itself after the last stored response, pictures first', () => {
    const body = chainBody(contextOf(TURNS, NEXT), NEXT, FILES);
    expect(body.previous_response_id).toBe('resp_c');
    expect(body.input).toEqual([
      {
        role: 'user',
        content: [
          { type: 'input_image', file_id: 'file_1', detail: 'auto' },
          { type: 'input_text', text: 'again' },
        ],
      },
    ]);
  });

  it('asks for the detail that was chosen for its pictures, then and when all is sent again', () => {
    const next: Turn = { ...NEXT, detail: 'low' };
    const chained = chainBody([], next, FILES).input[0]?.content[0];
    expect(chained).toMatchObject({ type: 'input_image', detail: 'low' });
    const first = { ...turn(0, '?', { status: 'done' }, ['p0']), detail: 'high' as const };
    const details = fullBody([first], next, FILES).input.flatMap(({ content }) =>
      content.flatMap((part) => (part.type === 'input_image' ? [part.detail] : [])),
    );
    expect(details).toEqual(['high', 'low']);
  });

  it('starts a chain when nothing came before', () => {
    expect(chainBody([], NEXT, FILES).previous_response_id).toBeNull();
  });

  it('sends the whole conversation again when the server forgot it', () => {
    const body = fullBody(contextOf(TURNS, NEXT), NEXT, FILES);
    expect(body.previous_response_id).toBeNull();
    expect(body.input.map(({ role }) => role)).toEqual(['user', 'assistant', 'user', 'user']);
    expect(body.input[0]?.content[0]).toMatchObject({ type: 'input_image', file_id: 'file_0' });
    expect(body.input[1]?.content).toEqual([{ type: 'output_text', text: 'a cat' }]);
  });
});
