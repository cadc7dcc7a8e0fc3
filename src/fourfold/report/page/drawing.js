"use strict";
// What all pages draw with: elements, units, tips, legends, line charts. Each page has its data in D.
const D = JSON.parse(document.getElementById("data").textContent);

const $ = (id) => document.getElementById(id);
const node = (tag, attributes = {}, ...children) => {
  const out = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "tip") tipped(out, value);
    else if (key.startsWith("on")) out.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) out.setAttribute(key, value === true ? "" : value);
  }
  out.append(...children.filter((c) => c !== null));
  return out;
};
const digits = (x, n = 3) => Number(x.toPrecision(n)).toString();
const seconds = (s) => s >= 1 ? `${digits(s)} s` : s >= 1e-3 ? `${digits(s * 1e3)} ms` : `${digits(s * 1e6)} µs`;
const bytes = (b) => { const units = ["B", "KiB", "MiB", "GiB", "TiB"]; let k = 0; while (b >= 1024 && k < 4) { b /= 1024; k++; } return `${digits(b)} ${units[k]}`; };
const percent = (x) => `${Math.round(100 * x)} %`;

// --- words that appear over what the pointer or the keyboard is on ---
const tip = $("tip");
function tipped(element, text) {
  const show = (x, y) => { tip.textContent = typeof text === "function" ? text() : text; tip.hidden = false; place(x, y); };
  element.addEventListener("pointermove", (e) => show(e.clientX, e.clientY));
  element.addEventListener("pointerleave", () => { tip.hidden = true; });
  element.addEventListener("focus", () => { const box = element.getBoundingClientRect(); show(box.left, box.bottom); });
  element.addEventListener("blur", () => { tip.hidden = true; });
}
function place(x, y) {
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 16}px`;
}
document.addEventListener("keydown", (e) => { if (e.key === "Escape") tip.hidden = true; });

function legend(place, entries) {
  place.replaceChildren(...entries.map(([colour, text]) => node("li", {}, node("i", { style: `background:${colour}` }), text)));
}

// --- line charts: x is logarithmic, y as `logarithmic` says; curves are {name, colour, points}, points {x, y, tip, hollow} ---
const share = (low, high, logarithmic) => (v) => low === high ? .5 : logarithmic ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
const tickText = (v) => v >= 100 ? Math.round(v).toLocaleString("en") : digits(v);
function lineChart({ label, curves, xs, ticks, range, logarithmic, width, tall }) {
  const left = 64, right = 20, top = 8, under = 34, across = share(xs[0], xs.at(-1), true), up = share(...range, logarithmic);
  const x = (v) => left + (width - left - right) * across(v), y = (v) => top + (tall - under - top) * (1 - up(v));
  const svg = node("svg:svg", { viewBox: `0 0 ${width} ${tall}`, role: "img", "aria-label": label });
  xs.forEach((v) => svg.append(node("svg:line", { x1: x(v), x2: x(v), y1: top, y2: tall - under, style: "stroke:var(--line)" }), node("svg:text", { x: x(v), y: tall - 12, "text-anchor": "middle" }, v)));
  ticks.forEach((v) => svg.append(node("svg:line", { x1: left, x2: width - right, y1: y(v), y2: y(v), style: "stroke:var(--line)" }), node("svg:text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, tickText(v))));
  curves.forEach(({ colour, points }) => {
    svg.append(node("svg:polyline", { points: points.map((p) => `${x(p.x)},${y(p.y)}`).join(" "), style: `fill:none;stroke:${colour};stroke-width:2` }));
    points.forEach((p) => svg.append(node("svg:circle", { cx: x(p.x), cy: y(p.y), r: 4, tabindex: 0, style: `fill:${p.hollow ? "var(--card)" : colour};stroke:${colour};stroke-width:2`, tip: p.tip })));
  });
  return svg;
}

$("theme").onclick = () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
};
