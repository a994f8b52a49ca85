/** Syntax colours: loaded only when the first finished code block is shown. */
import hljs from 'highlight.js/lib/core';
import bash from 'highlight.js/lib/languages/bash';
import cpp from 'highlight.js/lib/languages/cpp';
import css from 'highlight.js/lib/languages/css';
import go from 'highlight.js/lib/languages/go';
import java from 'highlight.js/lib/languages/java';
import javascript from 'highlight.js/lib/languages/javascript';
import json from 'highlight.js/lib/languages/json';
import markdown from 'highlight.js/lib/languages/markdown';
import python from 'highlight.js/lib/languages/python';
import rust from 'highlight.js/lib/languages/rust';
import sql from 'highlight.js/lib/languages/sql';
import typescript from 'highlight.js/lib/languages/typescript';
import xml from 'highlight.js/lib/languages/xml';
import yaml from 'highlight.js/lib/languages/yaml';

const LANGUAGES = {
  ...{ bash, cpp, css, go, java, javascript, json, markdown },
  ...{ python, rust, sql, typescript, xml, yaml },
};

for (const [name, language] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, language);

/** Colours `code` in place when its language is known; its text stays the same. */
export function highlight(code: HTMLElement): void {
  const language = /language-([\w+-]+)/.exec(code.className)?.[1];
  if (language === undefined || hljs.getLanguage(language) === undefined) return;
  code.innerHTML = hljs.highlight(code.textContent ?? '', { language }).value;
}
