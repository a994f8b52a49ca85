/** The list of chats in its groups: pinned ones, then by the day they were last used. Pure. */
import type { Conversation } from './store';

export type GroupKey = 'pinned' | 'today' | 'yesterday' | 'week' | 'older';

export interface Group {
  key: GroupKey;
  conversations: Conversation[];
}

const ORDER: readonly GroupKey[] = ['pinned', 'today', 'yesterday', 'week', 'older'];
const WEEK = 7;

/** `now` in Unix milliseconds; days begin at midnight of the browser's time zone. */
export function grouped(conversations: readonly Conversation[], now: number): Group[] {
  const keyOf = (each: Conversation): GroupKey =>
    each.pinned ? 'pinned' : ageOf(each.updatedAt, now);
  return ORDER.map((key) => ({
    key,
    conversations: conversations
      .filter((each) => keyOf(each) === key)
      .sort((a, b) => b.updatedAt - a.updatedAt),
  })).filter((group) => group.conversations.length > 0);
}

function ageOf(time: number, now: number): GroupKey {
  if (time >= midnight(now, 0)) return 'today';
  if (time >= midnight(now, 1)) return 'yesterday';
  return time >= midnight(now, WEEK) ? 'week' : 'older';
}

function midnight(now: number, daysAgo: number): number {
  const date = new Date(now);
  date.setHours(0, 0, 0, 0);
  date.setDate(date.getDate() - daysAgo);
  return date.getTime();
}
