/**
 * A chosen file made into a picture the server takes.
 *
 * Owns decoding in the browser, converting foreign formats and shrinking what is above the
 * server's limits. The file is otherwise sent as it is, so equal files stay equal.
 */

export interface PictureLimits {
  maxPixels: number;
  maxSide: number;
  maxBytes: number;
}

export interface PreparedPicture {
  blob: Blob;
  width: number;
  height: number;
}

/** The browser cannot read the file as a picture. */
export class UnreadablePicture extends Error {}

const ACCEPTED = ['image/png', 'image/jpeg', 'image/webp', 'image/gif'];

/** Factor by which both sides shrink so that the picture is within the limits; at most 1. */
export function shrinkFactor(width: number, height: number, limits: PictureLimits): number {
  const area = Math.sqrt(limits.maxPixels / (width * height));
  return Math.min(1, area, limits.maxSide / Math.max(width, height));
}

/** Throws `UnreadablePicture`. */
export async function prepare(file: Blob, limits: PictureLimits): Promise<PreparedPicture> {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new UnreadablePicture();
  });
  try {
    const factor = shrinkFactor(bitmap.width, bitmap.height, limits);
    const fits = factor === 1 && file.size <= limits.maxBytes && ACCEPTED.includes(file.type);
    if (fits) return { blob: file, width: bitmap.width, height: bitmap.height };
    return await redraw(bitmap, factor, file.type, limits.maxBytes);
  } finally {
    bitmap.close();
  }
}

/** Photographs become JPEG; anything else stays lossless unless that is too many bytes. */
async function redraw(
  bitmap: ImageBitmap,
  factor: number,
  type: string,
  maxBytes: number,
): Promise<PreparedPicture> {
  const width = Math.max(1, Math.floor(bitmap.width * factor));
  const height = Math.max(1, Math.floor(bitmap.height * factor));
  const canvas = document.createElement('canvas');
  Object.assign(canvas, { width, height });
  canvas.getContext('2d')?.drawImage(bitmap, 0, 0, width, height);
  const blob = await toBlob(canvas, type === 'image/jpeg' ? type : 'image/png');
  const small = blob.size <= maxBytes ? blob : await toBlob(canvas, 'image/jpeg');
  return { blob: small, width, height };
}

/** Throws `UnreadablePicture` when the browser cannot encode the canvas. */
export function toBlob(canvas: HTMLCanvasElement, type: string): Promise<Blob> {
  return new Promise((resolve, reject) => {
    const take = (blob: Blob | null): void => {
      if (blob === null) reject(new UnreadablePicture());
      else resolve(blob);
    };
    canvas.toBlob(take, type, 0.92);
  });
}

/** The SHA-256 of a blob's bytes in hexadecimal; null where the browser keeps that from the page. */
export async function hashOf(blob: Blob): Promise<string | null> {
  // Only pages from loopback or over TLS have it.
  const subtle = crypto.subtle as SubtleCrypto | undefined;
  if (subtle === undefined) return null;
  const bytes = new Uint8Array(await subtle.digest('SHA-256', await blob.arrayBuffer()));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}
