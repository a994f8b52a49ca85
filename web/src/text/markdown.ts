/**
 * A growing Markdown text as blocks of safe HTML.
 *
 * Owns parsing and sanitising. Finished blocks are kept: each update reads only the text from the
 * last block on. HTML in the source is shown as text, pictures become links, so that an answer
 * can make the browser fetch nothing.
 */
import createDOMPurify from 'dompurify';
import { Marked } from 'marked';
import type { Token } from 'marked';
import { formulas } from './formulas';

/** `settled`: no later text can change it. */
export interface Block {
  html: string;
  settled: boolean;
}

const LINK = /^(?:https?|mailto):/i;

export function escapeHtml(text: string): string {
  return text
    .replaceAll('&', '&amp;')
    .replaceAll('<', '&lt;')
    .replaceAll('>', '&gt;')
    .replaceAll('"', '&quot;');
}

const marked = new Marked({
  gfm: true,
  breaks: false,
  renderer: {
    html({ text }) {
      return /^<br\s*\/?>$/i.test(text.trim()) ? '<br>' : escapeHtml(text);
    },
    link({ href, tokens }) {
      return LINK.test(href) ? false : this.parser.parseInline(tokens);
    },
    image({ href, text }) {
      const label = escapeHtml(text === '' ? href : text);
      return LINK.test(href) ? `<a href="${escapeHtml(href)}">${label}</a>` : label;
    },
    list({ items, raw }) {
      // A bare "3." is a short answer, not a list of nothing.
      const empty = items.every(({ text }) => text.trim() === '');
      return empty ? `<p>${escapeHtml(raw.trim())}</p>\n` : false;
    },
    checkbox({ checked }) {
      return checked ? '☑ ' : '☐ ';
    },
    tablecell({ tokens, header, align }) {
      const tag = header ? 'th' : 'td';
      const side = align === null ? '' : ` class="${align}"`;
      return `<${tag}${side}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
  },
});

marked.use({ extensions: formulas(escapeHtml) });

const purify = createDOMPurify(window);
purify.addHook('afterSanitizeAttributes', (node) => {
  if (node.tagName !== 'A') return;
  node.setAttribute('target', '_blank');
  node.setAttribute('rel', 'noopener noreferrer');
});

function sanitise(html: string): string {
  return purify.sanitize(html, {
    ALLOWED_TAGS: [
      ...['a', 'blockquote', 'br', 'code', 'del', 'div', 'em', 'h1', 'h2', 'h3', 'h4', 'h5', 'h6'],
      ...['hr', 'li', 'ol', 'p', 'pre', 'strong', 'table', 'tbody', 'td', 'th', 'thead'],
      ...['tr', 'ul'],
    ],
    ALLOWED_ATTR: ['href', 'title', 'class', 'start'],
    ALLOWED_URI_REGEXP: LINK,
    ADD_URI_SAFE_ATTR: ['start'],
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
  });
}

/** Whole answers that were read, because scrolling shows the same ones again and again. */
const finished = new Map<string, Block[]>();
const FINISHED = 200;

/** One answer's text, block by block. Feed it the whole text each time; it reads the new part. */
export class MarkdownStream {
  private kept: Block[] = [];
  private keptText = '';
  private tail = '';
  private tailBlocks: Block[] = [];

  /** The blocks of `text`; `complete` says that no more will come. */
  update(text: string, complete: boolean): Block[] {
    if (!complete) return this.grow(text, false);
    const known = finished.get(text);
    if (known !== undefined) return known;
    const blocks = this.grow(text, true);
    const oldest = finished.keys().next();
    if (finished.size >= FINISHED && !oldest.done) finished.delete(oldest.value);
    finished.set(text, blocks);
    return blocks;
  }

  private grow(text: string, complete: boolean): Block[] {
    if (!text.startsWith(this.keptText)) this.forget();
    const tail = text.slice(this.keptText.length);
    if (tail !== this.tail || (complete && !this.tailBlocks.every(({ settled }) => settled))) {
      this.read(tail, complete);
    }
    return [...this.kept, ...this.tailBlocks];
  }

  private forget(): void {
    this.kept = [];
    this.keptText = '';
    this.tail = '';
    this.tailBlocks = [];
  }

  private read(tail: string, complete: boolean): void {
    const tokens = marked.lexer(tail);
    const last = tokens.findLastIndex(({ type }) => type !== 'space');
    const render = (token: Token, settled: boolean): Block[] => {
      if (token.type === 'space') return [];
      return [{ html: sanitise(marked.parser([token])), settled }];
    };
    const cut = complete ? tokens.length : Math.max(last, 0);
    const done = tokens.slice(0, cut);
    this.kept = [...this.kept, ...done.flatMap((token) => render(token, true))];
    const doneText = done.map(({ raw }) => raw).join('');
    this.keptText += doneText;
    this.tail = tail.slice(doneText.length);
    this.tailBlocks = tokens.slice(cut).flatMap((token) => render(token, isClosed(token)));
  }
}

/** Only a fence says of itself that it has ended. */
function isClosed(token: Token): boolean {
  if (token.type !== 'code') return false;
  const fence = /^ {0,3}(`{3,}|~{3,})/.exec(token.raw)?.[1];
  return fence !== undefined && new RegExp(`\\n {0,3}${fence}\\s*$`).test(token.raw);
}
