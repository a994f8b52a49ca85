/** What is stored comes back, in order, and goes when its conversation goes. */
import 'fake-indexeddb/auto';
import { expect, it } from 'vitest';
import { newAnswer } from './answer';
import { Store } from './store';
import type { Conversation, Turn } from './store';

function conversation(id: string, updatedAt: number): Conversation {
  return { id, title: id, createdAt: 0, updatedAt };
}

function turn(conversationId: string, position: number): Turn {
  const id = `${conversationId}${position}`;
  return { id, conversationId, position, text: 'x', pictureIds: [], answer: newAnswer(0) };
}

it('lists conversations newest first and turns in order', async () => {
  const store = await Store.open('order');
  await store.put('conversations', conversation('old', 1));
  await store.put('conversations', conversation('new', 2));
  for (const position of [2, 0, 1]) await store.put('turns', turn('new', position));
  expect((await store.conversations()).map(({ id }) => id)).toEqual(['new', 'old']);
  expect((await store.turns('new')).map(({ position }) => position)).toEqual([0, 1, 2]);
});

it('forgets a deleted conversation with its turns and pictures, and no other', async () => {
  const store = await Store.open('deleting');
  for (const id of ['a', 'b']) {
    await store.put('conversations', conversation(id, 0));
    await store.put('turns', turn(id, 0));
    const blob = new Blob(['x']);
    const picture = { id: `p${id}`, conversationId: id, name: 'x', blob, width: 1, height: 1 };
    await store.put('pictures', { ...picture, fileId: null });
  }
  await store.deleteConversation('a');
  expect((await store.conversations()).map(({ id }) => id)).toEqual(['b']);
  expect(await store.turns('a')).toEqual([]);
  expect(await store.pictures('a')).toEqual([]);
  expect(await store.pictures('b')).toHaveLength(1);
});

it('works without storage, and forgets', async () => {
  const real = globalThis.indexedDB;
  Object.defineProperty(globalThis, 'indexedDB', { value: undefined, configurable: true });
  const store = await Store.open('refused');
  Object.defineProperty(globalThis, 'indexedDB', { value: real, configurable: true });
  await store.put('conversations', conversation('a', 0));
  expect(await store.conversations()).toEqual([]);
});
