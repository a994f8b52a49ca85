/** Where pages lie on a map: rows of equal cells. Pure; CSS pixels. */

export interface Grid {
  cell: number;
  columns: number;
  rows: number;
}

const LARGEST = 14;
const SMALLEST = 2;
const HEIGHT = 240;

/** Cells as large as fit into `width` and a fair height, but never too small to hit. */
export function gridOf(pages: number, width: number): Grid {
  const ideal = Math.floor(Math.sqrt((width * HEIGHT) / Math.max(pages, 1)));
  const cell = Math.min(Math.max(ideal, SMALLEST), LARGEST);
  const columns = Math.max(Math.floor(width / cell), 1);
  return { cell, columns, rows: Math.ceil(pages / columns) };
}

/** The page at a point, or null beside them. */
export function pageAt(grid: Grid, pages: number, x: number, y: number): number | null {
  const column = Math.floor(x / grid.cell);
  const row = Math.floor(y / grid.cell);
  if (column < 0 || row < 0 || column >= grid.columns) return null;
  const page = row * grid.columns + column;
  return page < pages ? page : null;
}

/** Where a key leads from a page; null: the key means nothing here. */
export function moved(grid: Grid, pages: number, page: number, key: string): number | null {
  const steps: Record<string, number> = {
    ArrowLeft: page - 1,
    ArrowRight: page + 1,
    ArrowUp: page - grid.columns,
    ArrowDown: page + grid.columns,
    Home: 0,
    End: pages - 1,
  };
  const to = steps[key];
  return to === undefined ? null : Math.min(Math.max(to, 0), pages - 1);
}
