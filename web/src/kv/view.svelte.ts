/** The view's state: the newest picture, what is selected in it, and how it is coloured. */
import { Palette } from './colors';
import { Feed } from './feed';
import type { FeedState } from './feed';
import { momentOf, remember } from './figures';
import type { Moment } from './figures';
import { apply, FREE, isActive, NOTHING, sessionOf } from './picture';
import type { Owner, Picture } from './picture';
import { words } from './words.svelte';

const KEY = 'mmserve.admin-key';
/** Of an id or a key: enough to tell two apart. */
const LETTERS = 8;

export type Coloring = 'session' | 'owner';

export interface Place {
  pool: number;
  page: number;
}

export class View {
  picture = $state.raw<Picture>(NOTHING);
  moments = $state.raw<readonly Moment[]>([]);
  state = $state<FeedState>('connecting');
  coloring = $state<Coloring>('session');
  /** A page; what owns it is asked again with every picture. */
  place = $state.raw<Place | null>(null);
  /** An owner chosen by itself, from the table or the tree. */
  chosen = $state<number | null>(null);
  hasKey = $state(sessionStorage.getItem(KEY) !== null);
  readonly owner = $derived(this.find());
  private readonly palette = new Palette();
  private readonly feed: Feed;

  constructor(root: URL) {
    this.feed = new Feed(root, sessionStorage.getItem(KEY), {
      state: (state) => (this.state = state),
      message: (message) => {
        this.picture = apply(this.picture, message);
        const counted = Object.keys(message.figures).length > 0;
        if (counted)
          this.moments = remember(this.moments, momentOf(this.picture.figures, Date.now()));
      },
    });
  }

  open(): void {
    this.feed.open();
  }

  pause(): void {
    this.feed.pause();
  }

  useKey(key: string): void {
    sessionStorage.setItem(KEY, key);
    this.hasKey = true;
    this.feed.key = key;
    this.feed.open();
  }

  forget(key: string): Promise<boolean> {
    return this.feed.forget(key);
  }

  selectPage(pool: number, page: number): void {
    this.place = { pool, page };
    this.chosen = null;
  }

  selectOwner(id: number): void {
    this.chosen = id;
    this.place = null;
  }

  /** What of an owner decides its hue. */
  private nameOf(owner: Owner): string {
    return this.coloring === 'session' ? (sessionOf(owner) ?? '') : `#${owner.id}`;
  }

  hue(owner: Owner): number {
    return this.palette.hue(this.nameOf(owner));
  }

  isActive(owner: Owner): boolean {
    return isActive(owner);
  }

  /** `Image 3fa9…`, in the page's language. */
  title(owner: Owner): string {
    const kind = words.text.kinds[owner.kind];
    if (owner.kind === 'image') return `${kind} ${owner.key.slice(0, LETTERS)}`;
    if (owner.kind === 'request') return `${kind} ${short(owner.request)}`;
    return `${kind} ${words.number(owner.start)}–${words.number(owner.start + owner.tokens)}`;
  }

  session(owner: Owner): string {
    const session = sessionOf(owner);
    return session === null ? words.text.nobody : short(session);
  }

  private find(): Owner | null {
    const { place, chosen, picture } = this;
    const id = place === null ? chosen : picture.pools[place.pool]?.owners[place.page];
    return id === undefined || id === null || id === FREE ? null : (picture.owners.get(id) ?? null);
  }
}

/** The end of `resp_…`, which tells it from others. */
export function short(id: string): string {
  const body = id.slice(id.indexOf('_') + 1);
  return body.slice(0, LETTERS);
}
