// @vitest-environment node
/** Conversations as files: what was written is read back, and nothing else is believed. */
import { describe, expect, it } from 'vitest';
import { newAnswer } from './answer';
import type { Turn } from './store';
import {
  branchUpTo,
  fileName,
  fromJson,
  renewed,
  toJson,
  toMarkdown,
  UnreadableFile,
} from './transfer';
import type { Bundle } from './transfer';

function turn(id: string, parentId: string | null, createdAt: number, pictureIds: string[]): Turn {
  const answer = {
    ...newAnswer(0),
    status: 'done' as const,
    text: `re ${id}`,
    responseId: `r${id}`,
  };
  return {
    ...{ id, conversationId: 'c', parentId, askId: id, createdAt },
    ...{ text: `ask ${id}`, pictureIds, answer },
  };
}

const BUNDLE: Bundle = {
  conversation: {
    id: 'c',
    title: '猫 & dogs',
    createdAt: 1,
    updatedAt: 2,
    leafId: 'b',
    pinned: true,
  },
  turns: [turn('a', null, 0, ['p']), turn('b', 'a', 1, []), turn('x', 'a', 2, ['q'])],
  pictures: ['p', 'q'].map((id) => ({
    ...{ id, conversationId: 'c', name: `${id}.png`, width: 2, height: 3 },
    ...{ blob: new Blob(['bytes'], { type: 'image/png' }), fileId: 'file_1', hash: 'ab' },
  })),
};
const LABELS = { you: 'You', assistant: 'Answer', picture: 'Picture' };

describe('a conversation as a file', () => {
  it('comes back whole under names of its own', async () => {
    const read = fromJson(await toJson(BUNDLE), 9);
    expect(read.conversation.title).toBe('猫 & dogs');
    expect(read.conversation.id).not.toBe('c');
    const [a, b, x] = read.turns;
    expect([b?.parentId, x?.parentId]).toEqual([a?.id, a?.id]);
    expect(read.conversation.leafId).toBe(b?.id);
    expect(a?.pictureIds).toEqual([read.pictures[0]?.id]);
    expect(read.turns.every(({ conversationId }) => conversationId === read.conversation.id)).toBe(
      true,
    );
    expect(read.pictures[0]).toMatchObject({ name: 'p.png', fileId: null, width: 2 });
    expect(read.pictures[0]?.blob).toMatchObject({ size: 5, type: 'image/png' });
    expect(a?.answer).toMatchObject({ status: 'done', text: 're a', responseId: 'ra' });
  });

  it.each([
    'no json',
    '[]',
    '{"format":"mmserve-chat","version":2}',
    '{"format":"mmserve-chat","version":1,"conversation":{"title":5},"turns":[],"pictures":[]}',
    '{"format":"mmserve-chat","version":1,"conversation":{"title":""},"turns":[3],"pictures":[]}',
    '{"format":"mmserve-chat","version":1,"conversation":{"title":""},"turns":[],"pictures":[{"id":"p","name":"x","type":"image/svg+xml","data":""}]}',
    '{"format":"mmserve-chat","version":1,"conversation":{"title":""},"turns":[],"pictures":[{"id":"p","name":"x","type":"image/png","data":"§"}]}',
  ])('is refused where it is not one: %s', (text) => {
    expect(() => fromJson(text, 0)).toThrow(UnreadableFile);
  });

  it('never comes back running', async () => {
    const running = { ...newAnswer(0), status: 'streaming' as const };
    const turns = BUNDLE.turns.map((each) => ({ ...each, answer: running }));
    const read = fromJson(await toJson({ ...BUNDLE, turns }), 9);
    expect(read.turns.map(({ answer }) => answer.status)).toEqual([
      'stopped',
      'stopped',
      'stopped',
    ]);
  });

  it('is the shown path in Markdown', () => {
    expect(toMarkdown(BUNDLE, LABELS)).toBe(
      '# 猫 & dogs\n\n## You\n\n*[Picture: p.png]*\n\nask a\n\n## Answer\n\nre a\n\n' +
        '## You\n\nask b\n\n## Answer\n\nre b\n',
    );
  });

  it('has a name that every system takes', () => {
    expect(fileName('What/is: "this"?', 'md')).toBe('What-is-this.md');
    expect(fileName('///', 'json')).toBe('chat.json');
  });
});

describe('a fork', () => {
  it('has the path and its pictures, and leaves the original alone', () => {
    const branch = branchUpTo(BUNDLE, 'x');
    expect(branch.turns.map(({ id }) => id)).toEqual(['a', 'x']);
    const fork = renewed(branch, 9);
    expect(fork.pictures).toHaveLength(2);
    expect(fork.turns[1]?.answer.responseId).toBe('rx');
    expect(branchUpTo(BUNDLE, 'b').pictures.map(({ id }) => id)).toEqual(['p']);
  });
});
