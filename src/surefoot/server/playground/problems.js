// Errors, in words for people.

const TITLES = {
  0: "The server cannot be reached",
  400: "The server refused the request",
  401: "The server asks for an API key",
  404: "The server does not know this",
  413: "The conversation is too large",
  422: "The server refused the request",
  429: "The server is busy",
  500: "The server failed",
  503: "The engine is not available",
  504: "The answer took too long",
};

const box = () => document.getElementById("problem");

export function hideProblem() {
  box().hidden = true;
  for (const field of document.querySelectorAll("[aria-invalid]")) {
    field.removeAttribute("aria-invalid");
  }
}

/** Shows an error; `retry` is what its button does, none for no button. */
export function showProblem(error, retry = null) {
  hideProblem();
  const strong = document.createElement("strong");
  const text = document.createElement("span");
  strong.textContent = title(error);
  text.textContent = sentence(error);
  box().replaceChildren(strong, text);
  if (retry) box().append(button("Try again", () => (hideProblem(), retry())));
  box().append(button("Dismiss", hideProblem));
  box().hidden = false;
  const name = (error.param ?? "").replace(/^speculation\./, "");
  const field = document.getElementById("settings-form").elements[name];
  field?.setAttribute("aria-invalid", "true");
}

function title(error) {
  if (error.status === undefined) return "The page failed";
  if (error.status === 0 && error.partial?.text.tokens.length) return "The connection broke";
  return TITLES[error.status] ?? `The server answered with status ${error.status}`;
}

function sentence(error) {
  const text = error.message ?? "";
  // A message about a field begins with the field's name, which stays as it is.
  const begin = error.param ? text.slice(0, 1) : text.slice(0, 1).toUpperCase();
  const said = text ? `${begin}${text.slice(1)}.` : "";
  if (error.status === 0) return `${said} Is it still running at ${location.host}?`;
  if (error.status === 401) return `${said} Enter it in the settings.`;
  const wait = error.retryAfter;
  // The message may say so itself.
  return wait && !/\d+ s\b/.test(said) ? `${said} Try again in ${wait} s.` : said;
}

function button(label, action) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = label;
  made.addEventListener("click", action);
  return made;
}
