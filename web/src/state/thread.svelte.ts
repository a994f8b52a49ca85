/**
 * One conversation at work: its turns, the message being written, the answer being streamed.
 *
 * Owns the order of things: upload, send, stream, store; and what to do when the server has
 * forgotten a response or a file. Knows nothing of the page's layout.
 */
import { fail, isRunning, newAnswer, reduce } from '../answer';
import type { Answer } from '../answer';
import type { Api } from '../api';
import { Frame } from '../frame';
import { newId } from '../ids';
import { chainBody, contextOf, fullBody } from '../path';
import type { FileIds } from '../path';
import type { PictureLimits } from '../pictures';
import type { ApiError, ResponseEvent } from '../protocol';
import type { Conversation, Picture, Store, Turn } from '../store';
import type { Call, CallBody, Transport } from '../transport';
import { attachmentError, Tray } from './tray.svelte';

export interface Services {
  api: Api;
  store: Store;
  transport: Transport;
  limits: () => PictureLimits;
}

const WARM_MS = 300;
const SAVE_MS = 400;
const STOP_MS = 2000;
const TITLE_LENGTH = 60;

/** What has been tried for one turn, so that no remedy is tried twice. */
interface Remedies {
  full: boolean;
  uploaded: boolean;
}

export class Thread {
  turns = $state.raw<Turn[]>([]);
  pictureUrls = $state.raw<ReadonlyMap<string, string>>(new Map());
  draft = $state('');
  sending = $state(false);
  readonly tray: Tray;
  private pictures = new Map<string, Picture>();
  private call: Call | null = null;
  private warm: Call | null = null;
  private warmTimer: ReturnType<typeof setTimeout> | undefined;
  private savedAt = 0;

  constructor(
    public conversation: Conversation,
    private readonly services: Services,
    private readonly listed: (conversation: Conversation) => void,
  ) {
    this.tray = new Tray(services.api, conversation.id, services.limits, () => this.prewarmSoon());
  }

  get running(): boolean {
    const last = this.turns.at(-1);
    return last !== undefined && isRunning(last.answer);
  }

  /** Reads the stored turns and goes on with an answer that a reload interrupted. */
  async load(): Promise<void> {
    const { id } = this.conversation;
    const { store, transport } = this.services;
    const [turns, pictures] = await Promise.all([store.turns(id), store.pictures(id)]);
    this.keep(pictures);
    this.turns = turns;
    const last = turns.at(-1);
    if (last === undefined || !isRunning(last.answer)) return;
    const { responseId, sequence } = last.answer;
    if (responseId === null) this.ask(last.id);
    else this.call = transport.follow(responseId, sequence, this.listener(last.id));
  }

  /** Waits for the uploads, then asks; keeps the message when a picture failed. */
  async send(): Promise<void> {
    const text = this.draft.trim();
    const empty = text === '' && this.tray.attachments.length === 0;
    if (empty || this.running || this.sending || this.tray.failed) return;
    const sentAt = Date.now();
    this.sending = true;
    this.draft = '';
    const pictures = await this.tray.take();
    this.sending = false;
    clearTimeout(this.warmTimer);
    if (pictures === null) {
      this.draft = text;
      return;
    }
    this.keep(pictures);
    const turn: Turn = {
      id: newId(),
      conversationId: this.conversation.id,
      position: (this.turns.at(-1)?.position ?? -1) + 1,
      text,
      pictureIds: pictures.map(({ id }) => id),
      answer: newAnswer(sentAt),
    };
    this.turns = [...this.turns, turn];
    this.ask(turn.id);
    await this.saveNew(turn, pictures);
  }

  retry(): void {
    const last = this.turns.at(-1);
    if (last === undefined || this.running) return;
    this.update(last.id, () => newAnswer(Date.now()));
    this.ask(last.id);
  }

  /** Ends the running answer; its text so far stays. */
  stop(): void {
    const { call } = this;
    const turn = this.turns.at(-1);
    if (turn === undefined || !isRunning(turn.answer)) return;
    const end = (): void => {
      if (call !== null) this.services.transport.drop(call);
      this.update(turn.id, (answer) =>
        isRunning(answer) ? { ...answer, status: 'stopped' } : answer,
      );
    };
    if (call !== null && this.services.transport.stop(call)) setTimeout(end, STOP_MS);
    else end();
  }

  /** Before the conversation is deleted: nothing of it goes on. */
  discard(): void {
    clearTimeout(this.warmTimer);
    for (const call of [this.call, this.warm]) {
      if (call === null || call.phase === 'ended') continue;
      this.services.transport.stop(call);
      this.services.transport.drop(call);
    }
    for (const url of this.pictureUrls.values()) URL.revokeObjectURL(url);
    this.turns = [];
  }

  private ask(turnId: string, tried: Remedies = { full: false, uploaded: false }): void {
    const turn = this.find(turnId);
    if (turn === undefined || !isRunning(turn.answer)) return;
    const context = contextOf(this.turns, turn);
    const makeBody = tried.full ? fullBody : chainBody;
    const body = makeBody(context, turn, this.fileIds());
    this.call = this.services.transport.create(
      this.conversation.id,
      body,
      this.listener(turnId, (error) => this.remedy(turnId, error, tried)),
    );
  }

