/**
 * Conversations, turns and pictures in the browser's IndexedDB.
 *
 * Records are plain data, written whole; a turn's text and its last event number are one record,
 * so what is read after a reload can always be resumed. A browser that refuses storage gets a
 * store that forgets.
 */
import type { Answer } from './answer';

export interface Conversation {
  id: string;
  title: string;
  createdAt: number;
  updatedAt: number;
}

export interface Turn {
  id: string;
  conversationId: string;
  position: number;
  text: string;
  pictureIds: string[];
  answer: Answer;
}

/** A picture as it was sent. `fileId` is the server's name for it, valid for some hours. */
export interface Picture {
  id: string;
  conversationId: string;
  name: string;
  blob: Blob;
  width: number;
  height: number;
  fileId: string | null;
}

interface Records {
  conversations: Conversation;
  turns: Turn;
  pictures: Picture;
}

type Table = keyof Records;

const VERSION = 1;
const OWNED: Table[] = ['turns', 'pictures'];

export class Store {
  private constructor(private readonly db: IDBDatabase | null) {}

  static async open(name = 'mmserve'): Promise<Store> {
    try {
      return new Store(await openDatabase(name));
    } catch {
      return new Store(null);
    }
  }

  async put<T extends Table>(table: T, record: Records[T]): Promise<void> {
    await this.change(table, (records) => records.put(record));
  }

  /** Newest first. */
  async conversations(): Promise<Conversation[]> {
    const all = await this.read<Conversation>('conversations', (records) => records.getAll());
    return all.sort((a, b) => b.updatedAt - a.updatedAt);
  }

  async turns(conversationId: string): Promise<Turn[]> {
    const all = await this.owned<Turn>('turns', conversationId);
    return all.sort((a, b) => a.position - b.position);
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
  opening.onupgradeneeded = () => {
    opening.result.createObjectStore('conversations', { keyPath: 'id' });
    for (const table of OWNED) {
      const records = opening.result.createObjectStore(table, { keyPath: 'id' });
      records.createIndex('conversationId', 'conversationId');
    }
  };
  return settled(opening);
}

function settled<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error('storage failed'));
  });
}
