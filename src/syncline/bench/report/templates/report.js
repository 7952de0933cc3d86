"use strict";
(() => {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const tell = () => { theme.textContent = isDark() ? "light" : "dark"; theme.setAttribute("aria-label", `switch to ${theme.textContent} colours`); };
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; tell(); });
  dark.addEventListener("change", tell);
  tell();

  const key = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.sort ?? cell.textContent.trim();
    const value = text === "inf" ? Infinity : Number(text);
    return text === "" || Number.isNaN(value) ? text : value;
  };
  const order = (a, b) => {
    const numbers = [a, b].map((one) => typeof one === "number");
    if (numbers[0] && numbers[1]) return a === b ? 0 : a < b ? -1 : 1;
    if (numbers[0] !== numbers[1]) return numbers[0] ? -1 : 1;
    return String(a).localeCompare(String(b));
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.dataset.label = head.textContent; // for print, where a repeated heading has no button
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const rows = [...body.rows].sort((a, b) => order(key(a, column), key(b, column)) * (down ? -1 : 1));
        body.append(...rows);
      });
    });
  }

  // Folded sections are printed.
  addEventListener("beforeprint", () => { for (const one of document.querySelectorAll("details")) one.open = true; });
})();
