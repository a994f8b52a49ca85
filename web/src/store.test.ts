/** What is stored comes back, in order, and goes when its conversation goes. */
import 'fake-indexeddb/auto';
import { expect, it } from 'vitest';
import { newAnswer } from './answer';
import { Store } from './store';
import type { Conversation, Turn } from './store';

function conversation(id: string, updatedAt: number): Conversation {
  return { id, title: id, createdAt: 0, updatedAt, leafId: null, pinned: false };
}

function turn(conversationId: string, createdAt: number): Turn {
  const id = `${conversationId}${createdAt}`;
  return {
    ...{ id, conversationId, parentId: null, askId: id, createdAt },
    ...{ text: 'x', pictureIds: [], answer: newAnswer(0) },
  };
}

it('lists conversations newest first and turns in order', async () => {
  const store = await Store.open('order');
  await store.put('conversations', conversation('old', 1));
  await store.put('conversations', conversation('new', 2));
  for (const time of [2, 0, 1]) await store.put('turns', turn('new', time));
  expect((await store.conversations()).map(({ id }) => id)).toEqual(['new', 'old']);
  expect((await store.turns('new')).map(({ createdAt }) => createdAt)).toEqual([0, 1, 2]);
});

it('forgets a deleted conversation with its turns and pictures, and no other', async () => {
  const store = await Store.open('deleting');
  for (const id of ['a', 'b']) {
    await store.put('conversations', conversation(id, 0));
    await store.put('turns', turn(id, 0));
    const blob = new Blob(['x']);
    const picture = { id: `p${id}`, conversationId: id, name: 'x', blob, width: 1, height: 1 };
    await store.put('pictures', { ...picture, fileId: null, hash: id });
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

it('turns the list of an older page into a tree, and loses nothing', async () => {
  await new Promise<void>((resolve) => {
    const opening = indexedDB.open('old', 1);
    opening.onupgradeneeded = () => {
      const { result } = opening;
      result.createObjectStore('conversations', { keyPath: 'id' });
      for (const table of ['turns', 'pictures']) {
        const records = result.createObjectStore(table, { keyPath: 'id' });
        records.createIndex('conversationId', 'conversationId');
      }
      const { transaction } = opening;
      transaction?.objectStore('conversations').put({ id: 'c', title: 'old', updatedAt: 1 });
      for (const position of [1, 0]) {
        const id = `t${position}`;
        const answer = newAnswer(5);
        transaction?.objectStore('turns').put({ id, conversationId: 'c', position, answer });
      }
    };
    opening.onsuccess = () => {
      opening.result.close();
      resolve();
    };
  });
  const store = await Store.open('old');
  expect(await store.conversations()).toMatchObject([{ id: 'c', leafId: 't1', pinned: false }]);
  expect(await store.turns('c')).toMatchObject([
    { id: 't0', parentId: null, askId: 't0' },
    { id: 't1', parentId: 't0', askId: 't1' },
  ]);
});

it('finds the pictures of any conversation by their bytes', async () => {
  const store = await Store.open('bytes');
  const blob = new Blob(['x']);
  const picture = { id: 'p', conversationId: 'a', name: 'x', blob, width: 1, height: 1 };
  await store.put('pictures', { ...picture, fileId: 'file_1', hash: 'ab' });
  expect(await store.picturesWith('ab')).toMatchObject([{ id: 'p', fileId: 'file_1' }]);
  expect(await store.picturesWith('cd')).toEqual([]);
});
