/* Curves, histograms and breakdowns: hover, zoom, pan, scale, smoothing, choice of runs and steps, export. */
rc.charts = new Map();
rc.bars = [];
rc.hidden = new Set();
rc.smoothing = 0;
rc.steps = [null, null];
rc.WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7, 1e8, 1e9];
rc.sync = uPlot.sync("steps");

/* Join curves on their x values; null where a curve has none. */
rc.joined = (curves) => uPlot.join(curves.map((c) => [Array.from(c.x), Array.from(c.y, (v) => (Number.isFinite(v) ? v : null))]));

rc.smooth = (values) => {
  if (!rc.smoothing) return values;
  let mean = null;
  return values.map((v) => (v === null || v === undefined ? v : (mean = mean === null ? v : rc.smoothing * mean + (1 - rc.smoothing) * v)));
};

/* Dashed lines of the registry's ranges, with their label at the right edge; a margin keeps it legible on curves. */
rc.guides = (guides, onset) => (u) => {
  const { ctx } = u, { left, top, width, height } = u.bbox, ratio = devicePixelRatio;
  const write = (text, x, y) => {
    ctx.save();
    ctx.setLineDash([]);
    ctx.lineWidth = 4 * ratio;
    ctx.strokeStyle = rc.color("--card");
    ctx.strokeText(text, x, y);
    ctx.restore();
    ctx.fillText(text, x, y);
  };
  ctx.save();
  ctx.font = `${10 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "right";
  for (const guide of guides) {
    const y = u.valToPos(guide.value, "y", true);
    if (!(y >= top && y <= top + height)) continue;
    ctx.strokeStyle = ctx.fillStyle = rc.color(guide.kind === "ideal" ? "--good" : "--bad");
    ctx.lineWidth = ratio;
    ctx.setLineDash([5 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(left, y);
    ctx.lineTo(left + width, y);
    ctx.stroke();
    write(guide.label, left + width - 2 * ratio, y - 3 * ratio);
  }

  /* A line where the first cause begins. */
  const x = typeof onset === "number" ? u.valToPos(onset, "x", true) : NaN;
  if (x >= left && x <= left + width) {
    ctx.strokeStyle = ctx.fillStyle = rc.color("--warn");
    ctx.lineWidth = 1.5 * ratio;
    ctx.setLineDash([2 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
    const right = x > left + width / 2;
    ctx.textAlign = right ? "right" : "left";
    write(`first cause: step ${onset}`, x + (right ? -4 : 4) * ratio, top + 10 * ratio);
  }
  ctx.restore();
};

/* Shift and drag, or the wheel with Shift, pan; the wheel with Ctrl zooms around the cursor. Dragging zooms. */
rc.panning = {
  hooks: {
    ready: (u) => {
      const move = (by) => {
        const { min, max } = u.scales.x;
        rc.setSteps(min + by, max + by);
      };
      u.over.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.shiftKey) return;
        event.preventDefault();
        const { min, max } = u.scales.x, delta = event.deltaY || event.deltaX;
        if (event.shiftKey) return move(((max - min) * Math.sign(delta)) / 10);
        const at = u.posToVal(event.offsetX, "x"), factor = delta > 0 ? 1.25 : 0.8;
        rc.setSteps(at - (at - min) * factor, at + (max - at) * factor);
      }, { passive: false });
      u.over.addEventListener("mousedown", (event) => {
        if (!event.shiftKey) return;
        event.preventDefault();
        event.stopImmediatePropagation();
        let last = event.clientX;
        const drag = (e) => {
          const { min, max } = u.scales.x;
          move(((last - e.clientX) * (max - min)) / u.over.clientWidth);
          last = e.clientX;
        };
        document.addEventListener("mousemove", drag);
        document.addEventListener("mouseup", () => document.removeEventListener("mousemove", drag), { once: true });
      }, true);
      u.over.addEventListener("dblclick", () => rc.setSteps(null, null));
    },
  },
};

rc.axis = (extra) => ({
  stroke: () => rc.color("--soft"),
  grid: { stroke: () => rc.color("--line"), width: 1 },
  ticks: { stroke: () => rc.color("--line"), width: 1, size: 4 },
  font: "11px system-ui, sans-serif",
  ...extra,
});

/* Zoom and pan every chart over the steps at once; null shows all steps. */
rc.setSteps = (from, to) => {
  rc.steps = [from, to];
  for (const chart of rc.charts.values()) {
    if (chart.spec.across !== "step" || !chart.plot) continue;
    const xs = chart.plot.data[0], end = xs.length - 1;
    const pad = xs.length > 1 ? 0 : 1;
    chart.plot.setScale("x", { min: from ?? xs[0] - pad, max: to ?? xs[end] + pad });
  }
  const [first, last] = document.querySelectorAll("#chart-tools input[type=number]");
  if (first) [first.value, last.value] = [from === null ? "" : Math.round(from), to === null ? "" : Math.round(to)];
};

/* Draw one chart into its figure; called again when the data, the scale or the smoothing change. */
rc.draw = (chart) => {
  const { spec, figure } = chart, box = figure.querySelector(".plot");
  if (!chart.curves.length) return;
  const level = spec.name === "kl" && rc.data.noise > 0 ? [{ value: rc.data.noise, kind: "ideal", label: "k3 from noise alone" }] : [];
  const log = chart.log ?? spec.log;
  const data = rc.joined(chart.curves);
  const shown = data.map((values, i) => (i ? rc.smooth(values) : values));
  const sizes = data.slice(1).flat().filter((v) => v).map(Math.abs).sort((a, b) => a - b);
  const linear = sizes.length ? Math.max(sizes[Math.floor(sizes.length / 10)], 1e-9) : 1e-3;
  const range = (u, low, high) => {
    if (low === null) return [0, 1];
    const solid = spec.guides.filter((g) => !g.optional && !log).map((g) => g.value);
    low = Math.min(low, ...(log ? [] : spec.bounds), ...solid.filter((v) => v > low - 4 * (high - low || 1)));
    high = Math.max(high, ...(log ? [] : spec.bounds), ...solid.filter((v) => v < high + 4 * (high - low || 1)));
    for (const { value } of level) [low, high] = [Math.min(low, value), Math.max(high, value)];
    const pad = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    return log ? [low > 0 ? low / 1.5 : low * 1.5, high * 1.5] : [low - pad, high + pad];
  };
  const positive = sizes.length && data.slice(1).flat().every((v) => v === null || v === undefined || v > 0);
  const options = {
    width: box.clientWidth || 400,
    height: +box.dataset.height || 220,
    plugins: [rc.panning],
    hooks: {
      draw: [rc.guides([...spec.guides, ...level], spec.across === "step" ? rc.data.onset : null)],
      setSelect: [(u) => {
        if (u.select.width < 4 || spec.across !== "step") return;
        const to = u.posToVal(u.select.left + u.select.width, "x");
        rc.setSteps(u.posToVal(u.select.left, "x"), to);
        u.setSelect({ width: 0, height: 0 }, false);
      }],
    },
    cursor: {
      drag: { x: true, y: false, setScale: false },
      sync: spec.across === "step" ? { key: "steps", scales: ["x", null] } : {},
      focus: { prox: 24 },
      points: { size: 6 },
    },
    focus: { alpha: 0.35 },
    legend: { live: true },
    scales: { x: { time: false }, y: { distr: log ? (positive ? 3 : 4) : 1, asinh: linear, range } },
    axes: [
      rc.axis({ ...(spec.across === "step" ? { incrs: rc.WHOLE } : {}), label: spec.across, labelSize: 16, labelFont: "11px system-ui, sans-serif", size: 34 }),
      rc.axis({ size: 58, ...(log ? { splits: (u, i, low, high) => rc.logTicks(low, high, linear), filter: (u, splits) => splits } : {}), values: (u, splits) => rc.ticks(splits) }),
    ],
    series: [
      { label: spec.across, value: (u, v) => (v === null ? "" : String(v)) },
      ...chart.curves.map((curve, i) => ({
        label: curve.label,
        stroke: () => rc.curveColor(i),
        width: 1.5,
        dash: i >= 6 ? [6, 3] : undefined,
        spanGaps: true,
        show: !rc.hidden.has(curve.label),
        points: { show: data[0].length <= 30, size: 5 },
        value: (u, v) => (v === null ? "" : rc.number(v)),
      })),
    ],
  };
  chart.plot?.destroy();
  box.replaceChildren();
  chart.plot = new uPlot(options, shown, box);
  if (spec.across === "step" && rc.steps[0] !== null) chart.plot.setScale("x", { min: rc.steps[0], max: rc.steps[1] });
};

/* Ticks of a logarithmic axis: powers of ten, with 2 and 5 between few of them, and 0 on an axis that is linear below
   `linear`. uPlot's own ticks never end where a range begins between powers of ten. */
rc.logTicks = (low, high, linear) => {
  const side = (from, to) => {
    const first = Math.floor(Math.log10(from)), last = Math.ceil(Math.log10(to)), found = [];
    for (let power = first; power <= last; power += Math.max(1, Math.ceil((last - first) / 7))) {
      for (const factor of last - first < (low > 0 ? 3 : 2) ? [1, 2, 5] : [1]) found.push(+`${factor}e${power}`);
    }
    return found.filter((v) => v >= from && v <= to);
  };
  const ticks = low > 0 ? side(low, high) : [...side(linear, Math.max(-low, 1e-300)).reverse().map((v) => -v), 0, ...side(linear, Math.max(high, 1e-300))];
  return ticks.length > 1 ? ticks : [0, 1, 2, 3].map((i) => low + ((high - low) * i) / 3);
};

rc.isDecade = (v) => v !== 0 && Math.abs(Math.log10(Math.abs(v)) - Math.round(Math.log10(Math.abs(v)))) < 1e-6;
rc.tick = (v, digits = 4) => {
  const size = Math.abs(v);
  if (size && (size >= 1e5 || size < 1e-3)) return v.toExponential(1).replace(".0e", "e").replace("e+", "e");
  return String(+v.toPrecision(digits));
};

/* Labels of an axis, with the digits that tell them apart. */
rc.ticks = (splits) => {
  for (let digits = 4; ; digits++) {
    const labels = splits.map((v) => (v === null ? "" : rc.tick(v, digits))), shown = labels.filter((text) => text);
    if (digits > 8 || new Set(shown).size === shown.length) return labels;
  }
};

/* What a figure looks like as vectors: its axes, guide lines and curves, for papers. */
rc.toSvg = (chart) => {
  const u = chart.plot, ratio = devicePixelRatio, W = u.width, H = u.height + 24;
  const esc = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const box = Object.fromEntries(Object.entries(u.bbox).map(([k, v]) => [k, v / ratio]));
  const x = (v) => u.valToPos(v, "x", true) / ratio, y = (v) => u.valToPos(v, "y", true) / ratio;
  const ink = rc.color("--ink"), line = rc.color("--line");
  const parts = [`<rect width="${W}" height="${H}" fill="${rc.color("--card")}"/><g transform="translate(0 24)">`];
  parts.push(`<text x="8" y="-8" font-weight="bold" fill="${ink}">${esc(chart.spec.title)}</text>`);
  for (const [axis, at] of [[u.axes[0], x], [u.axes[1], y]]) {
    (axis._splits || []).forEach((v, i) => {
      if (v === null || axis._values[i] === "" || axis._values[i] === null) return;
      const p = at(v), along = at === x;
      const ends = along ? [p, box.top, p, box.top + box.height] : [box.left, p, box.left + box.width, p];
      parts.push(`<path d="M${ends[0]} ${ends[1]}L${ends[2]} ${ends[3]}" stroke="${line}"/>`);
      const place = along ? `x="${p}" y="${box.top + box.height + 14}" text-anchor="middle"` : `x="${box.left - 6}" y="${p + 4}" text-anchor="end"`;
      parts.push(`<text ${place} fill="${ink}">${esc(axis._values[i])}</text>`);
    });
  }
  parts.push(`<clipPath id="c"><rect x="${box.left}" y="${box.top}" width="${box.width}" height="${box.height}"/></clipPath>`);
  for (const guide of chart.spec.guides || []) {
    const color = rc.color(guide.kind === "ideal" ? "--good" : "--bad"), p = y(guide.value);
    parts.push(`<path clip-path="url(#c)" d="M${box.left} ${p}h${box.width}" stroke="${color}" stroke-dasharray="5 3"/>`);
  }
  u.series.slice(1).forEach((series, i) => {
    if (!series.show) return;
    const points = [];
    u.data[i + 1].forEach((v, k) => v !== null && v !== undefined && points.push(`${x(u.data[0][k]).toFixed(1)} ${y(v).toFixed(1)}`));
    const color = rc.curveColor(i);
    parts.push(`<polyline clip-path="url(#c)" fill="none" stroke="${color}" stroke-width="1.5" points="${points.join(",")}"/>`);
    parts.push(`<text x="${W - 8}" y="${14 + 13 * i}" text-anchor="end" fill="${color}">${esc(series.label)}</text>`);
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${W}" height="${H}" font-family="sans-serif" font-size="11">${parts.join("")}</g></svg>`;
};

