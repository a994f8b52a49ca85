/** Prepares pictures beside the page: a file and limits in, a picture or nothing out. */
import type { PictureAnswer, PictureQuestion } from './pictures';
import { redraw } from './redraw';

const page = self as unknown as {
  onmessage: (message: MessageEvent<PictureQuestion>) => void;
  postMessage(answer: PictureAnswer): void;
};

page.onmessage = ({ data: { number, file, limits } }) => {
  redraw(file, limits).then(
    (picture) => page.postMessage({ number, picture }),
    () => page.postMessage({ number, picture: null }),
  );
};
