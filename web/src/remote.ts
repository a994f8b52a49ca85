/**
 * A conversation as the server holds it, read back from its last response.
 *
 * Pictures come with their bytes. A chain whose beginning has expired begins later. Throws
 * `ApiFault` where not even the last response is there.
 */
import { newAnswer } from './answer';
import { ApiFault } from './api';
import type { Api } from './api';
import { detailIn } from './detail';
import { newId } from './ids';
import { outputText } from './protocol';
import type { ResponseObject, StoredItem } from './protocol';
import type { Picture, Turn } from './store';
import { fromBase64 } from './transfer';
import type { Bundle } from './transfer';

/** More turns than this are not read: the link leads to their end. */
const MOST = 1000;
const TITLE_LENGTH = 60;

interface Step {
  response: ResponseObject;
  items: StoredItem[];
}

export async function fetchConversation(api: Api, id: string, now: number): Promise<Bundle> {
  const steps = await fetchChain(api, id);
  const conversationId = newId();
  const turns: Turn[] = [];
  const pictures: Picture[] = [];
  const begin = (): Turn => {
    const turnId = newId();
    const turn: Turn = {
      ...{ id: turnId, conversationId, parentId: turns.at(-1)?.id ?? null, askId: turnId },
      ...{ createdAt: now + turns.length, text: '', pictureIds: [] },
      answer: { ...newAnswer(now), status: 'done' },
    };
    turns.push(turn);
    return turn;
  };
  for (const { response, items } of steps) {
    let open: Turn | null = null;
    for (const item of items) {
      if (item.type !== 'message' || item.role === 'system') continue;
      if (item.role === 'assistant') {
        (open ?? begin()).answer.text = textOf(item);
        open = null;
        continue;
      }
      open ??= begin();
      open.text = [open.text, textOf(item)].filter((text) => text !== '').join('\n');
      const shown = picturesOf(item, conversationId);
      open.pictureIds.push(...shown.map(({ id }) => id));
      for (const { detail } of item.content ?? []) Object.assign(open, detailIn(detail));
      pictures.push(...shown);
    }
    if (response.status === 'completed' && outputText(response) === null) continue;
    open ??= begin();
    open.answer = answerOf(response, now);
  }
  const title = turns.find(({ text }) => text !== '')?.text.slice(0, TITLE_LENGTH) ?? '';
  const times = { createdAt: now, updatedAt: now };
  const leafId = turns.at(-1)?.id ?? null;
  const conversation = { id: conversationId, title, ...times, leafId, pinned: false };
  return { conversation, turns, pictures };
}

/** Oldest first. */
async function fetchChain(api: Api, id: string): Promise<Step[]> {
  const steps: Step[] = [];
  let next: string | null = id;
  while (next !== null && steps.length < MOST) {
    try {
      const [response, items]: [ResponseObject, StoredItem[]] = await Promise.all([
        api.retrieve(next),
        api.inputItems(next),
      ]);
      steps.push({ response, items });
      next = response.previous_response_id ?? null;
    } catch (reason) {
      const expired = reason instanceof ApiFault && reason.status === 404 && steps.length > 0;
      if (!expired) throw reason;
      next = null;
    }
  }
  return steps.reverse();
}

function answerOf(response: ResponseObject, now: number): Turn['answer'] {
  const { id, status, usage, timings, error } = response;
  const ended = {
    ...newAnswer(now),
    responseId: id,
    text: outputText(response) ?? '',
    usage: usage ?? null,
    timings: timings ?? null,
  };
  switch (status) {
    case 'queued':
    case 'in_progress':
      return { ...newAnswer(now), responseId: id };
    case 'completed':
      return { ...ended, status: 'done' };
    case 'cancelled':
      return { ...ended, status: 'stopped' };
    case 'incomplete':
      return { ...ended, status: 'cut' };
    case 'failed':
      return { ...ended, status: 'failed', error: error ?? { code: null, message: '' } };
  }
}

function textOf({ content }: StoredItem): string {
  return (content ?? []).map(({ text }) => text ?? '').join('');
}

function picturesOf({ content }: StoredItem, conversationId: string): Picture[] {
  return (content ?? []).flatMap(({ image_url, file_id, sha256 }) => {
    const [, type, data] = /^data:(image\/[\w.+-]+);base64,(.*)$/s.exec(image_url ?? '') ?? [];
    if (type === undefined || data === undefined) return [];
    const blob = new Blob([fromBase64(data)], { type });
    const known = { fileId: file_id ?? null, hash: sha256 ?? null };
    return [{ id: newId(), conversationId, name: '', blob, width: 0, height: 0, ...known }];
  });
}
