// Applies the chosen theme before the page is drawn, so that it does not flash.
"use strict";
{
  const KEY = "surefoot.theme";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const stored = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null; // storage is blocked
    }
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);

  const chosen = stored();
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => {
      const next = isDark() ? "light" : "dark";
      button.textContent = isDark() ? "☀" : "☾";
      button.title = `Use ${next} colours`;
      button.setAttribute("aria-label", button.title);
    };
    show();
    dark.addEventListener("change", show);
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try {
        localStorage.setItem(KEY, root.dataset.theme);
      } catch {
        // It holds until the page is left.
      }
      show();
    });
  });
}
