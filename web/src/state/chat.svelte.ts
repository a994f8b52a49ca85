/**
 * The whole page's state: the connection, the list of conversations, the one that is open.
 *
 * Threads stay in memory once opened, so an answer goes on while another chat is read. The address
 * bar's `#/c/<id>` names the open one; `#/r/<response>` one that the server holds.
 */
import { Api, ApiFault } from '../api';
import { download } from '../download';
import type { NoticeKey } from '../i18n/en';
import { newId } from '../ids';
import type { PictureLimits } from '../pictures';
import type { ModelObject } from '../protocol';
import { Store } from '../store';
import type { Conversation, Turn } from '../store';
import { copyText } from '../text/clipboard';
import {
  branchUpTo,
  fileName,
  fromJson,
  renewed,
  toJson,
  toMarkdown,
  UnreadableFile,
} from '../transfer';
import type { Bundle, MarkdownLabels } from '../transfer';
import { Tabs } from '../tabs';
import { Transport } from '../transport';
import type { LinkState } from '../transport';
import { pathTo } from '../tree';
import { storedKey, storeKey } from './keyring';
import { settings } from './settings.svelte';
import { Thread } from './thread.svelte';

const DEFAULT_LIMITS: PictureLimits = {
  maxPixels: 40_000_000,
  maxSide: 16_384,
  maxBytes: 20 * 1024 * 1024,
};

export class Chat {
  link = $state<LinkState>('connecting');
  models = $state.raw<ModelObject[]>([]);
  model = $state.raw<ModelObject | null>(null);
  conversations = $state.raw<Conversation[]>([]);
  thread = $state.raw<Thread>() as Thread;
  notice = $state<NoticeKey | null>(null);
  private readonly threads = new Map<string, Thread>();
  private readonly transport: Transport;
  private modelsCame = (): void => undefined;
  private readonly modelsKnown = new Promise<void>((resolve) => (this.modelsCame = resolve));
  private readonly tabs = new Tabs((id) => void this.heard(id));

  constructor(
    readonly api: Api,
    private readonly store: Store,
  ) {
    this.transport = new Transport(api, {
      state: (state) => (this.link = state),
      models: (models) => this.choose(models),
    });
    this.thread = this.newThread();
  }

  static async start(): Promise<Chat> {
    const api = new Api(new URL('.', document.baseURI), storedKey());
    const chat = new Chat(api, await Store.open());
    chat.conversations = await chat.store.conversations();
    await chat.openAddress();
    void chat.transport.run();
    window.addEventListener('hashchange', () => void chat.openAddress());
    window.addEventListener('online', () => chat.transport.nudge());
    document.addEventListener('visibilitychange', () => {
      if (document.visibilityState === 'visible') chat.transport.nudge();
    });
    return chat;
  }

  get hasKey(): boolean {
    return this.api.key !== null;
  }

  /** Opens an empty thread; it enters the list with its first message. */
  newChat(): void {
    if (this.thread.path.length > 0) this.thread = this.newThread();
    location.hash = '';
  }

  async remove(id: string): Promise<void> {
    this.threads.get(id)?.discard();
    this.threads.delete(id);
    this.conversations = this.conversations.filter((conversation) => conversation.id !== id);
    if (this.thread.conversation.id === id) {
      this.thread = this.newThread();
      location.hash = '';
    }
    await this.store.deleteConversation(id);
    this.tabs.tell(id);
  }

  /** Changes a conversation's title or pins it. */
  change(id: string, what: Pick<Partial<Conversation>, 'title' | 'pinned'>): void {
    this.conversations = this.conversations.map((conversation) => {
      if (conversation.id !== id) return conversation;
      const changed = { ...conversation, ...what };
      const thread = this.threads.get(id);
      if (thread === undefined)
        void this.store.put('conversations', changed).then(() => this.tabs.tell(id));
      else thread.change(what);
      return changed;
    });
  }

  /** The path up to a turn as a chat of its own. */
  async fork(thread: Thread, { id }: Turn): Promise<void> {
    const bundle = branchUpTo(await this.bundleOf(thread.conversation), id);
    await this.keep(renewed(bundle, Date.now()));
  }

  /** The conversations that have `query` in their title or in what was said. */
  async search(query: string): Promise<Set<string>> {
    const wanted = query.toLocaleLowerCase();
    const titled = this.conversations.filter(({ title }) =>
      title.toLocaleLowerCase().includes(wanted),
    );
    const said = await this.store.conversationsSaying(wanted);
    return new Set([...titled.map(({ id }) => id), ...said]);
  }

  async exportJson(id: string): Promise<void> {
    const bundle = await this.bundle(id);
    if (bundle === null) return;
    download(fileName(bundle.conversation.title, 'json'), 'application/json', await toJson(bundle));
  }

  async exportMarkdown(id: string, labels: MarkdownLabels): Promise<void> {
    const bundle = await this.bundle(id);
    if (bundle === null) return;
    const text = toMarkdown(bundle, labels);
    download(fileName(bundle.conversation.title, 'md'), 'text/markdown', text);
  }

  async import(file: File): Promise<void> {
    try {
      await this.keep(fromJson(await file.text(), Date.now()));
      this.notice = 'imported';
    } catch (reason) {
      if (!(reason instanceof UnreadableFile)) throw reason;
      this.notice = 'unreadableFile';
    }
  }

