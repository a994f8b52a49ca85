/**
 * Where formulas are in Markdown: `$a$`, `\(a\)`, `$$a$$`, `\[a\]`.
 *
 * A dollar sign is money unless it hugs what it encloses and no digit follows. Knows nothing of TeX.
 */
import type { TokenizerAndRendererExtension, Tokens } from 'marked';

const INLINE = /^\$(?![\s$])((?:\\.|[^\\$\n])+?)(?<![\s\\])\$(?!\d)|^\\\(([^\n]+?)\\\)/;
const DISPLAY =
  /^ {0,3}(?:\$\$((?:(?!\n\s*\n)[^$])+)\$\$|\\\[((?:(?!\n\s*\n)[^])+?)\\\]) *(?:\n|$)/;
const DISPLAY_INLINE = /^\$\$((?:(?!\n\s*\n)[^$])+)\$\$|^\\\[((?:(?!\n\s*\n)[^])+?)\\\]/;

interface Rule {
  name: string;
  level: 'block' | 'inline';
  at: RegExp;
  start: RegExp;
}

function rule({ name, level, at, start }: Rule): TokenizerAndRendererExtension {
  return {
    name,
    level,
    start: (source) => start.exec(source)?.index,
    tokenizer(source) {
      const found = at.exec(source);
      const text = found?.[1] ?? found?.[2];
      if (found === null || text === undefined) return undefined;
      return { type: name, raw: found[0], text: text.trim() };
    },
  } as TokenizerAndRendererExtension;
}

/** `escape` makes text of what would be markup. */
export function formulas(escape: (text: string) => string): TokenizerAndRendererExtension[] {
  const code = (kind: string) => (token: Tokens.Generic) =>
    `<code class="${kind}">${escape(String(token['text']))}</code>`;
  const display = code('math display');
  return [
    {
      ...rule({
        name: 'displayMath',
        level: 'block',
        at: DISPLAY,
        start: /(?:^|\n) {0,3}(?:\$\$|\\\[)/,
      }),
      renderer: (token: Tokens.Generic) => `<div class="formula">${display(token)}</div>\n`,
    } as TokenizerAndRendererExtension,
    {
      ...rule({ name: 'inlineDisplay', level: 'inline', at: DISPLAY_INLINE, start: /\$\$|\\\[/ }),
      renderer: display,
    } as TokenizerAndRendererExtension,
    {
      ...rule({ name: 'inlineMath', level: 'inline', at: INLINE, start: /\$|\\\(/ }),
      renderer: code('math'),
    } as TokenizerAndRendererExtension,
  ];
}
