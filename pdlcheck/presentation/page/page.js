"use strict";

const draw = async (place) => vegaEmbed(
  place, JSON.parse(place.firstElementChild.textContent), { renderer: "svg", actions: false });
for (const place of document.querySelectorAll(".chart")) {
  draw(place).catch((error) => { place.classList.add("failed"); console.error(error); });
}

// dark or light: what the system says, until the button is pressed
const theme = document.getElementById("theme");
const isDark = () => (document.documentElement.dataset.theme
  ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const name = () => { theme.textContent = isDark() ? "light" : "dark"; };
theme.hidden = false;
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  name();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
name();

// a press on a title sorts by its column, a second one the other way round; rows without a number come last
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  for (const button of table.querySelectorAll("thead button")) {
    const head = button.parentElement;
    button.addEventListener("click", () => {
      const sign = head.ariaSort === "ascending" ? -1 : 1;
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.ariaSort = sign > 0 ? "ascending" : "descending";
      const key = (row) => {
        const cell = row.cells[head.cellIndex];
        return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
      };
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        return sign * (typeof x === "number" && typeof y === "number"
          ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
      };
      body.append(...[...body.rows].sort(order));
    });
  }
}

for (const grid of document.querySelectorAll(".grid:has(.tools)")) {
  const filter = grid.querySelector(".filter");
  const minor = grid.querySelector("input.minor");
  const rows = [...grid.querySelector("tbody").rows];
  const show = () => {
    const wanted = filter.value.toLowerCase();
    for (const row of rows) {
      row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted)
        || (minor !== null && !minor.checked && row.classList.contains("minor"));
    }
    grid.querySelector(".count").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  filter.addEventListener("input", show);
  minor?.addEventListener("change", show);
  show();
}
