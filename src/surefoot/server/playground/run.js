// One generation: from a request to tokens on the page.

import { streamChat } from "./api.js";
import { Numbers } from "./numbers.js";
import { TokenText } from "./text.js";

// The page may share the machine with the engine, so it is drawn only so often.
const DRAW_MS = 60;

/**
 * Runs a request and shows it in `textElement` and `numbersElement` as it comes.
 * Returns {text, numbers, usage, finish, stopped}. A Problem that is thrown carries what had come
 * before it as `partial`.
 */
export async function run(request, { textElement, numbersElement, signal, drawn }) {
  const text = new TokenText(textElement);
  const numbers = new Numbers(numbersElement);
  const result = { text, numbers, usage: null, finish: null, stopped: false };
  let timer = null;
  const draw = () => {
    timer = null;
    text.draw();
    numbers.draw();
    drawn?.();
  };
  textElement.setAttribute("aria-busy", "true");
  try {
    for await (const chunk of streamChat({ ...request, ...REPORTS }, signal)) {
      if (chunk.usage) result.usage = chunk.usage;
      for (const choice of chunk.choices) {
        const added = text.add(choice);
        numbers.add(added, choice.surefoot?.speculation);
        result.finish = choice.finish_reason ?? result.finish;
      }
      timer ??= setTimeout(draw, DRAW_MS);
    }
    numbers.finish(result.usage);
  } catch (error) {
    result.stopped = error.name === "AbortError";
    error.partial = result;
    if (!result.stopped) throw error;
  } finally {
    clearTimeout(timer);
    draw();
    textElement.removeAttribute("aria-busy");
  }
  return result;
}

const REPORTS = { surefoot: { proposed_by: true }, return_token_ids: true };
