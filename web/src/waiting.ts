/** Pauses that grow, and that anyone may cut short. */

const FIRST_MS = 500;
const LONGEST_MS = 8000;

/** Milliseconds before try number `attempt` (from 0): doubling to a ceiling, half of it by chance. */
export function backoff(attempt: number, random: number): number {
  const full = Math.min(LONGEST_MS, FIRST_MS * 2 ** attempt);
  return full * (0.5 + random / 2);
}

/** Sleepers that end at their time or together at `wake`, whichever comes first. */
export class Sleepers {
  private readonly waking = new Set<() => void>();

  sleep(ms: number): Promise<void> {
    return new Promise((resolve) => {
      const done = (): void => {
        clearTimeout(timer);
        this.waking.delete(done);
        resolve();
      };
      const timer = setTimeout(done, ms);
      this.waking.add(done);
    });
  }

  wake(): void {
    for (const done of [...this.waking]) done();
  }
}
