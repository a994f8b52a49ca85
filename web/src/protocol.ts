/**
 * The server's words as types: what is sent to and comes from `/v1/responses` and `/v1/files`.
 *
 * Only the fields this page reads are named. Knows nothing of sockets or the page.
 */

/** How finely a picture is looked at. */
export type Detail = 'auto' | 'low' | 'high';

export interface InputText {
  type: 'input_text';
  text: string;
}

export interface InputImage {
  type: 'input_image';
  file_id: string;
  detail: Detail;
}

export interface OutputText {
  type: 'output_text';
  text: string;
}

export type InputMessage =
  | { role: 'user'; content: (InputText | InputImage)[] }
  | { role: 'assistant'; content: OutputText[] };

/** The body of a `response.create`; the transport adds type and lane. */
export interface CreateBody {
  model: string;
  input: InputMessage[];
  previous_response_id: string | null;
  store: boolean;
  generate?: false;
  instructions?: string;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  repetition_penalty?: number;
  max_output_tokens?: number;
  seed?: number;
  truncation?: 'auto' | 'disabled';
  session_policy?: SessionPolicy | null;
}

/** How a chat goes on that has outgrown `window` text tokens. */
export interface SessionPolicy {
  window?: number;
  images?: 'all' | 'pinned';
  summary?: boolean;
}

/** What an answer was made without. */
export interface SessionReport {
  dropped_items?: number;
  dropped_images?: number;
  kept_images?: number;
  approximate?: boolean;
}

export interface Usage {
  input_tokens: number;
  output_tokens: number;
  input_tokens_details?: { cached_tokens?: number; image_tokens?: number };
  cache?: { vision_hits?: number; vision_misses?: number };
}

/** Milliseconds and token counts of one generation, as the server measured them. */
export interface Timings {
  queue_ms?: number;
  prompt_ms?: number;
  predicted_ms?: number;
  predicted_n?: number;
  draft_n?: number;
  draft_n_accepted?: number;
}

export interface ApiError {
  code: string | null;
  message: string;
}

export interface ResponseObject {
  id: string;
  status: 'queued' | 'in_progress' | 'completed' | 'incomplete' | 'failed' | 'cancelled';
  error?: ApiError | null;
  incomplete_details?: { reason?: string } | null;
  output?: { type: string; content?: { type: string; text?: string }[] }[];
  usage?: Usage | null;
  timings?: Timings | null;
  session?: SessionReport | null;
  previous_response_id?: string | null;
}

/** An item of a stored request. */
export interface StoredItem {
  type: string;
  role?: string;
  content?: {
    type: string;
    text?: string;
    image_url?: string;
    detail?: string;
    file_id?: string | null;
    sha256?: string;
  }[];
}

interface Sequenced {
  sequence_number: number;
  stream_id?: string;
}

export type LifeEvent = Sequenced & {
  type:
    | 'response.created'
    | 'response.queued'
    | 'response.in_progress'
    | 'response.completed'
    | 'response.incomplete'
    | 'response.failed';
  response: ResponseObject;
};

export type TextEvent =
  | (Sequenced & { type: 'response.output_text.delta'; delta: string })
  | (Sequenced & { type: 'response.output_text.done'; text: string });

/** Item and part events, which carry nothing the page needs beyond their number. */
export type FrameEvent = Sequenced & {
  type:
    | 'response.output_item.added'
    | 'response.output_item.done'
    | 'response.content_part.added'
    | 'response.content_part.done';
};

export type ResponseEvent = LifeEvent | TextEvent | FrameEvent;

/** An error that belongs to no response: a refused request or a broken frame. */
export interface ErrorEvent {
  type: 'error';
  stream_id?: string;
  error?: { code?: string | null; message: string };
  code?: string | null;
  message?: string;
}

export type ServerEvent = ResponseEvent | ErrorEvent;

/** An image that a stored conversation holds; `state` is where its KV is. */
export interface HeldImage {
  number: number | null;
  item_id: string | null;
  file_id: string | null;
  sha256: string;
  tokens: number | null;
  state: 'active' | 'host' | 'disk' | 'cold' | 'absent';
  bytes: number;
  hits: number;
  pinned: boolean;
  forgotten: 'recompute' | 'mark' | null;
}

export type ImageAction = 'pin' | 'unpin' | 'forget' | 'restore';

export interface FileObject {
  id: string;
}

export interface ModelObject {
  id: string;
  max_model_len?: number;
  image_details?: Record<string, number>;
  image_crops?: { above: number; most: number };
  limits?: Record<string, unknown>;
}

/** Whether a response has said its last word with this event. */
export function isTerminal(event: ResponseEvent): event is LifeEvent {
  return (
    event.type === 'response.completed' ||
    event.type === 'response.incomplete' ||
    event.type === 'response.failed'
  );
}

/** The text of a response's answer, or null when the object carries no output. */
export function outputText(response: ResponseObject): string | null {
  const parts = (response.output ?? [])
    .filter((item) => item.type === 'message')
    .flatMap((item) => item.content ?? [])
    .filter((part) => part.type === 'output_text');
  return parts.length === 0 ? null : parts.map((part) => part.text ?? '').join('');
}

/** The error of an error body or event in either of its two shapes. */
export function errorOf(body: unknown, fallback: string): ApiError {
  const outer = (body ?? {}) as ErrorEvent;
  const inner = outer.error ?? outer;
  return { code: inner.code ?? null, message: inner.message ?? fallback };
}
