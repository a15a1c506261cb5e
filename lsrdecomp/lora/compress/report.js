"use strict";
document.querySelectorAll(".lsrdecomp-report").forEach((host) => {
  // A browser makes the shadow root of a page that it loads, not of one that a notebook shows.
  const template = host.querySelector("template");
  if (template) host.attachShadow({ mode: "open" }).append(template.content);
  host.shadowRoot.querySelectorAll("table.layers").forEach((table) => {
    const heads = [...table.querySelectorAll("th")];
    const value = (row, column) => row.cells[column].dataset.v;
    heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const compare = (a, b) => {
        const [x, y] = [value(a, column), value(b, column)];
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
        return down ? -order : order;
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
    }));
  });
});
