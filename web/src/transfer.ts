/**
 * A conversation as a thing that can be copied: for a fork, a file, or from a file.
 *
 * Owns the JSON and Markdown forms. What is read from a file is checked field by field, because
 * anyone may have written it. Knows nothing of storage or the page.
 */
import { newAnswer } from './answer';
import type { Answer, AnswerStatus } from './answer';
import { detailIn } from './detail';
import { newId } from './ids';
import type { Conversation, Picture, Turn } from './store';
import { pathTo } from './tree';

export interface Bundle {
  conversation: Conversation;
  turns: Turn[];
  pictures: Picture[];
}

/** A file is no conversation of ours. */
export class UnreadableFile extends Error {}

const FORMAT = 'mmserve-chat';
const VERSION = 1;
const ENDED: readonly AnswerStatus[] = ['done', 'stopped', 'cut', 'failed'];

/** The same under names of its own, so that it can lie beside what it was made from. */
export function renewed({ conversation, turns, pictures }: Bundle, now: number): Bundle {
  const names = new Map<string, string>();
  const rename = (id: string): string => {
    const name = names.get(id) ?? newId();
    names.set(id, name);
    return name;
  };
  const conversationId = rename(conversation.id);
  return {
    conversation: {
      ...conversation,
      id: conversationId,
      leafId: conversation.leafId === null ? null : rename(conversation.leafId),
      createdAt: now,
      updatedAt: now,
      pinned: false,
    },
    turns: turns.map((turn) => ({
      ...turn,
      id: rename(turn.id),
      conversationId,
      parentId: turn.parentId === null ? null : rename(turn.parentId),
      askId: rename(turn.askId),
      pictureIds: turn.pictureIds.map(rename),
    })),
    pictures: pictures.map((picture) => ({ ...picture, id: rename(picture.id), conversationId })),
  };
}

/** What is shown up to a turn, without its other branches. */
export function branchUpTo({ conversation, turns, pictures }: Bundle, leafId: string): Bundle {
  const path = pathTo(turns, leafId);
  const shown = new Set(path.flatMap(({ pictureIds }) => pictureIds));
  return {
    conversation: { ...conversation, leafId },
    turns: path,
    pictures: pictures.filter(({ id }) => shown.has(id)),
  };
}

export async function toJson(bundle: Bundle): Promise<string> {
  const pictures = await Promise.all(
    bundle.pictures.map(async ({ blob, ...picture }) => ({
      ...picture,
      type: blob.type,
      data: toBase64(new Uint8Array(await blob.arrayBuffer())),
    })),
  );
  const { conversation, turns } = bundle;
  return JSON.stringify({ format: FORMAT, version: VERSION, conversation, turns, pictures });
}

/** Throws `UnreadableFile`. Names are fresh; files have to be uploaded anew where they are needed. */
export function fromJson(text: string, now: number): Bundle {
  const file = object(parse(text));
  if (file['format'] !== FORMAT || file['version'] !== VERSION) throw new UnreadableFile();
  const conversation = object(file['conversation']);
  const turns = list(file['turns']).map((turn) => readTurn(object(turn), now));
  const ids = new Set(turns.map(({ id }) => id));
  const leafId = typeof conversation['leafId'] === 'string' ? conversation['leafId'] : null;
  const bundle = {
    conversation: {
      id: newId(),
      title: string(conversation['title']),
      createdAt: now,
      updatedAt: now,
      leafId,
      pinned: false,
    },
    turns: turns.map((turn) =>
      turn.parentId === null || ids.has(turn.parentId) ? turn : { ...turn, parentId: null },
    ),
    pictures: list(file['pictures']).map((picture) => readPicture(object(picture))),
  };
  return renewed(bundle, now);
}

export interface MarkdownLabels {
  you: string;
  assistant: string;
  picture: string;
}

/** The path that is shown, for reading elsewhere; pictures are named, not contained. */
export function toMarkdown(bundle: Bundle, labels: MarkdownLabels): string {
  const { conversation, turns, pictures } = bundle;
  const names = new Map(pictures.map(({ id, name }) => [id, name]));
  const parts = pathTo(turns, conversation.leafId).flatMap(({ text, pictureIds, answer }) => {
    const shown = pictureIds.map((id) => `*[${labels.picture}: ${names.get(id) ?? ''}]*`);
    return [
      `## ${labels.you}`,
      ...shown,
      ...(text === '' ? [] : [text]),
      `## ${labels.assistant}`,
      answer.text === '' ? '…' : answer.text,
    ];
  });
  return [`# ${conversation.title || labels.picture}`, ...parts].join('\n\n') + '\n';
}

/** A name for a file that every system takes. */
export function fileName(title: string, extension: string): string {
  const safe = title
    .replaceAll(/[^\p{L}\p{N}]+/gu, '-')
    .replaceAll(/^-|-$/g, '')
    .slice(0, 60);
  return `${safe === '' ? 'chat' : safe}.${extension}`;
}

function readTurn(turn: Record<string, unknown>, now: number): Turn {
  const parentId = turn['parentId'];
  const createdAt = turn['createdAt'];
  return {
    id: string(turn['id']),
    conversationId: '',
    parentId: typeof parentId === 'string' ? parentId : null,
    askId: string(turn['askId']),
    createdAt: typeof createdAt === 'number' ? createdAt : now,
    text: string(turn['text']),
    pictureIds: list(turn['pictureIds']).map(string),
    ...detailIn(turn['detail']),
    answer: readAnswer(object(turn['answer']), now),
  };
}

function readAnswer(answer: Record<string, unknown>, now: number): Answer {
  const status = answer['status'] as AnswerStatus;
  const responseId = answer['responseId'];
  return {
    ...newAnswer(now),
    status: ENDED.includes(status) ? status : 'stopped',
    responseId: typeof responseId === 'string' ? responseId : null,
    text: string(answer['text']),
    error: status === 'failed' ? { code: null, message: '' } : null,
  };
}

function readPicture(picture: Record<string, unknown>): Picture {
  const type = string(picture['type']);
  const width = picture['width'];
  const height = picture['height'];
  if (!/^image\/[\w.+-]+$/.test(type) || type.includes('svg')) throw new UnreadableFile();
  return {
    id: string(picture['id']),
    conversationId: '',
    name: string(picture['name']),
    blob: new Blob([fromBase64(string(picture['data']))], { type }),
    width: typeof width === 'number' ? width : 0,
    height: typeof height === 'number' ? height : 0,
    fileId: null,
    hash: null,
  };
}

function parse(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    throw new UnreadableFile();
  }
}

function object(value: unknown): Record<string, unknown> {
  if (typeof value !== 'object' || value === null || Array.isArray(value))
    throw new UnreadableFile();
  return value as Record<string, unknown>;
}

function list(value: unknown): unknown[] {
  if (!Array.isArray(value)) throw new UnreadableFile();
  return value;
}

function string(value: unknown): string {
  if (typeof value !== 'string') throw new UnreadableFile();
  return value;
}

export function toBase64(bytes: Uint8Array): string {
  const CHUNK = 0x8000; // arguments of one call
  let text = '';
  for (let from = 0; from < bytes.length; from += CHUNK) {
    text += String.fromCharCode(...bytes.subarray(from, from + CHUNK));
  }
  return btoa(text);
}

/** Throws `UnreadableFile`. */
export function fromBase64(text: string): Uint8Array<ArrayBuffer> {
  try {
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  } catch {
    throw new UnreadableFile();
  }
}