rc.exportChart = (chart, kind) => {
  if (kind === "svg") return rc.save(`${chart.spec.name}.svg`, new Blob([rc.toSvg(chart)], { type: "image/svg+xml" }));
  const source = chart.plot.ctx.canvas, ratio = devicePixelRatio, canvas = rc.el("canvas");
  canvas.width = source.width;
  canvas.height = source.height + 24 * ratio;
  const ctx = canvas.getContext("2d");
  ctx.fillStyle = rc.color("--card");
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.fillStyle = rc.color("--ink");
  ctx.font = `bold ${12 * ratio}px sans-serif`;
  ctx.fillText(chart.spec.title, 8 * ratio, 16 * ratio);
  ctx.drawImage(source, 0, 24 * ratio);
  canvas.toBlob((blob) => rc.save(`${chart.spec.name}.png`, blob));
};

/* The buttons of a figure. */
rc.chartButtons = (chart) => {
  const button = (text, title, act) => rc.el("button", { title, onclick: act }, text);
  const scale = button("log", "Switch between a linear and a logarithmic scale", () => {
    chart.log = !(chart.log ?? chart.spec.log);
    scale.classList.toggle("on", chart.log);
    rc.draw(chart);
  });
  scale.classList.toggle("on", chart.spec.log);
  const kinds = ["svg", "png"].map((kind) => button(kind, `Save as ${kind.toUpperCase()}`, () => rc.exportChart(chart, kind)));
  chart.figure.querySelector("figcaption").append(rc.el("span", { className: "buttons" }, scale, ...kinds));
};

