/** What an answer, a question or a file name may try: none of it becomes an element that acts. */
import { describe, expect, it } from 'vitest';
import corpus from './hostile.json';
import { MarkdownStream } from './markdown';
import { drawMath } from './math';

const INERT = new Set(
  (
    'A BLOCKQUOTE BR CODE DEL DIV EM H1 H2 H3 H4 H5 H6 HR LI OL P PRE STRONG TABLE TBODY TD TH ' +
    'THEAD TR UL'
  ).split(' '),
);
const LINK = /^(?:https?|mailto):/;

function rendered(text: string): HTMLElement {
  const root = document.createElement('div');
  root.innerHTML = new MarkdownStream()
    .update(text, true)
    .map(({ html }) => html)
    .join('');
  return root;
}

describe('hostile text', () => {
  it.each(corpus)('is inert: %j', (text) => {
    for (const element of rendered(text).querySelectorAll('*')) {
      expect(INERT).toContain(element.tagName);
      for (const { name, value } of element.attributes) {
        expect(['href', 'title', 'class', 'start', 'target', 'rel']).toContain(name);
        if (name === 'href') expect(value).toMatch(LINK);
      }
    }
  });

  it.each(corpus.filter((text) => text.includes('$') || text.includes('\\[')))(
    'is inert as a formula: %j',
    (text) => {
      const root = rendered(text);
      for (const element of root.querySelectorAll<HTMLElement>('code.math')) drawMath(element);
      expect(root.querySelector('a[href^="javascript"], img, script, iframe, [id]')).toBeNull();
      for (const element of root.querySelectorAll('*')) {
        expect([...element.attributes].filter(({ name }) => name.startsWith('on'))).toEqual([]);
      }
    },
  );
});
