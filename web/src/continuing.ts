/**
 * Going on with an answer that was cut or stopped: the model is given its own words as a beginning.
 *
 * That is the server's `continue_final_message` of Chat Completions, which stores nothing: the turn
 * has no response any more, and the next question tells the server everything again. Pure.
 */
import type { Answer } from './answer';
import type { Options } from './options';
import { requestOptions } from './options';
import type { FileIds } from './path';
import { errorOf } from './protocol';
import type { Detail, Usage } from './protocol';
import type { Turn } from './store';

type Part =
  | { type: 'text'; text: string }
  | { type: 'image_url'; image_url: { url: string; detail?: Detail } };

interface ChatMessage {
  role: 'system' | 'user' | 'assistant';
  content: string | Part[];
}

export interface ChatBody {
  messages: ChatMessage[];
  stream: true;
  stream_options: { include_usage: true };
  continue_final_message: true;
  add_generation_prompt: false;
  max_tokens?: number;
}

/** `turn` with its answer so far, after `context`. */
export function continueBody(
  context: readonly Turn[],
  turn: Turn,
  files: FileIds,
  options: Options,
): ChatBody {
  const { instructions, max_output_tokens, truncation, session_policy, ...sampling } =
    requestOptions(options);
  const system: ChatMessage[] =
    instructions === undefined ? [] : [{ role: 'system', content: instructions }];
  const said = [...context, turn].flatMap((each): ChatMessage[] => [
    { role: 'user', content: partsOf(each, files) },
    { role: 'assistant', content: each.answer.text },
  ]);
  return {
    ...sampling,
    ...(max_output_tokens === undefined ? {} : { max_tokens: max_output_tokens }),
    messages: [...system, ...said],
    stream: true,
    stream_options: { include_usage: true },
    continue_final_message: true,
    add_generation_prompt: false,
  };
}

/** Pictures before text, as in every other request. */
function partsOf({ pictureIds, text, detail }: Turn, files: FileIds): Part[] {
  const pictures = pictureIds.map((id): Part => {
    const url = files.get(id) ?? '';
    return { type: 'image_url', image_url: detail === undefined ? { url } : { url, detail } };
  });
  return text === '' ? pictures : [...pictures, { type: 'text', text }];
}

interface ChatUsage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: Usage['input_tokens_details'];
  cache?: Usage['cache'];
}

export interface Chunk {
  choices?: { delta?: { content?: string | null }; finish_reason?: string | null }[];
  usage?: ChatUsage | null;
  error?: unknown;
}

/** What a chunk of the stream does to the answer. */
export function goOn(answer: Answer, chunk: Chunk, now: number): Answer {
  if (chunk.error !== undefined) return halt(answer, errorOf(chunk, ''));
  const choice = chunk.choices?.[0];
  const next: Answer = {
    ...answer,
    text: answer.text + (choice?.delta?.content ?? ''),
    lastAt: now,
  };
  if (choice?.finish_reason) next.status = choice.finish_reason === 'length' ? 'cut' : 'done';
  if (chunk.usage) next.usage = usageOf(chunk.usage, answer.usage?.output_tokens ?? 0);
  return next;
}

/** The answer as far as it came, with why it did not come further. */
export function halt(answer: Answer, error: Answer['error']): Answer {
  return answer.status === 'streaming' ? { ...answer, status: 'stopped', error } : answer;
}

function usageOf(usage: ChatUsage, before: number): Usage {
  return {
    input_tokens: usage.prompt_tokens,
    output_tokens: before + usage.completion_tokens,
    input_tokens_details: usage.prompt_tokens_details,
    cache: usage.cache,
  };
}
