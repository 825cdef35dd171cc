// Keeps the conversation in the browser, so that it outlives a reload.

const STORE = "surefoot.conversation";

/** Turns as they were kept: {role, content, pieces, calls, end}; none where storage is blocked. */
export function recall() {
  try {
    const turns = JSON.parse(localStorage.getItem(STORE));
    return Array.isArray(turns) ? turns : [];
  } catch {
    return [];
  }
}

export function keep(turns) {
  try {
    if (turns.length) localStorage.setItem(STORE, JSON.stringify(turns));
    else localStorage.removeItem(STORE);
  } catch {
    // It holds until the page is left: storage is blocked, or full.
  }
}
