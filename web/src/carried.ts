/** Pictures of the page that are dragged inside it: named by their ids, never read as files. */

const TYPE = 'application/x-mmserve-picture';

export function carry(event: DragEvent, pictureId: string): void {
  event.dataTransfer?.setData(TYPE, pictureId);
  if (event.dataTransfer !== null) event.dataTransfer.effectAllowed = 'copyMove';
}

export function isCarried(event: DragEvent): boolean {
  return event.dataTransfer?.types.includes(TYPE) ?? false;
}

export function carriedId(event: DragEvent): string | null {
  const id = event.dataTransfer?.getData(TYPE) ?? '';
  return id === '' ? null : id;
}
