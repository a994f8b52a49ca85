/** What a finished code block gains in the page: its language, a copy button, colours. */
import { copyText } from './clipboard';

export interface CodeLabels {
  copy: string;
  copied: string;
}

const COPIED_MS = 1500;

/** Adds a header to every `pre` under `root` that has none. */
export function enhanceCode(root: HTMLElement, labels: CodeLabels): void {
  for (const pre of root.querySelectorAll<HTMLPreElement>('pre:not([data-code])')) {
    const code = pre.querySelector('code');
    if (code === null) continue;
    pre.dataset.code = '';
    pre.tabIndex = 0;
    const frame = document.createElement('div');
    frame.className = 'code';
    pre.replaceWith(frame);
    frame.append(header(code, labels), pre);
    void import('./highlight').then(({ highlight }) => highlight(code));
  }
}

/** Draws every formula under `root` that is still TeX. */
export function enhanceMath(root: HTMLElement): void {
  for (const element of root.querySelectorAll<HTMLElement>('code.math:not(.plain)')) {
    void import('./math').then(({ drawMath }) => drawMath(element));
  }
}

function header(code: HTMLElement, labels: CodeLabels): HTMLElement {
  const bar = document.createElement('div');
  bar.className = 'code-bar';
  const name = document.createElement('span');
  name.textContent = /language-(\S+)/.exec(code.className)?.[1] ?? '';
  const button = document.createElement('button');
  button.type = 'button';
  button.textContent = labels.copy;
  button.onclick = async () => {
    await copyText((code.textContent ?? '').replace(/\n$/, ''));
    button.textContent = labels.copied;
    setTimeout(() => (button.textContent = labels.copy), COPIED_MS);
  };
  bar.append(name, button);
  return bar;
}
