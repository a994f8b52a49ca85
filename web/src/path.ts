/**
 * What a turn sends: on top of the last stored response, or everything again from the first turn.
 *
 * Pure: turns and the server's file ids in, a request body out.
 */
import { isContext } from './answer';
import type { InputMessage } from './protocol';
import type { Turn } from './store';
import { pathTo } from './tree';
import type { CallBody } from './transport';

export type FileIds = ReadonlyMap<string, string>;

/** What a turn's request is made of; a turn that is not asked yet has no answer. */
export type Asked = Pick<Turn, 'parentId' | 'text' | 'pictureIds' | 'detail'>;

/** The turns above `turn` that its answer builds on; failed ones leave no trace. */
export function contextOf(turns: readonly Turn[], turn: Asked): Turn[] {
  return pathTo(turns, turn.parentId).filter(({ answer }) => isContext(answer));
}

/** Whether the server may hold what a turn builds on, so that it need not be sent. */
export function isChained(context: readonly Turn[]): boolean {
  return context.length === 0 || context.at(-1)?.answer.responseId !== null;
}

/** `turn` after the stored response of its context. */
export function chainBody(context: readonly Turn[], turn: Asked, files: FileIds): CallBody {
  const previous = context.at(-1)?.answer.responseId ?? null;
  return { input: [userMessage(turn, files)], previous_response_id: previous, store: true };
}

/** The whole conversation again, for a server that no longer holds the chain. */
export function fullBody(context: readonly Turn[], turn: Asked, files: FileIds): CallBody {
  const input = context.flatMap((past): InputMessage[] => {
    const answer: InputMessage = {
      role: 'assistant',
      content: [{ type: 'output_text', text: past.answer.text }],
    };
    return past.answer.text === ''
      ? [userMessage(past, files)]
      : [userMessage(past, files), answer];
  });
  return { input: [...input, userMessage(turn, files)], previous_response_id: null, store: true };
}

/** Pictures before text, as the prewarm request sends them: so that its prefix is the turn's. */
function userMessage(turn: Asked, files: FileIds): InputMessage {
  const images = turn.pictureIds.map((id) => ({
    type: 'input_image' as const,
    file_id: files.get(id) ?? '',
    detail: turn.detail ?? 'auto',
  }));
  const text = turn.text === '' ? [] : [{ type: 'input_text' as const, text: turn.text }];
  return { role: 'user', content: [...images, ...text] };
}
