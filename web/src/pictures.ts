/**
 * A chosen file made into a picture the server takes.
 *
 * Owns the worker that decodes, converts foreign formats and shrinks what is above the server's
 * limits. The file is otherwise sent as it is, so equal files stay equal.
 */
import PictureWorker from './picture.worker?worker';

export interface PictureLimits {
  maxPixels: number;
  maxSide: number;
  maxBytes: number;
}

/** `preview`: a smaller one to show in the chat, of pictures that are large. */
export interface PreparedPicture {
  blob: Blob;
  width: number;
  height: number;
  preview: Blob | null;
}

export interface PictureQuestion {
  number: number;
  file: Blob;
  limits: PictureLimits;
}

export interface PictureAnswer {
  number: number;
  picture: PreparedPicture | null;
}

/** The browser cannot read the file as a picture. */
export class UnreadablePicture extends Error {}

/** One worker for the page, begun with the first picture; asks of it are answered by number. */
class Studio {
  private worker: Worker | null = null;
  private asked = 0;
  private readonly waiting = new Map<number, (picture: PreparedPicture | null) => void>();

  ask(file: Blob, limits: PictureLimits): Promise<PreparedPicture | null> {
    const number = this.asked++;
    this.worker ??= this.begin();
    this.worker.postMessage({ number, file, limits } satisfies PictureQuestion);
    return new Promise((resolve) => this.waiting.set(number, resolve));
  }

  private begin(): Worker {
    const worker = new PictureWorker();
    worker.onmessage = ({ data: { number, picture } }: MessageEvent<PictureAnswer>) => {
      this.waiting.get(number)?.(picture);
      this.waiting.delete(number);
    };
    // Memory that ran out ends the worker: what it had is unreadable, the next picture gets a new one.
    worker.onerror = () => {
      worker.terminate();
      this.worker = null;
      for (const resolve of this.waiting.values()) resolve(null);
      this.waiting.clear();
    };
    return worker;
  }
}

const studio = new Studio();

/** Throws `UnreadablePicture`. */
export async function prepare(file: Blob, limits: PictureLimits): Promise<PreparedPicture> {
  const picture = await studio.ask(file, limits);
  if (picture === null) throw new UnreadablePicture();
  return picture;
}

/** The SHA-256 of a blob's bytes in hexadecimal; null where the browser keeps that from the page. */
export async function hashOf(blob: Blob): Promise<string | null> {
  // Only pages from loopback or over TLS have it.
  const subtle = crypto.subtle as SubtleCrypto | undefined;
  if (subtle === undefined) return null;
  const bytes = new Uint8Array(await subtle.digest('SHA-256', await blob.arrayBuffer()));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}
