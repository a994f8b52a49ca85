/** Random names for conversations, turns and pictures. */

const BYTES = 12;

export function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(BYTES));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, '0')).join('');
}