  /** Copies an address under which any browser finds what the server stores of a conversation. */
  async copyLink(id: string): Promise<void> {
    const bundle = await this.bundle(id);
    const path = bundle === null ? [] : pathTo(bundle.turns, bundle.conversation.leafId);
    const responseId = path.findLast(({ answer }) => answer.responseId !== null)?.answer.responseId;
    if (responseId === undefined || responseId === null) {
      this.notice = 'nothingToLink';
      return;
    }
    await copyText(new URL(`#/r/${responseId}`, document.baseURI).href);
    this.notice = 'linkCopied';
  }

  useKey(key: string, keep: boolean): void {
    storeKey(key, keep);
    this.api.key = key;
    this.link = 'connecting';
    this.transport.nudge();
    void this.openAddress();
  }

  forgetKey(): void {
    storeKey(null, false);
    location.reload();
  }

  useModel(id: string): void {
    settings.set({ model: id });
    this.choose(this.models);
    if (this.model !== null) this.transport.use(this.model);
  }

  private choose(models: ModelObject[]): ModelObject | null {
    this.models = models;
    this.model = models.find(({ id }) => id === settings.options.model) ?? models[0] ?? null;
    if (this.model !== null) this.modelsCame();
    return this.model;
  }

  private async bundle(id: string): Promise<Bundle | null> {
    const conversation = this.conversations.find((other) => other.id === id);
    return conversation === undefined ? null : this.bundleOf(conversation);
  }

  private async bundleOf({ id }: Conversation): Promise<Bundle> {
    const [all, turns, pictures] = await Promise.all([
      this.store.conversations(),
      this.store.turns(id),
      this.store.pictures(id),
    ]);
    const conversation = all.find((other) => other.id === id) as Conversation;
    return { conversation, turns, pictures };
  }

  /** Stores a conversation that came whole, and opens it. */
  private async keep(bundle: Bundle): Promise<void> {
    await this.store.putAll(bundle);
    this.tabs.tell(bundle.conversation.id);
    this.conversations = [bundle.conversation, ...this.conversations];
    location.hash = `#/c/${bundle.conversation.id}`;
  }

  private async openAddress(): Promise<void> {
    const [, kind, id] = /^#\/(c|r)\/([\w-]+)$/.exec(location.hash) ?? [];
    if (kind === 'r' && id !== undefined) return this.openResponse(id);
    const conversation = this.conversations.find((other) => other.id === id);
    if (conversation === undefined) {
      if (this.threads.has(this.thread.conversation.id)) this.thread = this.newThread();
      return;
    }
    const thread = this.threads.get(conversation.id) ?? (await this.loadThread(conversation));
    if (location.hash === `#/c/${conversation.id}`) this.thread = thread;
  }

  /** Shows the conversation that a response ends: ours, or what the server has of it. */
  private async openResponse(responseId: string): Promise<void> {
    const turn = await this.store.turnAnsweredBy(responseId);
    if (turn !== undefined) {
      location.replace(`#/c/${turn.conversationId}`);
      return;
    }
    const { fetchConversation } = await import('../remote');
    try {
      await this.keep(await fetchConversation(this.api, responseId, Date.now()));
    } catch (reason) {
      // Without a key there is another try once it is known.
      if (reason instanceof ApiFault && reason.status === 401) return;
      this.notice = reason instanceof ApiFault ? 'linkGone' : 'linkUnreachable';
    }
  }

  /** Another tab has changed a conversation. */
  private async heard(id: string): Promise<void> {
    this.conversations = await this.store.conversations();
    const conversation = this.conversations.find((other) => other.id === id);
    const thread = this.threads.get(id);
    if (conversation !== undefined) await thread?.reload(conversation);
    else if (thread !== undefined) {
      thread.discard();
      this.threads.delete(id);
      if (this.thread === thread) this.thread = this.newThread();
    }
  }

  private async loadThread(conversation: Conversation): Promise<Thread> {
    const thread = this.makeThread(conversation);
    this.threads.set(conversation.id, thread);
    await thread.load();
    return thread;
  }

  private newThread(): Thread {
    const now = Date.now();
    const times = { createdAt: now, updatedAt: now };
    return this.makeThread({ id: newId(), title: '', ...times, leafId: null, pinned: false });
  }

  private makeThread(conversation: Conversation): Thread {
    const { api, store, transport } = this;
    const services = {
      ...{ api, store, transport },
      limits: () => this.modelsKnown.then(() => limitsOf(this.model)),
      stored: (id: string) => this.tabs.tell(id),
    };
    const thread: Thread = new Thread(conversation, services, (listed) =>
      this.list(listed, thread),
    );
    return thread;
  }

  private list(conversation: Conversation, thread: Thread): void {
    const others = this.conversations.filter(({ id }) => id !== conversation.id);
    this.conversations = [conversation, ...others];
    if (this.threads.has(conversation.id)) return;
    this.threads.set(conversation.id, thread);
    if (this.thread === thread) history.replaceState(null, '', `#/c/${conversation.id}`);
  }
}

function limitsOf(model: ModelObject | null): PictureLimits {
  const told = model?.limits ?? {};
  const number = (name: string, fallback: number): number => {
    const value = told[name];
    return typeof value === 'number' && value > 0 ? value : fallback;
  };
  return {
    maxPixels: number('max_image_pixels', DEFAULT_LIMITS.maxPixels),
    maxSide: number('max_image_side', DEFAULT_LIMITS.maxSide),
    maxBytes: number('max_image_bytes', DEFAULT_LIMITS.maxBytes),
  };
}
