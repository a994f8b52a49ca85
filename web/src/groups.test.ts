/** Which group of the list a chat is in. */
import { expect, it } from 'vitest';
import { grouped } from './groups';
import type { Conversation } from './store';

const NOON = new Date(2026, 5, 15, 12).getTime();
const HOUR = 3_600_000;

function chat(id: string, hoursAgo: number, pinned = false): Conversation {
  const updatedAt = NOON - hoursAgo * HOUR;
  return { id, title: id, createdAt: 0, updatedAt, leafId: null, pinned };
}

it('groups chats by the day they were last used, pinned ones first, newest first', () => {
  const chats = [chat('old', 999), chat('pin', 400, true), chat('week', 60), chat('today', 11)];
  const more = [chat('yesterday', 13), chat('now', 0)];
  const groups = grouped([...chats, ...more], NOON).map(({ key, conversations }) => [
    key,
    conversations.map(({ id }) => id),
  ]);
  expect(groups).toEqual([
    ['pinned', ['pin']],
    ['today', ['now', 'today']],
    ['yesterday', ['yesterday']],
    ['week', ['week']],
    ['older', ['old']],
  ]);
  expect(grouped([], NOON)).toEqual([]);
});