rc.unpackCurves = (spec) => Promise.all(spec.curves.map(async (c) => ({ label: c.label, x: await rc.unpack(c.x), y: await rc.unpack(c.y) })));

/* Show a chart; one that the reader asked for gets a figure of its own. */
rc.showChart = async (spec) => {
  let figure = document.getElementById(spec.name);
  if (!figure || figure.tagName !== "FIGURE") {
    figure = rc.el("figure", {}, rc.el("figcaption", {}, rc.el("b", {}, spec.title)), rc.el("div", { className: "plot" }));
    document.getElementById("charts").prepend(figure);
  }
  const chart = { spec, figure, curves: await rc.unpackCurves(spec) };
  rc.charts.set(spec.name, chart);
  if (chart.curves.length) rc.chartButtons(chart);
  rc.draw(chart);
};

/* Above the charts: runs, steps, smoothing, and a search over all metrics. */
rc.chartTools = () => {
  const tools = document.getElementById("chart-tools"), redraw = () => rc.charts.forEach(rc.draw);
  for (const [index, run] of (rc.data.runs || []).entries()) {
    const box = rc.el("input", { type: "checkbox", checked: true, onchange: () => {
      rc.hidden[box.checked ? "delete" : "add"](run);
      redraw();
    } });
    const name = rc.el("span", {}, run);
    name.style.color = `var(--curve-${index % 6})`;
    tools.append(rc.el("label", {}, box, name));
  }
  const ends = ["first", "last"].map((name) => rc.el("input", { type: "number", placeholder: name, title: `${name} step shown` }));
  ends.forEach((input) => input.addEventListener("change", () => {
    const [from, to] = ends.map((one) => (one.value === "" ? null : +one.value));
    const all = [...rc.charts.values()].filter((c) => c.plot && c.spec.across === "step").map((c) => c.plot.data[0]);
    if (from === null && to === null) rc.setSteps(null, null);
    else rc.setSteps(from ?? Math.min(...all.map((x) => x[0])), to ?? Math.max(...all.map((x) => x[x.length - 1])));
  }));
  const smoothing = rc.el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, title: "Exponential smoothing", oninput: () => {
    rc.smoothing = +smoothing.value;
    redraw();
  } });
  const others = rc.data.charts.filter((spec) => spec.optional);
  const names = rc.el("datalist", { id: "metrics" }, ...others.slice(0, 300).map((spec) => rc.el("option", { value: spec.title })));
  const said = rc.el("span", { className: "said" });
  const search = rc.el("input", { type: "search", placeholder: `add one of ${others.length} metrics`, list: "metrics", onchange: () => {
    const wanted = search.value.trim().toLowerCase(), same = others.filter((one) => one.title.toLowerCase() === wanted);
    const matches = same.length ? same : others.filter((one) => one.title.toLowerCase().includes(wanted));
    said.textContent = "";
    if (!wanted) return;
    matches.slice(0, 4).forEach((spec) => rc.charts.has(spec.name) || rc.showChart(spec));
    if (!matches.length) said.textContent = `no match for ${search.value.trim()}`;
    if (matches.length > 4) said.textContent = `first 4 of ${matches.length} matches`;
    search.value = "";
  } });
  const reset = rc.el("button", { onclick: () => rc.setSteps(null, null), title: "Show all steps (0)" }, "all steps");
  const help = rc.el("span", { className: "soft" }, "drag: zoom · Shift-drag: pan · double-click: all");
  tools.append(rc.el("label", {}, "steps ", ...ends), reset, rc.el("label", {}, "smooth ", smoothing), ...(others.length ? [search, names, said] : []), help);
};

