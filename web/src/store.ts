/**
 * Conversations, turns and pictures in the browser's IndexedDB.
 *
 * Records are plain data, written whole; a turn's text and its last event number are one record,
 * so what is read after a reload can always be resumed. A browser that refuses storage gets a
 * store that forgets.
 */
import type { Answer } from './answer';
import type { Detail } from './protocol';

/** `leafId`: the last turn of the path that is shown. */
export interface Conversation {
  id: string;
  title: string;
  createdAt: number;
  updatedAt: number;
  leafId: string | null;
  pinned: boolean;
}

/**
 * A question with one answer. Turns with one `askId` are answers to the same question. `detail`: of
 * its pictures; as the model does by itself where there is none.
 */
export interface Turn {
  id: string;
  conversationId: string;
  parentId: string | null;
  askId: string;
  createdAt: number;
  text: string;
  pictureIds: string[];
  detail?: Detail;
  answer: Answer;
}

/**
 * A picture as it was sent. `fileId` is the server's name for it, valid for some hours; `hash` the
 * SHA-256 of its bytes, where the browser could tell. `preview`: smaller, to be shown; `original`:
 * the file before it was shrunk, where it was to be kept.
 */
export interface Picture {
  id: string;
  conversationId: string;
  name: string;
  blob: Blob;
  width: number;
  height: number;
  fileId: string | null;
  hash: string | null;
  preview?: Blob | null;
  original?: Blob | null;
}

interface Records {
  conversations: Conversation;
  turns: Turn;
  pictures: Picture;
}

type Table = keyof Records;

interface Whole {
  conversation: Conversation;
  turns: readonly Turn[];
  pictures: readonly Picture[];
}

const VERSION = 2;
const OWNED: Table[] = ['turns', 'pictures'];
const TABLES: Table[] = ['conversations', ...OWNED];

export class Store {
  private constructor(private readonly db: IDBDatabase | null) {}

  static async open(name = 'mmserve'): Promise<Store> {
    try {
      const database = await openDatabase(name);
      // A newer page in another tab must not wait for this one.
      database.onversionchange = () => database.close();
      return new Store(database);
    } catch {
      return new Store(null);
    }
  }

  async put<T extends Table>(table: T, record: Records[T]): Promise<void> {
    await this.change(table, (records) => records.put(record));
  }

  /** A whole conversation in one transaction: all of it is there, or nothing. */
  async putAll({ conversation, turns, pictures }: Whole): Promise<void> {
    if (this.db === null) return;
    const transaction = this.db.transaction(TABLES, 'readwrite');
    transaction.objectStore('conversations').put(conversation);
    for (const turn of turns) transaction.objectStore('turns').put(turn);
    for (const picture of pictures) transaction.objectStore('pictures').put(picture);
    await new Promise<void>((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(transaction.error ?? new Error('storage failed'));
    });
  }

  /** Newest first. */
  async conversations(): Promise<Conversation[]> {
    const all = await this.read<Conversation>('conversations', (records) => records.getAll());
    return all.sort((a, b) => b.updatedAt - a.updatedAt);
  }

  async turns(conversationId: string): Promise<Turn[]> {
    const all = await this.owned<Turn>('turns', conversationId);
    return all.sort((a, b) => a.createdAt - b.createdAt);
  }

  /** The conversations in which this was said; `wanted` is in lower case. */
  async conversationsSaying(wanted: string): Promise<Set<string>> {
    const all = await this.read<Turn>('turns', (records) => records.getAll());
    const says = ({ text, answer }: Turn): boolean =>
      `${text}\n${answer.text}`.toLocaleLowerCase().includes(wanted);
    return new Set(all.filter(says).map(({ conversationId }) => conversationId));
  }

  async turnAnsweredBy(responseId: string): Promise<Turn | undefined> {
    const all = await this.read<Turn>('turns', (records) => records.getAll());
    return all.find(({ answer }) => answer.responseId === responseId);
  }

  /** Pictures of any conversation with these bytes. */
  picturesWith(hash: string): Promise<Picture[]> {
    return this.read<Picture>('pictures', (records) => records.index('hash').getAll(hash));
  }

  pictures(conversationId: string): Promise<Picture[]> {
    return this.owned<Picture>('pictures', conversationId);
  }

  async deleteConversation(id: string): Promise<void> {
    await this.change('conversations', (records) => records.delete(id));
    for (const table of OWNED) {
      const query = (records: IDBObjectStore): IDBRequest<IDBValidKey[]> =>
        records.index('conversationId').getAllKeys(id);
      for (const key of await this.read<IDBValidKey>(table, query)) {
        await this.change(table, (records) => records.delete(key));
      }
    }
  }

  private owned<T>(table: Table, conversationId: string): Promise<T[]> {
    return this.read<T>(table, (records) => records.index('conversationId').getAll(conversationId));
  }

  private async read<T>(
    table: Table,
    query: (records: IDBObjectStore) => IDBRequest<T[]>,
  ): Promise<T[]> {
    if (this.db === null) return [];
    return settled(query(this.db.transaction(table).objectStore(table)));
  }

  private async change<T>(
    table: Table,
    edit: (records: IDBObjectStore) => IDBRequest<T>,
  ): Promise<void> {
    if (this.db === null) return;
    await settled(edit(this.db.transaction(table, 'readwrite').objectStore(table)));
  }
}

function openDatabase(name: string): Promise<IDBDatabase> {
  const opening = indexedDB.open(name, VERSION);
  opening.onupgradeneeded = ({ oldVersion }) => {
    const { result, transaction } = opening;
    if (oldVersion === 0) create(result);
    if (transaction === null) return;
    transaction.objectStore('pictures').createIndex('hash', 'hash');
    if (oldVersion === 1) upgrade(transaction);
  };
  return settled(opening);
}

function create(database: IDBDatabase): void {
  database.createObjectStore('conversations', { keyPath: 'id' });
  for (const table of OWNED) {
    const records = database.createObjectStore(table, { keyPath: 'id' });
    records.createIndex('conversationId', 'conversationId');
  }
}

/** Version 1 had a list where there is a tree now: each turn follows the one before it. */
function upgrade(transaction: IDBTransaction): void {
  const [conversations, turns, pictures] = ['conversations', ...OWNED].map((table) =>
    transaction.objectStore(table),
  ) as [IDBObjectStore, IDBObjectStore, IDBObjectStore];
  const leaves = new Map<string, Turn>();
  const reading = turns.getAll() as IDBRequest<(Turn & { position: number })[]>;
  reading.onsuccess = () => {
    for (const { position, ...old } of reading.result.sort((a, b) => a.position - b.position)) {
      const parentId = leaves.get(old.conversationId)?.id ?? null;
      const turn = { ...old, parentId, askId: old.id, createdAt: old.answer.sentAt + position };
      leaves.set(turn.conversationId, turn);
      turns.put(turn);
    }
    change<Conversation>(conversations, (old) => {
      const leafId = leaves.get(old.id)?.id ?? null;
      return { ...old, leafId, pinned: false };
    });
  };
  change<Picture>(pictures, (old) => ({ ...old, hash: null }));
}

function change<T>(records: IDBObjectStore, how: (record: T) => T): void {
  const reading = records.getAll() as IDBRequest<T[]>;
  reading.onsuccess = () => reading.result.forEach((record) => records.put(how(record)));
}

function settled<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error('storage failed'));
  });
}
