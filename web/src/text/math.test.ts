/** Formulas are found where they are meant, and drawn. */
import { describe, expect, it } from 'vitest';
import { MarkdownStream } from './markdown';
import { drawMath } from './math';

function formulasOf(text: string): string[] {
  const root = document.createElement('div');
  root.innerHTML = new MarkdownStream()
    .update(text, true)
    .map(({ html }) => html)
    .join('');
  return [...root.querySelectorAll('code.math')].map(
    ({ className, textContent }) => `${className === 'math' ? '' : 'display '}${textContent}`,
  );
}

describe('formulas', () => {
  it.each([
    ['The area is $\\pi r^2$.', ['\\pi r^2']],
    ['So \\(a_1*b*c\\) is', ['a_1*b*c']],
    ['$$\\frac{1}{2}$$', ['display \\frac{1}{2}']],
    ['\\[\nx = 1\n\\]', ['display x = 1']],
    ['Thus $$x$$ holds', ['display x']],
    ['$a$ and $b$', ['a', 'b']],
    ['- $x^2$\n- two', ['x^2']],
    ['| $a$ |\n|---|\n| $b$ |', ['a', 'b']],
    ['面积为$s$平方米', ['s']],
  ])('are found in %j', (text, found) => {
    expect(formulasOf(text)).toEqual(found);
  });

  it.each(['It costs $5 or $6.', '`$a$`', '```\n$a$\n```', '\\$a\\$', '$ a $'])(
    'are not found in %j',
    (text) => {
      expect(formulasOf(text)).toEqual([]);
    },
  );

  it('are drawn as MathML, and what is no TeX stays as it was written', () => {
    const root = document.createElement('div');
    root.innerHTML =
      '<code class="math display">\\frac{a}{b}</code><code class="math">\\oops{</code>';
    for (const element of root.querySelectorAll<HTMLElement>('code')) drawMath(element);
    expect(root.querySelector('math mfrac')).not.toBeNull();
    expect(root.querySelector('code.plain')?.textContent).toBe('\\oops{');
  });
});