/* Bars of a table by bin: `raw` and `applied` side by side; logarithmic above 1 token, or above 1/1000 of the largest. */
rc.showBars = (title, edges, curves, count, note) => {
  const figure = rc.el("figure", {}, rc.el("figcaption", {}, rc.el("b", {}, title), rc.el("span", { className: "see" }, note)), rc.el("div", { className: "plot" }));
  document.getElementById("breakdowns").append(figure);
  const box = figure.querySelector(".plot"), labels = edges.map((edge) => rc.tick(+edge.toPrecision(3))), xs = edges.map((_, i) => i);

  /* Label powers of ten where there are some, else every few bins. */
  const span = Math.max(1, Math.ceil(edges.length / 7)), tens = xs.filter((i) => rc.isDecade(edges[i]));
  const ticks = (tens.length > 2 ? tens : xs).reduce((found, i) => (found.length && i - found[found.length - 1] < span ? found : [...found, i]), []);
  const chart = { spec: { name: title.replace(/\W+/g, "_"), title, across: "bin", guides: [] }, figure };
  const most = Math.max(0, ...curves.flatMap((curve) => curve.y)), linear = count ? 1 : 10 ** Math.floor(Math.log10(most || 1) - 2);
  const draw = () => {
    chart.plot?.destroy();
    chart.plot = new uPlot({
      width: box.clientWidth || 400,
      height: 200,
      cursor: { drag: { x: false, y: false } },
      scales: { x: { time: false, range: [-0.6, labels.length - 0.4] }, y: { distr: 4, asinh: linear, range: () => [0, (most || 1) * 1.5] } },
      axes: [
        rc.axis({ splits: () => ticks, values: (u, splits) => splits.map((i) => labels[i] ?? ""), size: 30 }),
        rc.axis({ size: 58, splits: (u, i, low, high) => rc.logTicks(low, high, linear), filter: (u, splits) => splits, values: (u, splits) => rc.ticks(splits) }),
      ],
      series: [
        { label: "bin", value: (u, v) => (v === null ? "" : labels[v]) },
        ...curves.map((curve, i) => ({
          label: curve.label,
          stroke: () => rc.curveColor(i),
          fill: () => rc.curveColor(i) + "66",
          width: 1,
          points: { show: false },
          paths: uPlot.paths.bars({ size: [0.42, 60], align: i ? 1 : -1 }),
          value: (u, v) => (v === null ? "" : rc.number(v)),
        })),
      ],
    }, [xs, ...curves.map((curve) => curve.y)], box);
  };
  draw();
  rc.bars.push(Object.assign(chart, { draw }));
  rc.chartButtons({ ...chart, get plot() { return chart.plot; } });
  figure.querySelector("button").remove();
};

