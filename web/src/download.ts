/** Hands a text to the browser as a file to keep. */

const LATER_MS = 10_000; // by then the browser has read it

export function download(name: string, type: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement('a');
  Object.assign(link, { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), LATER_MS);
}
