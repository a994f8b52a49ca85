/**
 * Decoding, shrinking and encoding a picture, where there are canvases without a page.
 *
 * Runs in a worker: a photograph of 40 MB takes seconds. Throws whatever the browser throws for
 * what it cannot read.
 */
import type { PictureLimits, PreparedPicture } from './pictures';

const ACCEPTED = ['image/png', 'image/jpeg', 'image/webp', 'image/gif'];
const QUALITY = 0.92;
/** No picture is worth less than this share of its sides. */
const SMALLEST = 0.01;
/** Pictures of more pixels than this are shown small in the chat; the viewer shows them whole. */
const PREVIEW_PIXELS = 1_500_000;
const PREVIEW_SIDE = 720;

/** Factor by which both sides shrink so that the picture is within the limits; at most 1. */
export function shrinkFactor(width: number, height: number, limits: PictureLimits): number {
  const area = Math.sqrt(limits.maxPixels / (width * height));
  return Math.min(1, area, limits.maxSide / Math.max(width, height));
}

export async function redraw(file: Blob, limits: PictureLimits): Promise<PreparedPicture> {
  const bitmap = await createImageBitmap(file);
  try {
    const factor = shrinkFactor(bitmap.width, bitmap.height, limits);
    const fits = factor === 1 && file.size <= limits.maxBytes && ACCEPTED.includes(file.type);
    const preview = await previewOf(bitmap);
    if (fits) return { blob: file, width: bitmap.width, height: bitmap.height, preview };
    return { ...(await encode(bitmap, factor, file.type, limits.maxBytes)), preview };
  } finally {
    bitmap.close();
  }
}

/** Photographs become JPEG; anything else stays lossless unless that is too many bytes. */
async function encode(
  bitmap: ImageBitmap,
  factor: number,
  type: string,
  maxBytes: number,
): Promise<Omit<PreparedPicture, 'preview'>> {
  const canvas = draw(bitmap, factor);
  const photograph = type === 'image/jpeg' || type === 'image/heic' || type === 'image/avif';
  if (!photograph) {
    const blob = await canvas.convertToBlob({ type: 'image/png' });
    if (blob.size <= maxBytes) return { blob, ...sizeOf(bitmap, factor) };
  }
  const blob = await canvas.convertToBlob({ type: 'image/jpeg', quality: QUALITY });
  if (blob.size <= maxBytes || factor < SMALLEST) return { blob, ...sizeOf(bitmap, factor) };
  // Bytes go with the area; a little more is taken away, so that this ends.
  return encode(bitmap, factor * 0.9 * Math.sqrt(maxBytes / blob.size), 'image/jpeg', maxBytes);
}

async function previewOf(bitmap: ImageBitmap): Promise<Blob | null> {
  if (bitmap.width * bitmap.height <= PREVIEW_PIXELS) return null;
  const factor = PREVIEW_SIDE / Math.max(bitmap.width, bitmap.height);
  return draw(bitmap, factor).convertToBlob({ type: 'image/webp', quality: 0.85 });
}

function draw(bitmap: ImageBitmap, factor: number): OffscreenCanvas {
  const { width, height } = sizeOf(bitmap, factor);
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext('2d');
  if (context === null) throw new Error('no canvas');
  context.imageSmoothingQuality = 'high';
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas;
}

function sizeOf({ width, height }: ImageBitmap, factor: number): { width: number; height: number } {
  return {
    width: Math.max(1, Math.floor(width * factor)),
    height: Math.max(1, Math.floor(height * factor)),
  };
}