/* Distributions, raw and applied, then the breakdowns; of the run that the viewer shows. */
rc.showBreakdowns = (run) => {
  document.getElementById("breakdowns").replaceChildren();
  rc.bars.length = 0;
  for (const [name, { edges, counts }] of Object.entries(run.histograms)) {
    const curves = [{ label: "raw", y: counts[0] }, { label: "applied", y: counts[1] }];
    rc.showBars(`Distribution of ${name}`, edges.slice(0, -1), curves, true, ` ${run.diffusion ? "denoising steps" : "tokens"} per bin, by its lower edge`);
  }
  for (const [name, { edges, sums }] of Object.entries(run.breakdowns)) {
    const used = edges.map((edge, i) => i).filter((i) => sums[0][i] > 0);
    if (used.length < 2) continue;
    const [tokens, kl, kept, keptKl] = sums, per = (sum, count) => used.map((i) => (count[i] ? sum[i] / count[i] : null));
    const curves = [{ label: "raw", y: per(kl, tokens) }, { label: "applied", y: per(keptKl, kept) }];
    const measure = run.diffusion ? "KL per denoising step" : "k3 per token";
    rc.showBars(`${measure}, by ${name}`, used.map((i) => edges[i]), curves, false, " nats, by the lower edge of a bin");
  }
};

