/**
 * The whole page's state: the connection, the list of conversations, the one that is open.
 *
 * Threads stay in memory once opened, so an answer goes on while another chat is read. The address
 * bar's `#/c/<id>` names the open one.
 */
import { Api } from '../api';
import { newId } from '../ids';
import type { PictureLimits } from '../pictures';
import type { ModelObject } from '../protocol';
import { Store } from '../store';
import type { Conversation, Turn } from '../store';
import { branchUpTo, renewed } from '../transfer';
import type { Bundle } from '../transfer';
import { Transport } from '../transport';
import type { LinkState } from '../transport';
import { Thread } from './thread.svelte';

const KEY = 'mmserve.key';
const DEFAULT_LIMITS: PictureLimits = {
  maxPixels: 40_000_000,
  maxSide: 16_384,
  maxBytes: 20 * 1024 * 1024,
};

export class Chat {
  link = $state<LinkState>('connecting');
  model = $state.raw<ModelObject | null>(null);
  conversations = $state.raw<Conversation[]>([]);
  thread = $state.raw<Thread>() as Thread;
  private readonly threads = new Map<string, Thread>();
  private readonly transport: Transport;

  constructor(
    private readonly api: Api,
    private readonly store: Store,
  ) {
    this.transport = new Transport(api, {
      state: (state) => (this.link = state),
      model: (model) => (this.model = model),
    });
    this.thread = this.newThread();
  }

  static async start(): Promise<Chat> {
    const api = new Api(new URL('.', document.baseURI), localStorage.getItem(KEY));
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
  }

  /** The path up to a turn as a chat of its own. */
  async fork(thread: Thread, { id }: Turn): Promise<void> {
    const bundle = branchUpTo(await this.bundleOf(thread.conversation), id);
    await this.keep(renewed(bundle, Date.now()));
  }

  useKey(key: string): void {
    localStorage.setItem(KEY, key);
    this.api.key = key;
    this.link = 'connecting';
    this.transport.nudge();
  }

  private async bundleOf(conversation: Conversation): Promise<Bundle> {
    const { id } = conversation;
    const [turns, pictures] = await Promise.all([this.store.turns(id), this.store.pictures(id)]);
    return { conversation, turns, pictures };
  }

  /** Stores a conversation that came whole, and opens it. */
  private async keep(bundle: Bundle): Promise<void> {
    await this.store.putAll(bundle);
    this.conversations = [bundle.conversation, ...this.conversations];
    location.hash = `#/c/${bundle.conversation.id}`;
  }

  private async openAddress(): Promise<void> {
    const id = /^#\/c\/(\w+)$/.exec(location.hash)?.[1];
    const conversation = this.conversations.find((other) => other.id === id);
    if (conversation === undefined) {
      if (this.threads.has(this.thread.conversation.id)) this.thread = this.newThread();
      return;
    }
    const thread = this.threads.get(conversation.id) ?? (await this.loadThread(conversation));
    if (location.hash === `#/c/${conversation.id}`) this.thread = thread;
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
    const services = { api, store, transport, limits: () => limitsOf(this.model) };
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
