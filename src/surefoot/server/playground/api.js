// The server's public API: JSON, event streams, and what can go wrong with either.

const KEY = "surefoot.key";
let key = null;
try {
  key = sessionStorage.getItem(KEY);
} catch {
  // Storage is blocked: the key lives as long as the page.
}

export const hasKey = () => Boolean(key);

export function setKey(value) {
  key = value || null;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // As above.
  }
}

/** An error that a person is to read. `status` is 0 when no answer came. */
export class Problem extends Error {
  constructor(message, { status = 0, param = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    // Relative, so that the page also works below a path of a reverse proxy.
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("there was no answer");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Something in between answered, not the server.
  }
  const wait = Number(response.headers.get("Retry-After"));
  return new Problem(error.message ?? response.statusText ?? "", {
    status: response.status,
    param: error.param ?? null,
    retryAfter: wait > 0 ? wait : null,
  });
}

export const getJson = async (path) => (await ask(path)).json();
export const getText = async (path) => (await ask(path)).text();

/** Of what ends a stream, by its code. */
const STATUSES = { engine_died: 503, replica_died: 503, shutting_down: 503, timeout: 504 };

/** Chunks of a chat completion as they come. Throws Problem, or AbortError by `signal`. */
export async function* streamChat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) {
      const status = STATUSES[chunk.error.code] ?? 500;
      throw new Problem(chunk.error.message, { status, param: chunk.error.param });
    }
    yield chunk;
  }
  throw new Problem("the connection broke before the answer was complete");
}

/** The data of server-sent events. */
async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("the connection broke before the answer was complete");
  }
}
