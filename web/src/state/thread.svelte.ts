/**
 * One conversation at work: its tree of turns, the message being written, answers being streamed.
 *
 * Owns the order of things: upload, send, stream, store; and what to do when the server has
 * forgotten a response or a file. Knows nothing of the page's layout.
 */
import { fail, isRunning, newAnswer, reduce } from '../answer';
import type { Answer } from '../answer';
import { continueBody, goOn, halt } from '../continuing';
import type { Chunk } from '../continuing';
import type { Api } from '../api';
import { detailIn } from '../detail';
import { Frame } from '../frame';
import { newId } from '../ids';
import { chainBody, contextOf, fullBody, isChained } from '../path';
import { requestOptions } from '../options';
import type { PictureLimits } from '../pictures';
import type { ApiError, Detail, ResponseEvent } from '../protocol';
import type { Conversation, Picture, Store, Turn } from '../store';
import { readEvents } from '../sse';
import type { Call, Transport } from '../transport';
import { answerVersions, newestLeaf, pathTo } from '../tree';
import { Album, fileIdsOf } from './album.svelte';
import { Draft } from './draft.svelte';
import { settings } from './settings.svelte';
import { attachmentError, Tray } from './tray.svelte';
import { Warmer } from './warmer';
import type { Warming } from './warmer';

export interface Services {
  api: Api;
  store: Store;
  transport: Transport;
  limits: () => Promise<PictureLimits>;
  /** Hears that something of this conversation was stored. */
  stored: (conversationId: string) => void;
}

/** What has been tried for one turn, so that no remedy is tried twice. */
interface Remedies {
  full: boolean;
  uploaded: boolean;
}

/** A turn whose question is being written anew. */
export interface Editing {
  turnId: string;
  draft: Draft;
}

type NewTurn = Pick<Turn, 'parentId' | 'askId' | 'text' | 'pictureIds' | 'detail'>;

const SAVE_MS = 400;
const STOP_MS = 2000;
const TITLE_LENGTH = 60;

export class Thread {
  conversation = $state.raw<Conversation>() as Conversation;
  turns = $state.raw<Turn[]>([]);
  leafId = $state<string | null>(null);
  /** How often something was asked here since it was opened. */
  asked = $state(0);
  editing = $state.raw<Editing | null>(null);
  readonly path = $derived(pathTo(this.turns, this.leafId));
  readonly album: Album;
  readonly draft: Draft;
  private readonly warmer: Warmer;
  private readonly calls = new Map<string, Call>();
  private readonly continued = new Map<string, AbortController>();
  private savedAt = 0;

  constructor(
    conversation: Conversation,
    private readonly services: Services,
    private readonly listed: (conversation: Conversation) => void,
  ) {
    this.conversation = conversation;
    this.leafId = conversation.leafId;
    this.album = new Album(services.api, services.store);
    this.warmer = new Warmer(services.transport, conversation.id, () => this.warming());
    const key = (): string =>
      this.turns.length === 0 && conversation.leafId === null ? 'new' : conversation.id;
    this.draft = new Draft(this.newTray(), key);
  }

  get running(): boolean {
    const last = this.path.at(-1);
    return last !== undefined && isRunning(last.answer);
  }

  /** Reads the stored turns and goes on with answers that a reload interrupted. */
  async load(): Promise<void> {
    const { id } = this.conversation;
    const { store, transport } = this.services;
    const [turns, pictures] = await Promise.all([store.turns(id), store.pictures(id)]);
    this.album.keep(pictures);
    this.turns = turns;
    if (this.path.length === 0) this.leafId = newestLeaf(turns, null);
    for (const { id, answer } of turns) {
      const { responseId, sequence } = answer;
      if (!isRunning(answer)) continue;
      if (responseId === null && answer.text !== '') this.update(id, (old) => halt(old, null));
      else if (responseId === null) this.ask(id);
      else this.calls.set(id, transport.follow(responseId, sequence, this.listener(id)));
    }
  }

  /** Another tab has stored something: shows it, unless something is going on here. */
  async reload(conversation: Conversation): Promise<void> {
    if (this.busy || this.editing !== null) return;
    const { store, transport } = this.services;
    const [turns, pictures] = await Promise.all([
      store.turns(conversation.id),
      store.pictures(conversation.id),
    ]);
    if (this.busy) return;
    this.album.keep(pictures);
    this.turns = turns;
    this.conversation = conversation;
    this.leafId = conversation.leafId;
    for (const { id, answer } of turns) {
      // One that has not begun is the other tab's to ask.
      if (!isRunning(answer) || answer.responseId === null) continue;
      const { responseId, sequence } = answer;
      this.calls.set(id, transport.follow(responseId, sequence, this.listener(id)));
    }
  }

