/** Pictures the page draws itself, so that a newcomer needs no file to try it. */
const SIDE = 448;

/** A sample's `name` is also its key in the dictionaries. */
export interface Sample {
  name: 'shapes' | 'word' | 'number';
  draw(context: CanvasRenderingContext2D): void;
}

export const SAMPLES: readonly Sample[] = [
  { name: 'shapes', draw: drawShapes },
  { name: 'word', draw: (context) => drawText(context, 'HELLO', '#0b8a83', '#f3ead9', 96) },
  { name: 'number', draw: (context) => drawText(context, '2027', '#c2372e', '#ffffff', 128) },
];

export function paint(canvas: HTMLCanvasElement, sample: Sample): void {
  canvas.width = SIDE;
  canvas.height = SIDE;
  const context = canvas.getContext('2d');
  if (context !== null) sample.draw(context);
}

function toBlob(canvas: HTMLCanvasElement): Promise<Blob> {
  return new Promise((resolve, reject) => {
    const take = (blob: Blob | null): void => {
      if (blob === null) reject(new Error('no picture'));
      else resolve(blob);
    };
    canvas.toBlob(take, 'image/png');
  });
}

export async function sampleFile(sample: Sample): Promise<File> {
  const canvas = document.createElement('canvas');
  paint(canvas, sample);
  return new File([await toBlob(canvas)], `${sample.name}.png`, { type: 'image/png' });
}

function drawShapes(context: CanvasRenderingContext2D): void {
  context.fillStyle = '#ffffff';
  context.fillRect(0, 0, SIDE, SIDE);
  context.fillStyle = '#d62f2f';
  context.beginPath();
  context.arc(124, 148, 58, 0, 2 * Math.PI);
  context.fill();
  context.fillStyle = '#2458d3';
  context.fillRect(266, 94, 108, 108);
  context.fillStyle = '#1e9e4a';
  context.beginPath();
  context.moveTo(224, 234);
  context.lineTo(294, 354);
  context.lineTo(154, 354);
  context.fill();
}

function drawText(
  context: CanvasRenderingContext2D,
  text: string,
  ink: string,
  ground: string,
  size: number,
): void {
  context.fillStyle = ground;
  context.fillRect(0, 0, SIDE, SIDE);
  context.fillStyle = ink;
  context.font = `bold ${size}px "DejaVu Sans", Verdana, sans-serif`;
  context.textAlign = 'center';
  context.textBaseline = 'middle';
  context.fillText(text, SIDE / 2, SIDE / 2);
}
