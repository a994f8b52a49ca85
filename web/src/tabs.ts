/** Tells the page's other tabs which conversation was stored anew, and hears it from them. */

interface Changed {
  conversationId: string;
}

export class Tabs {
  private readonly channel = new BroadcastChannel('mmserve');

  constructor(heard: (conversationId: string) => void) {
    this.channel.onmessage = ({ data }: MessageEvent<Changed>) => heard(data.conversationId);
  }

  tell(conversationId: string): void {
    this.channel.postMessage({ conversationId } satisfies Changed);
  }
}
