"use strict";
/* Helpers of the page: numbers from packed text, elements, and the theme. */
const rc = { data: JSON.parse(document.getElementById("data").textContent) };

/* A float16 has 65,536 values, so a table decodes it. */
rc.half = (() => {
  const table = new Float32Array(65536);
  for (let i = 0; i < 65536; i++) {
    const sign = i >> 15 ? -1 : 1, exponent = (i >> 10) & 31, fraction = i & 1023;
    if (exponent === 31) table[i] = fraction ? NaN : sign * Infinity;
    else table[i] = sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  }
  return table;
})();

/* Unpack "kind:base64": deflated planes of bytes of equal weight, least first. */
rc.unpack = async (text) => {
  const kind = text.slice(0, 2), size = +kind[1];
  const raw = atob(text.slice(3)), deflated = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) deflated[i] = raw.charCodeAt(i);
  const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = planes.length / size, bytes = new Uint8Array(planes.length);
  if (size === 1) return planes;
  for (let p = 0; p < size; p++) {
    const start = p * count;
    for (let i = 0; i < count; i++) bytes[i * size + p] = planes[start + i];
  }
  if (kind === "f2") {
    const bits = new Uint16Array(bytes.buffer), values = new Float32Array(count);
    for (let i = 0; i < count; i++) values[i] = rc.half[bits[i]];
    return values;
  }
  return new { f4: Float32Array, f8: Float64Array, i4: Int32Array }[kind](bytes.buffer);
};

/* Create an element. Text never becomes markup: children that are strings are text nodes. */
rc.el = (tag, attributes, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
};

rc.number = (value) => {
  if (!Number.isFinite(value)) return value === undefined || Number.isNaN(value) ? "–" : String(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 4);
};
rc.percent = (value) => (value >= 0.0995 ? (100 * value).toFixed(1) : (100 * value).toPrecision(2)) + " %";

rc.color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
rc.curveColor = (index) => rc.color(`--curve-${index % 6}`);
rc.redraw = [];

rc.save = (name, blob) => {
  const link = rc.el("a", { href: URL.createObjectURL(blob), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

rc.switchTheme = () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  rc.redraw.forEach((draw) => draw());
};
document.getElementById("theme").addEventListener("click", rc.switchTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => rc.redraw.forEach((draw) => draw()));

/* Keys belong to the page, unless the reader types. */
rc.keys = { t: rc.switchTheme };
document.addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = !event.ctrlKey && !event.metaKey && !event.altKey && rc.keys[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});
