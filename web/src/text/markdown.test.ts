/** Markdown that grows gives what whole Markdown gives, and is never dangerous. */
import { describe, expect, it } from 'vitest';
import { MarkdownStream } from './markdown';

const SAMPLE = `# Title

A paragraph with **bold**, \`code\` and [a link](https://example.org).

- one
- two

  more of two
- three

1. a
2. b

| x | y |
|:--|--:|
| 1 | 2 |

\`\`\`python
def f():

    return 1
\`\`\`

> quote
> more

Setext
------

***

末尾 🙂`;

function htmlOf(stream: MarkdownStream, text: string, complete: boolean): string {
  return stream
    .update(text, complete)
    .map(({ html }) => html)
    .join('');
}

describe('growing Markdown', () => {
  it('gives while it grows what the whole text gives', () => {
    const growing = new MarkdownStream();
    for (let length = 0; length <= SAMPLE.length; length++) {
      const text = SAMPLE.slice(0, length);
      const html = htmlOf(growing, text, false);
      if (length % 3 === 0) expect(html).toBe(htmlOf(new MarkdownStream(), text, true));
    }
  }, 60_000);

  it('keeps finished blocks as they are', () => {
    const stream = new MarkdownStream();
    const [first] = stream.update('one\n\ntwo', false);
    const again = stream.update('one\n\ntwo and more\n\nthree', false);
    expect(again[0]).toBe(first);
    expect(again.map(({ settled }) => settled)).toEqual([true, true, false]);
  });

  it('settles a code block when its fence closes', () => {
    const stream = new MarkdownStream();
    expect(stream.update('```js\nlet a;\n``', false)[0]?.settled).toBe(false);
    expect(stream.update('```js\nlet a;\n```', false)[0]?.settled).toBe(true);
    expect(new MarkdownStream().update('```js', false)[0]?.settled).toBe(false);
  });

  it('starts over when the text is another one', () => {
    const stream = new MarkdownStream();
    stream.update('one\n\ntwo\n\nthree', true);
    expect(htmlOf(stream, 'other', true)).toBe('<p>other</p>\n');
  });
});

it('shows an answer that is only a number with a full stop', () => {
  expect(htmlOf(new MarkdownStream(), '3.', true)).toBe('<p>3.</p>\n');
  expect(htmlOf(new MarkdownStream(), '3. cats', true)).toContain('<ol start="3">');
});

describe('hostile Markdown', () => {
  const attacks = [
    '<script>alert(1)</script>',
    '<img src=x onerror=alert(1)>',
    'a <b onmouseover="alert(1)">b</b>',
    '[x](javascript:alert(1))',
    '[x](JaVaScRiPt&colon;alert(1))',
    '![x](https://evil.example/?leak)',
    '![x](data:image/svg+xml;base64,PHN2Zz4=)',
    '[x]: javascript:alert(1)\n\n[x]',
    '<iframe src="https://evil.example"></iframe>',
    '<svg onload=alert(1)>',
    '```"><img src=x onerror=alert(1)>\ncode\n```',
    '<style>*{display:none}</style>',
    '<form action="https://evil.example"><input></form>',
  ];

  it.each(attacks)('does nothing: %s', (attack) => {
    const root = document.createElement('div');
    root.innerHTML = htmlOf(new MarkdownStream(), attack, true);
    expect(root.querySelector('script,img,iframe,svg,style,form,input,object,embed')).toBeNull();
    for (const element of root.querySelectorAll('*')) {
      expect(element.getAttributeNames().filter((name) => name.startsWith('on'))).toEqual([]);
      expect(element.getAttribute('href') ?? 'https:').toMatch(/^(https?|mailto):/);
    }
  });

  it('shows HTML as the text it is', () => {
    const root = document.createElement('div');
    root.innerHTML = htmlOf(new MarkdownStream(), 'Use `<b>` or <b>this</b>.', true);
    expect(root.textContent?.trim()).toBe('Use <b> or <b>this</b>.');
  });

  it('opens links elsewhere and tells them nothing', () => {
    const root = document.createElement('div');
    root.innerHTML = htmlOf(new MarkdownStream(), '[x](https://example.org)', true);
    const link = root.querySelector('a');
    expect(link?.rel).toBe('noopener noreferrer');
    expect(link?.target).toBe('_blank');
  });
});
