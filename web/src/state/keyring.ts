/** Where the API key is: in memory, and in the tab's own storage if the person likes. */

const KEY = 'mmserve.key';

export function storedKey(): string | null {
  localStorage.removeItem(KEY); // where an older page kept it
  return sessionStorage.getItem(KEY);
}

/** `keep`: until the tab is closed; otherwise it is gone with a reload. */
export function storeKey(key: string | null, keep: boolean): void {
  if (key !== null && keep) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}
