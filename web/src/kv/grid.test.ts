/** Every page has one cell, and is found where it is drawn. */
import { expect, it } from 'vitest';
import { gridOf, moved, pageAt } from './grid';

it('every page is found at its cell, and nothing beside them', () => {
  for (const [pages, width] of [
    [1, 300],
    [40, 300],
    [1456, 700],
    [50_000, 1000],
  ] as const) {
    const grid = gridOf(pages, width);
    expect(grid.columns * grid.cell).toBeLessThanOrEqual(width);
    expect(grid.columns * grid.rows).toBeGreaterThanOrEqual(pages);
    for (const page of [0, Math.floor(pages / 2), pages - 1]) {
      const x = (page % grid.columns) * grid.cell + grid.cell / 2;
      const y = Math.floor(page / grid.columns) * grid.cell + grid.cell / 2;
      expect(pageAt(grid, pages, x, y)).toBe(page);
    }
    expect(pageAt(grid, pages, -1, 0)).toBe(null);
    expect(pageAt(grid, pages, grid.columns * grid.cell + 1, 0)).toBe(null);
    expect(pageAt(grid, pages, 0, grid.rows * grid.cell + 1)).toBe(null);
  }
});

it('keys lead from page to page and not out of the map', () => {
  const grid = { cell: 4, columns: 10, rows: 3 };
  expect(moved(grid, 25, 12, 'ArrowUp')).toBe(2);
  expect(moved(grid, 25, 12, 'ArrowDown')).toBe(22);
  expect(moved(grid, 25, 22, 'ArrowDown')).toBe(24);
  expect(moved(grid, 25, 0, 'ArrowLeft')).toBe(0);
  expect(moved(grid, 25, 3, 'End')).toBe(24);
  expect(moved(grid, 25, 3, 'Home')).toBe(0);
  expect(moved(grid, 25, 3, 'a')).toBe(null);
});
