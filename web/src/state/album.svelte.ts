/**
 * The pictures of one conversation: their bytes, addresses to show them, the server's names.
 *
 * Owns the object URLs, and uploading again what the server has forgotten.
 */
import type { Api } from '../api';
import type { FileIds } from '../path';
import type { Picture, Store } from '../store';

/** A picture to be looked at closely. */
export interface View {
  url: string;
  name: string;
}

export class Album {
  urls = $state.raw<ReadonlyMap<string, string>>(new Map());
  private readonly pictures = new Map<string, Picture>();
  private readonly full = new Map<string, string>();

  constructor(
    private readonly api: Api,
    private readonly store: Store,
  ) {}

  keep(pictures: readonly Picture[]): void {
    const urls = new Map(this.urls);
    for (const picture of pictures) {
      this.pictures.set(picture.id, picture);
      if (!urls.has(picture.id))
        urls.set(picture.id, URL.createObjectURL(picture.preview ?? picture.blob));
    }
    this.urls = urls;
  }

  get(id: string): Picture | undefined {
    return this.pictures.get(id);
  }

  of(ids: readonly string[]): Picture[] {
    return ids.flatMap((id) => this.pictures.get(id) ?? []);
  }

  /** Pictures as large as they are, for the viewer. */
  views(ids: readonly string[]): View[] {
    return this.of(ids).map(({ id, name, preview, original, blob }) => {
      const shown = this.urls.get(id);
      if (!preview && !original && shown !== undefined) return { url: shown, name };
      const url = this.full.get(id) ?? URL.createObjectURL(original ?? blob);
      this.full.set(id, url);
      return { url, name };
    });
  }

  /** The picture that the server knows under this name. */
  withFile(fileId: string | null): Picture | undefined {
    if (fileId === null) return undefined;
    return [...this.pictures.values()].find((picture) => picture.fileId === fileId);
  }

  ofHash(hash: string): Picture | undefined {
    return [...this.pictures.values()].find((picture) => picture.hash === hash);
  }

  /** A picture with these bytes that was sent before, in this chat or else in any other. */
  async withHash(hash: string): Promise<Picture | undefined> {
    const own = this.ofHash(hash);
    return own ?? (await this.store.picturesWith(hash)).find(({ fileId }) => fileId !== null);
  }

  fileIds(): FileIds {
    return fileIdsOf(this.pictures.values());
  }

  async uploadAgain(pictures: readonly Picture[]): Promise<void> {
    for (const picture of new Set(pictures)) {
      const fileId = await this.api.upload(picture.blob, picture.name);
      this.pictures.set(picture.id, { ...picture, fileId });
      await this.store.put('pictures', { ...picture, fileId });
    }
  }

  discard(): void {
    for (const url of [...this.urls.values(), ...this.full.values()]) URL.revokeObjectURL(url);
    this.urls = new Map();
    this.pictures.clear();
  }
}

export function fileIdsOf(pictures: Iterable<Picture>): Map<string, string> {
  return new Map(
    [...pictures].flatMap(({ id, fileId }) => (fileId === null ? [] : [[id, fileId]])),
  );
}