  /** True when a fault of the server's memory is being repaired and the turn asked again. */
  private remedy(turnId: string, error: ApiError, tried: Remedies): boolean {
    if (error.code === 'previous_response_not_found' && !tried.full) {
      this.ask(turnId, { ...tried, full: true });
      return true;
    }
    if (error.code !== 'file_not_found' || tried.uploaded) return false;
    void this.uploadAgain(turnId)
      .then(() => this.ask(turnId, { ...tried, uploaded: true }))
      .catch((reason: unknown) =>
        this.update(turnId, (answer) => fail(answer, attachmentError(reason))),
      );
    return true;
  }

  private async uploadAgain(turnId: string): Promise<void> {
    const turn = this.find(turnId);
    if (turn === undefined) return;
    const ids = [...contextOf(this.turns, turn), turn].flatMap(({ pictureIds }) => pictureIds);
    for (const picture of ids.flatMap((id) => this.pictures.get(id) ?? [])) {
      const fileId = await this.services.api.upload(picture.blob, picture.name);
      this.pictures.set(picture.id, { ...picture, fileId });
      await this.services.store.put('pictures', { ...picture, fileId });
    }
  }

  /** Hears a response and applies what came once a frame. */
  private listener(turnId: string, remedy: (error: ApiError) => boolean = () => false) {
    let events: { event: ResponseEvent; at: number }[] = [];
    const frame = new Frame(() => {
      const arrived = events;
      events = [];
      const apply = (answer: Answer): Answer =>
        arrived.reduce((state, { event, at }) => reduce(state, event, at), answer);
      this.update(turnId, apply);
    });
    return {
      event: (event: ResponseEvent): void => {
        events.push({ event, at: Date.now() });
        frame.request();
      },
      fault: (error: ApiError): void => {
        if (!remedy(error)) this.update(turnId, (answer) => fail(answer, error));
      },
    };
  }

  private update(turnId: string, change: (answer: Answer) => Answer): void {
    const before = this.find(turnId);
    if (before === undefined) return;
    const turn = { ...before, answer: change(before.answer) };
    this.turns = this.turns.map((other) => (other.id === turnId ? turn : other));
    const ended = !isRunning(turn.answer);
    const begun = before.answer.responseId !== turn.answer.responseId;
    if (begun || ended || Date.now() - this.savedAt > SAVE_MS) {
      this.savedAt = Date.now();
      void this.services.store.put('turns', turn);
    }
    if (ended) this.prewarmSoon();
  }

  /** Once pictures have been attached and a moment has passed, lets the server read them ahead. */
  private prewarmSoon(): void {
    clearTimeout(this.warmTimer);
    this.warmTimer = setTimeout(() => this.prewarm(), WARM_MS);
  }

  private prewarm(): void {
    const { transport } = this.services;
    if (this.warm !== null && this.warm.phase !== 'ended') transport.stop(this.warm);
    const pictures = this.tray.pictures();
    if (this.running || pictures.length === 0 || !this.tray.ready) return;
    const position = (this.turns.at(-1)?.position ?? -1) + 1;
    const pictureIds = pictures.map(({ id }) => id);
    const next = { position, text: '', pictureIds } as Turn;
    const files = new Map([...this.fileIds(), ...fileIdsOf(pictures)]);
    const body: CallBody = {
      ...chainBody(contextOf(this.turns, next), next, files),
      generate: false,
      store: false,
    };
    const deaf = { event: () => undefined, fault: () => undefined };
    this.warm = transport.create(this.conversation.id, body, deaf);
  }

  private async saveNew(turn: Turn, pictures: Picture[]): Promise<void> {
    const { store } = this.services;
    const { title } = this.conversation;
    const now = Date.now();
    this.conversation = {
      ...this.conversation,
      title: title === '' ? turn.text.slice(0, TITLE_LENGTH) : title,
      updatedAt: now,
    };
    this.listed(this.conversation);
    await Promise.all([
      store.put('conversations', this.conversation),
      store.put('turns', turn),
      ...pictures.map((picture) => store.put('pictures', picture)),
    ]);
  }

  private keep(pictures: readonly Picture[]): void {
    const urls = new Map(this.pictureUrls);
    for (const picture of pictures) {
      this.pictures.set(picture.id, picture);
      urls.set(picture.id, URL.createObjectURL(picture.blob));
    }
    this.pictureUrls = urls;
  }

  private find(turnId: string): Turn | undefined {
    return this.turns.find(({ id }) => id === turnId);
  }

  private fileIds(): FileIds {
    return fileIdsOf(this.pictures.values());
  }
}

function fileIdsOf(pictures: Iterable<Picture>): Map<string, string> {
  return new Map(
    [...pictures].flatMap(({ id, fileId }) => (fileId === null ? [] : [[id, fileId]])),
  );
}
