// The page of a reproduction: its tables, a chart below each that has curves, and what was expected.
const STEEP = 20; // curves whose largest value is more times the smallest are drawn on a logarithmic y

const rows = (tag, some) => some.map((row) => node("tr", {}, ...row.map((text) => node(tag, {}, text))));
function section({ title, head, rows: body, note, plot }) {
  const table = node("table", {}, node("thead", {}, ...rows("th", [head])), node("tbody", {}, ...rows("td", body)));
  const curves = Object.entries(plot).map(([name, points], k) => ({ name, colour: `var(--c${k % 10})`, points: points.map(([x, y]) => ({ x, y, tip: `${name} at ${x}: ${digits(y, 4)}` })) }));
  return node("section", {}, node("h2", {}, title), node("div", { class: "scroll" }, table), ...(note ? [node("p", { class: "hint" }, note)] : []), ...(curves.some((c) => c.points.length) ? chart(title, curves) : []));
}
function chart(label, curves) {
  const points = curves.flatMap((c) => c.points), ys = points.map((p) => p.y), least = Math.min(...ys), most = Math.max(...ys);
  const xs = [...new Set(points.map((p) => p.x))].sort((a, b) => a - b);
  const logarithmic = least > 0 && most / least > STEEP, ticks = logarithmic ? powersOfTen(least, most) : [0, 1, 2, 3, 4].map((k) => 1.08 * most * k / 4);
  const names = node("ul", { class: "legend" });
  legend(names, curves.map((c) => [c.colour, c.name]));
  const svg = lineChart({ label, curves, xs, ticks, range: [ticks[0], ticks.at(-1)], logarithmic, width: 640, tall: 280 });
  return [node("div", { class: "plot" }, svg), names];
}
function powersOfTen(least, most) {
  const first = Math.floor(Math.log10(least)), last = Math.ceil(Math.log10(most));
  return Array.from({ length: last - first + 1 }, (_, k) => 10 ** (first + k));
}

document.title = D.title;
$("title").textContent = D.title;
$("sections").append(...D.tables.map(section));
$("sections").lastElementChild.append(...D.notes.map((text) => node("p", {}, text)));
