/**
 * Formulas as MathML, which browsers draw and read aloud themselves: loaded with the first formula.
 *
 * TeX commands that name addresses, classes or HTML do nothing (`trust`), macros end (`maxExpand`).
 */
import katex from 'katex';

const LONGEST = 5000; // characters

/** Draws the TeX that `element` holds in its place; what is no TeX stays as it was written. */
export function drawMath(element: HTMLElement): void {
  const tex = element.textContent ?? '';
  if (tex.length > LONGEST) return;
  try {
    const html = katex.renderToString(tex, {
      displayMode: element.classList.contains('display'),
      output: 'mathml',
      trust: false,
      strict: 'ignore',
      maxExpand: 500,
      maxSize: 20,
    });
    const drawn = document.createElement('span');
    drawn.className = element.className;
    drawn.innerHTML = html;
    element.replaceWith(drawn);
  } catch {
    element.classList.add('plain');
  }
}