  private get busy(): boolean {
    const calling = [...this.calls.values()].some(({ phase }) => phase !== 'ended');
    return calling || this.continued.size > 0;
  }

  /** Sends the message that was written; it stays where a picture failed. */
  async send(): Promise<void> {
    if (this.running) return;
    const written = await this.draft.take();
    if (written === null) return;
    this.warmer.cancel();
    const { text, pictures, detail, sentAt } = written;
    this.album.keep(pictures);
    const parentId = this.leafId;
    const pictureIds = pictures.map(({ id }) => id);
    const asked = { parentId, askId: newId(), text, pictureIds, ...detailIn(detail) };
    await this.add(asked, pictures, sentAt);
  }

  /** How finely the pictures of the message being written are looked at. */
  look(detail: Detail): void {
    this.draft.detail = detail;
    this.warmer.soon();
  }

  /** Opens a turn's question for writing it anew. */
  edit(turn: Turn): void {
    const draft = new Draft(this.newTray());
    draft.text = turn.text;
    draft.detail = turn.detail ?? 'auto';
    draft.tray.addKnown(this.album.of(turn.pictureIds));
    this.editing = { turnId: turn.id, draft };
  }

  cancelEdit(): void {
    this.editing?.draft.tray.clear();
    this.editing = null;
  }

  /** Asks the edited question as another version of it; what was asked before stays. */
  async sendEdit(): Promise<void> {
    const { editing } = this;
    const turn = editing === null ? undefined : this.find(editing.turnId);
    const written = await editing?.draft.take();
    if (turn === undefined || !written) return;
    this.editing = null;
    const { text, pictures, detail, sentAt } = written;
    this.album.keep(pictures);
    const { parentId } = turn;
    const pictureIds = pictures.map(({ id }) => id);
    const asked = { parentId, askId: newId(), text, pictureIds, ...detailIn(detail) };
    await this.add(asked, pictures, sentAt);
  }

  /** Another answer to the same question. */
  async regenerate(turn: Turn): Promise<void> {
    const { parentId, askId, text, pictureIds, detail } = turn;
    const asked = { parentId, askId, text, pictureIds, ...detailIn(detail) };
    await this.add(asked, [], Date.now());
  }

  /** Shows a turn and what was last said after it. */
  show(turnId: string): void {
    this.leafId = newestLeaf(this.turns, turnId);
    this.editing = null;
    this.change({ leafId: this.leafId });
  }

  /** Asks a turn again whose answer failed. */
  retry(turn: Turn): void {
    if (isRunning(turn.answer)) return;
    this.update(turn.id, () => newAnswer(Date.now()));
    this.ask(turn.id);
  }

  /** Goes on with an answer that was cut or stopped. */
  async goOn(turn: Turn): Promise<void> {
    const { api } = this.services;
    const context = contextOf(this.turns, turn);
    const ids = [...context, turn].flatMap(({ pictureIds }) => pictureIds);
    const abort = new AbortController();
    this.continued.set(turn.id, abort);
    this.update(turn.id, (answer) => ({
      ...answer,
      ...{ status: 'streaming', error: null, responseId: null },
    }));
    try {
      await this.album.uploadAgain(this.album.of(ids).filter(({ fileId }) => fileId === null));
      const body = continueBody(context, turn, this.album.fileIds(), settings.options);
      for await (const chunk of readEvents(await api.chat(body, abort.signal))) {
        this.update(turn.id, (answer) => goOn(answer, chunk as Chunk, Date.now()));
      }
      this.update(turn.id, (answer) => halt(answer, null));
    } catch (reason) {
      const error = abort.signal.aborted ? null : attachmentError(reason);
      this.update(turn.id, (answer) => halt(answer, error));
    } finally {
      this.continued.delete(turn.id);
    }
  }

  /** Ends the running answer; its text so far stays. */
  stop(): void {
    const turn = this.path.at(-1);
    if (turn === undefined || !isRunning(turn.answer)) return;
    const continued = this.continued.get(turn.id);
    if (continued !== undefined) return continued.abort();
    const call = this.calls.get(turn.id);
    const { transport } = this.services;
    const end = (): void => {
      if (call !== undefined) transport.drop(call);
      this.update(turn.id, (answer) =>
        isRunning(answer) ? { ...answer, status: 'stopped' } : answer,
      );
    };
    if (call !== undefined && transport.stop(call)) setTimeout(end, STOP_MS);
    else end();
  }

  /** Attaches pictures of this conversation to the message being written. */
  attach(pictureIds: readonly string[], draft: Draft = this.draft): void {
    draft.tray.addKnown(this.album.of(pictureIds));
  }

  change(what: Partial<Conversation>): void {
    this.conversation = { ...this.conversation, ...what };
    const { id } = this.conversation;
    void this.services.store
      .put('conversations', this.conversation)
      .then(() => this.services.stored(id));
  }