/* Follow the run: fetch the page again, and take over its verdict and its curves. */
rc.follow = async () => {
  const sign = document.getElementById("live");
  sign.hidden = false;
  let version = "";
  for (;;) {
    try {
      const found = await (await fetch("version")).text();
      if (version && found !== version) {
        const page = new DOMParser().parseFromString(await (await fetch(location.pathname)).text(), "text/html");
        const data = JSON.parse(page.getElementById("data").textContent);
        document.getElementById("verdict").replaceWith(page.getElementById("verdict"));
        rc.heavy?.();
        [rc.data.onset, rc.data.noise] = [data.onset, data.noise];
        for (const spec of data.charts) {
          const chart = rc.charts.get(spec.name);
          if (!chart && !spec.optional && spec.curves.length) await rc.showChart(spec);
          if (!chart) continue;
          chart.curves = await rc.unpackCurves(spec);
          rc.draw(chart);
        }
      }
      version = found;
      sign.textContent = `live · ${found.split(" ")[0]} steps`;
    } catch {
      sign.textContent = "the server has stopped";
    }
    await new Promise((wake) => setTimeout(wake, 2000));
  }
};

rc.keys["0"] = () => rc.setSteps(null, null);
rc.redraw.push(() => rc.charts.forEach(rc.draw), () => rc.bars.forEach((bar) => bar.draw()));
rc.ready = (async () => {
  rc.chartTools();
  for (const spec of rc.data.charts) if (!spec.optional && spec.curves.length) await rc.showChart(spec);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    rc.redraw.forEach((draw) => draw());
  });
  if (rc.data.live) rc.follow();
})();
