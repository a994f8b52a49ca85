/** Runs work once per animation frame however often it is asked for; hidden pages use a timer. */

const HIDDEN_MS = 200;

export class Frame {
  private waiting = false;

  constructor(private readonly work: () => void) {}

  request(): void {
    if (this.waiting) return;
    this.waiting = true;
    const run = (): void => {
      if (!this.waiting) return;
      this.waiting = false;
      this.work();
    };
    setTimeout(run, HIDDEN_MS);
    requestAnimationFrame(run);
  }
}