  /** Before the conversation is deleted: nothing of it goes on. */
  discard(): void {
    this.warmer.discard();
    for (const abort of this.continued.values()) abort.abort();
    for (const call of this.calls.values()) {
      if (call.phase === 'ended') continue;
      this.services.transport.stop(call);
      this.services.transport.drop(call);
    }
    this.album.discard();
    this.turns = [];
  }

  private newTray(): Tray {
    const { api, limits } = this.services;
    return new Tray(api, this.conversation.id, this.album, limits, () => this.warmer.soon());
  }

  private async add(asked: NewTurn, pictures: Picture[], sentAt: number): Promise<void> {
    const turn: Turn = {
      ...asked,
      id: newId(),
      conversationId: this.conversation.id,
      // Never before its parent, whatever the clock does.
      createdAt: Math.max(sentAt, ...this.turns.map(({ createdAt }) => createdAt + 1)),
      answer: newAnswer(sentAt),
    };
    this.turns = [...this.turns, turn];
    this.leafId = turn.id;
    this.asked++;
    this.ask(turn.id);
    await this.saveNew(turn, pictures);
  }

  private ask(turnId: string, tried: Remedies = { full: false, uploaded: false }): void {
    const turn = this.find(turnId);
    if (turn === undefined || !isRunning(turn.answer)) return;
    const context = contextOf(this.turns, turn);
    const full = tried.full || !isChained(context);
    const sent = (full ? [...context, turn] : [turn]).flatMap(({ pictureIds }) => pictureIds);
    const lacking = this.album.of(sent).filter(({ fileId }) => fileId === null);
    if (lacking.length > 0) return this.askWith(lacking, turnId, tried);
    const makeBody = full ? fullBody : chainBody;
    const variation = answerVersions(this.turns, turn).indexOf(turn);
    const body = {
      ...makeBody(context, turn, this.album.fileIds()),
      ...requestOptions(settings.options, variation),
    };
    const listener = this.listener(turnId, (error) => this.remedy(turnId, error, tried));
    this.calls.set(turnId, this.services.transport.create(this.conversation.id, body, listener));
  }

  /** True when a fault of the server's memory is being repaired and the turn asked again. */
  private remedy(turnId: string, error: ApiError, tried: Remedies): boolean {
    if (error.code === 'previous_response_not_found' && !tried.full) {
      this.ask(turnId, { ...tried, full: true });
      return true;
    }
    if (error.code !== 'file_not_found' || tried.uploaded) return false;
    const turn = this.find(turnId);
    if (turn === undefined) return false;
    const ids = [...contextOf(this.turns, turn), turn].flatMap(({ pictureIds }) => pictureIds);
    this.askWith(this.album.of(ids), turnId, { ...tried, uploaded: true });
    return true;
  }

  /** Asks once these pictures are with the server. */
  private askWith(pictures: readonly Picture[], turnId: string, tried: Remedies): void {
    void this.album
      .uploadAgain(pictures)
      .then(() => this.ask(turnId, tried))
      .catch((reason: unknown) =>
        this.update(turnId, (answer) => fail(answer, attachmentError(reason))),
      );
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
      void this.services.store.put('turns', turn).then(() => {
        if (begun || ended) this.services.stored(this.conversation.id);
      });
    }
    if (ended) this.warmer.soon();
  }

  private warming(): Warming | null {
    const { tray, detail } = this.draft;
    const pictures = tray.pictures();
    if (this.running || pictures.length === 0 || !tray.ready) return null;
    const pictureIds = pictures.map(({ id }) => id);
    const next = { parentId: this.leafId, text: '', pictureIds, ...detailIn(detail) };
    const files = new Map([...this.album.fileIds(), ...fileIdsOf(pictures)]);
    const context = contextOf(this.turns, next);
    const makeBody = isChained(context) ? chainBody : fullBody;
    const body = { ...makeBody(context, next, files), ...requestOptions(settings.options) };
    return { body, done: () => tray.markWarm(pictureIds) };
  }

  private async saveNew(turn: Turn, pictures: Picture[]): Promise<void> {
    const { store } = this.services;
    const { title } = this.conversation;
    this.conversation = {
      ...this.conversation,
      title: title === '' ? turn.text.slice(0, TITLE_LENGTH) : title,
      updatedAt: Date.now(),
      leafId: turn.id,
    };
    this.listed(this.conversation);
    await Promise.all([
      store.put('conversations', this.conversation),
      store.put('turns', turn),
      ...pictures.map((picture) => store.put('pictures', picture)),
    ]);
  }

  private find(turnId: string): Turn | undefined {
    return this.turns.find(({ id }) => id === turnId);
  }
}
