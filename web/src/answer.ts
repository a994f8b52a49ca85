/**
 * One answer as data, and how each server event changes it.
 *
 * `reduce` is pure: the same answer and event give the same answer, and an event that was already
 * applied changes nothing, so a stream may be resumed from any number. Times are Unix milliseconds.
 */
import { isTerminal, outputText } from './protocol';
import type { ApiError, LifeEvent, ResponseEvent, SessionReport, Timings, Usage } from './protocol';

/** `cut`: ended by the token limit. `stopped`: ended by the user, the text so far stays. */
export type AnswerStatus = 'waiting' | 'streaming' | 'done' | 'stopped' | 'cut' | 'failed';

export interface Answer {
  status: AnswerStatus;
  responseId: string | null;
  sequence: number;
  text: string;
  usage: Usage | null;
  timings: Timings | null;
  session: SessionReport | null;
  error: ApiError | null;
  sentAt: number;
  firstAt: number | null;
  lastAt: number | null;
}

export function newAnswer(now: number): Answer {
  return {
    status: 'waiting',
    responseId: null,
    sequence: -1,
    text: '',
    usage: null,
    timings: null,
    session: null,
    error: null,
    sentAt: now,
    firstAt: null,
    lastAt: null,
  };
}

export function isRunning(answer: Answer): boolean {
  return answer.status === 'waiting' || answer.status === 'streaming';
}

/** Whether later turns build on this answer: it ended well and something of it is known. */
export function isContext({ responseId, status, text }: Answer): boolean {
  return (responseId !== null || text !== '') && ['done', 'stopped', 'cut'].includes(status);
}

export function reduce(answer: Answer, event: ResponseEvent, now: number): Answer {
  if (event.sequence_number <= answer.sequence) return answer;
  const next = { ...answer, sequence: event.sequence_number };
  switch (event.type) {
    case 'response.created':
      return { ...next, responseId: event.response.id };
    case 'response.output_text.delta':
      return {
        ...next,
        status: 'streaming',
        text: answer.text + event.delta,
        firstAt: answer.firstAt ?? now,
        lastAt: now,
      };
    case 'response.output_text.done':
      return { ...next, text: event.text };
    default:
      return isTerminal(event) ? finish(next, event) : next;
  }
}

function finish(answer: Answer, { type, response }: LifeEvent): Answer {
  const ended = {
    ...answer,
    responseId: response.id,
    text: outputText(response) ?? answer.text,
    usage: response.usage ?? null,
    timings: response.timings ?? null,
    session: response.session ?? null,
  };
  if (type === 'response.completed') return { ...ended, status: 'done' };
  if (type === 'response.failed' || response.status === 'failed') {
    return { ...ended, status: 'failed', error: response.error ?? { code: null, message: '' } };
  }
  return { ...ended, status: response.status === 'cancelled' ? 'stopped' : 'cut' };
}

export function fail(answer: Answer, error: ApiError): Answer {
  return { ...answer, status: 'failed', error };
}

export interface AnswerStats {
  prompt: number;
  cached: number;
  image: number;
  output: number;
  visionHits: number;
  drafted: number;
  accepted: number;
  ttftMs: number | null;
  tokensPerSecond: number | null;
}

/** The figures under an answer, or null until the server has counted. */
export function statsOf(answer: Answer): AnswerStats | null {
  const { usage, timings, firstAt, lastAt, sentAt } = answer;
  if (usage === null) return null;
  const seen = firstAt === null ? null : firstAt - sentAt;
  const told =
    timings?.prompt_ms === undefined ? null : (timings.queue_ms ?? 0) + timings.prompt_ms;
  const watched = firstAt === null || lastAt === null ? 0 : lastAt - firstAt;
  return {
    prompt: usage.input_tokens,
    cached: usage.input_tokens_details?.cached_tokens ?? 0,
    image: usage.input_tokens_details?.image_tokens ?? 0,
    output: usage.output_tokens,
    visionHits: usage.cache?.vision_hits ?? 0,
    drafted: timings?.draft_n ?? 0,
    accepted: timings?.draft_n_accepted ?? 0,
    ttftMs: seen ?? told,
    tokensPerSecond:
      rate(timings?.predicted_n ?? 0, timings?.predicted_ms ?? 0) ??
      rate(usage.output_tokens - 1, watched),
  };
}

function rate(tokens: number, ms: number): number | null {
  return tokens > 0 && ms > 0 ? (tokens * 1000) / ms : null;
}
