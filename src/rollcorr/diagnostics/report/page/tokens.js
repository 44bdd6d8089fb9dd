/* The token viewer: a list of tokens or sequences, largest share of k3 first, and the chosen sequence in color. */
rc.LISTED = 5000;
rc.WINDOW = 600;
rc.ROW = 26;
rc.STATES = ["masked", "kept", "rejected", "truncated"];

/* A list that holds only the rows in sight, so that its length costs nothing. */
rc.list = (columns, cells, choose) => {
  const body = rc.el("div", { className: "rows" }), pad = rc.el("div"), seen = rc.el("div", { className: "seen" });
  const head = rc.el("div", { className: "row head" }), state = { items: [], chosen: 0 };
  body.tabIndex = 0;
  pad.append(seen);
  body.append(pad);
  state.node = rc.el("div", { className: "list" }, head, body);
  const paint = () => {
    const first = Math.max(0, Math.floor(body.scrollTop / rc.ROW) - 4);
    const count = Math.ceil((body.clientHeight || 400) / rc.ROW) + 8;
    seen.style.transform = `translateY(${first * rc.ROW}px)`;
    seen.replaceChildren(...state.items.slice(first, first + count).map((item, i) => {
      const row = rc.el("div", { className: "row" + (first + i === state.chosen ? " chosen" : ""), onclick: () => state.choose(first + i) });
      row.append(...cells(item).map((text) => rc.el("span", { title: text }, text)));
      return row;
    }));
  };
  body.addEventListener("scroll", paint);
  state.choose = (index) => {
    if (!state.items.length) return;
    state.chosen = Math.min(Math.max(index, 0), state.items.length - 1);
    const top = state.chosen * rc.ROW;
    if (top < body.scrollTop) body.scrollTop = top;
    if (top + rc.ROW > body.scrollTop + body.clientHeight) body.scrollTop = top + rc.ROW - body.clientHeight;
    paint();
    choose(state.items[state.chosen]);
  };
  state.show = (items, heads) => {
    head.replaceChildren(...heads);
    state.items = items;
    state.chosen = 0;
    pad.style.height = `${items.length * rc.ROW}px`;
    body.scrollTop = 0;
    paint();
  };
  state.paint = paint;
  return state;
};

/* Unpack the tokens of a run, and compute k3, shares and the row of each token. */
rc.openRun = async (packed) => {
  const run = { ...packed, name: packed.run };
  for (const key of ["mu", "d", "weight", "state", "id", "length", "row", "step", "reward", "rowKl", "stepKl", "time"]) {
    if (packed[key]) run[key] = await rc.unpack(packed[key]);
  }

  /* Why a token was rejected is certain where only one criterion, or the veto, can reject. */
  const { rollout_rs: criteria, rollout_token_veto_threshold: veto } = packed.config ?? {};
  const ways = [...(criteria ? String(criteria).split(",") : []), ...(typeof veto === "number" ? ["the veto of tokens"] : [])];
  run.rejects = ways.length === 1 ? ways[0] : "";
  const count = run.d.length;
  run.starts = new Int32Array(run.length.length + 1);
  run.rowOf = new Int32Array(count);
  run.length.forEach((length, row) => {
    run.starts[row + 1] = run.starts[row] + length;
    run.rowOf.fill(row, run.starts[row], run.starts[row + 1]);
  });
  run.share = new Float32Array(count);
  for (let i = 0; i < count; i++) {
    let kl = run.stepKl ? run.stepKl[i] : rc.k3(run.d[i]);
    if (!Number.isFinite(run.d[i])) kl = 0;
    run.share[i] = run.kl ? kl / run.kl : 0;
  }
  run.most = run.stepKl ? run.stepKl.reduce((most, kl) => Math.max(most, kl), 0) || 1 : 1;
  run.rowShare = run.rowKl.map((kl) => (run.kl ? kl / run.kl : 0));
  return run;
};

/* exp(d) − 1 − d with d cut to ±20, as the metrics do; by its series where the difference would cancel. */
rc.k3 = (d) => {
  const cut = Math.min(Math.max(d, -20), 20);
  return Math.abs(cut) < 1e-3 ? (cut * cut) / 2 : Math.expm1(cut) - cut;
};

/* The indices with the largest keys, largest first: a threshold from a sorted copy, then a sort of the few above it. */
rc.largest = (indices, key, most) => {
  if (indices.length > most) {
    const keys = new Float32Array(indices.length);
    for (let i = 0; i < indices.length; i++) keys[i] = key(indices[i]);
    const limit = keys.slice().sort()[indices.length - most];
    const above = indices.filter((_, i) => keys[i] > limit), equal = [];
    for (let i = 0; i < indices.length && above.length + equal.length < most; i++) if (keys[i] === limit) equal.push(indices[i]);
    indices = [...above, ...equal];
  }
  return Array.from(indices).sort((a, b) => key(b) - key(a) || a - b);
};

/* Few tokens that carry half of k3 are a warning of their own, as a cause of all rows would not explain them; else the
   verdict names the worst token. A live page draws it again with each verdict. */
rc.showHeavy = (run, first, label, choose) => {
  document.querySelectorAll("#heavy, .dominated").forEach((node) => node.remove());
  let count = 0, share = 0;
  for (; count < Math.min(10, first.length) && share < 0.5; count++) share += run.share[first[count]];
  const few = share >= 0.5, [what, unit] = run.diffusion ? ["denoising step", "exact KL"] : ["token", "k3"];
  const box = document.querySelector(few ? "#verdict .verdict, #verdict h2" : "#verdict .unhealthy");
  if (!box || !(share > 0)) return;
  if (!few) [count, share] = [1, run.share[first[0]]];
  const total = `${run.count.toLocaleString("en")} ${what}s`;
  const title = few ? `${count} of ${total} ${count > 1 ? "carry" : "carries"} ${rc.percent(share)} of ${unit}: look at ${count > 1 ? "them" : "it"} first` : `the worst of ${total} carries ${rc.percent(share)} of ${unit}`;

  /* One line and one link for each token, at most three. */
  const places = first.slice(0, Math.min(count, 3)).map((i, k) => {
    const row = run.rowOf[i], text = `${run.diffusion ? "" : "token "}${label(i)} in row ${run.row[row]} of step ${run.step[row]}, position ${i - run.starts[row]}`;
    return rc.el("p", {}, rc.el("a", { href: "#tokens", onclick: () => choose(k) }, text), `: log μ ${rc.number(run.mu[i])}, log π ${rc.number(run.mu[i] + run.d[i])}`);
  });
  const more = count > 3 ? [rc.el("p", { className: "soft" }, `the other ${count - 3} follow in the list of ${what}s`)] : [];
  const name = rc.data.tokens.length > 1 ? `${run.name}: ` : "";
  const note = rc.el("section", { id: "heavy", className: few ? "verdict warning" : "" }, rc.el(few ? "strong" : "p", {}, name + title), ...places, ...more);
  box[few ? (box.matches(".unhealthy") ? "after" : "before") : "append"](note);

  /* Without a null, the level of noise is taken from all tokens of the log, so these few raise it. */
  if (few) document.querySelectorAll(".noise").forEach((node) => node.append(rc.el("b", { className: "dominated" }, ` dominated by ${count} ${what}${count > 1 ? "s" : ""}`)));
};

rc.viewer = async (box) => {
  const runs = rc.data.tokens, view = { mode: "tokens", color: "d", sort: "share", filter: "all", least: 0, search: "" };
  let run = await rc.openRun(runs[0]);
  const unit = () => (run.diffusion ? "exact KL" : "k3"), what = () => (run.diffusion ? "denoising step" : "token");
  const text = (id) => (id < 0 ? "" : run.texts[id] ?? String(id));
  const shownText = (id) => (run.texts[id] === undefined ? text(id) : JSON.stringify(run.texts[id]).slice(1, -1) || "∅");
  const label = (i) => (run.diffusion ? `t = ${rc.number(run.time[i])}` : run.id[i] < 0 ? "–" : run.texts[run.id[i]] === undefined ? `id ${run.id[i]}` : `${shownText(run.id[i])} (${run.id[i]})`);
  const position = (i) => i - run.starts[run.rowOf[i]];
  const promptOf = (row) => (typeof run.prompts[row] === "string" ? run.prompts[row] : run.prompts[row].map(text).join(Object.keys(run.texts).length ? "" : " "));

  /* What tokens and sequences are sorted by: heading → key. Smallest log-probs first, everything else largest first. */
  const tokenKeys = {
    share: (i) => run.share[i],
    "log μ": (i) => -run.mu[i],
    "log π": (i) => -(run.mu[i] + run.d[i]),
    d: (i) => Math.abs(run.d[i]) || 0,
    weight: (i) => run.weight[i],
    token: (i) => (run.diffusion ? run.time[i] : -run.id[i]),
    step: (i) => -run.step[run.rowOf[i]],
    place: (i) => -run.row[run.rowOf[i]],
  };
  const rowKeys = {
    share: (r) => run.rowShare[r],
    row: (r) => -run.row[r],
    tokens: (r) => run.length[r],
    reward: (r) => (Number.isNaN(run.reward[r]) ? -Infinity : run.reward[r]),
    step: (r) => run.step[r],
    mean: (r) => run.rowKl[r] / Math.max(1, run.length[r]),
  };
  const tokenCells = (i) => [rc.percent(run.share[i]), label(i), String(run.step[run.rowOf[i]]), `${run.row[run.rowOf[i]]}:${position(i)}`, rc.number(run.d[i]), rc.number(run.mu[i]), rc.number(run.mu[i] + run.d[i]), ...(run.applied ? [rc.number(run.weight[i])] : [])];
  const rowCells = (r) => [rc.percent(run.rowShare[r]), String(run.row[r]), String(run.step[r]), String(run.length[r]), rc.number(run.reward[r]), rc.number(run.rowKl[r] / Math.max(1, run.length[r])), promptOf(r) || "–"];
  const heads = () => {
    const names = view.mode === "tokens" ? [["share", run.diffusion ? "share of KL" : "share of k3"], ["token", run.diffusion ? "timestep" : "token"], ["step"], ["place", "row:pos"], ["d", run.diffusion ? "J" : "d"], ["log μ"], ["log π"], ...(run.applied ? [["weight"]] : [])] : [["share", run.diffusion ? "share of KL" : "share of k3"], ["row"], ["step"], ["tokens", word("tokens")], ["reward"], ["mean", `${unit()} each`], [null, "prompt"]];
    return names.map(([key, title]) => rc.el(key ? "button" : "span", key ? { className: view.sort === key ? "on" : "", onclick: () => update({ sort: key }), title: "Sort by this" } : {}, (key && view.sort === key ? "▾ " : "") + (title || key)));
  };

  const count = rc.el("span", { className: "soft" }), legend = rc.el("div", { className: "legend soft" }), detail = rc.el("div", { className: "detail" });
  const list = rc.list(null, (item) => (view.mode === "tokens" ? tokenCells(item) : rowCells(item)), (item) => {
    if (view.mode === "tokens") show(run.rowOf[item], item);
    else show(item, worstOf(item));
  });

  const worstOf = (row) => {
    let best = run.starts[row];
    for (let i = run.starts[row]; i < run.starts[row + 1]; i++) if (run.share[i] > run.share[best]) best = i;
    return best;
  };

  /* The tokens that pass the filters; a search finds the text or the id of a token, or the prompt of its sequence. */
  const passing = () => {
    const wanted = view.search.toLowerCase(), found = [], prompts = new Set(), state = rc.STATES.indexOf(view.filter);
    const ids = new Map(), matches = (id) => {
      if (!ids.has(id)) ids.set(id, String(id) === wanted || (run.texts[id] ?? "").toLowerCase().includes(wanted));
      return ids.get(id);
    };
    const asks = (prompt, row) => (typeof prompt === "string" ? prompt.toLowerCase().includes(wanted) : prompt.some(matches) || (Object.keys(run.texts).length && promptOf(row).toLowerCase().includes(wanted)));
    if (wanted) run.prompts.forEach((prompt, row) => asks(prompt, row) && prompts.add(row));
    for (let i = 0; i < run.d.length; i++) {
      if (state >= 0 ? run.state[i] !== state && !(state === 1 && run.state[i] === 3) : view.mode === "tokens" && run.state[i] === 0) continue;
      if (view.least && !(Math.abs(run.d[i]) >= view.least)) continue;
      if (wanted && !(prompts.has(run.rowOf[i]) || (run.id[i] >= 0 && matches(run.id[i])))) continue;
      found.push(i);
    }
    return found;
  };

  const update = (change) => {
    Object.assign(view, change);
    if (change.mode) view.sort = "share";
    let items = passing();
    if (view.mode === "sequences") items = [...new Set(items.map((i) => run.rowOf[i]))];
    const total = items.length;
    items = rc.largest(items, (view.mode === "tokens" ? tokenKeys : rowKeys)[view.sort], rc.LISTED);
    count.textContent = total > items.length ? `first ${items.length.toLocaleString("en")} of ${total.toLocaleString("en")}` : `${total.toLocaleString("en")} ${word(view.mode)}`;
    list.node.classList.toggle("sequences", view.mode === "sequences");
    list.node.classList.toggle("unweighted", !run.applied);
    explain();
    list.show(items, heads());
    modes.forEach((button) => button.classList.toggle("on", button.value === view.mode));
    if (items.length) list.choose(0);
    else detail.replaceChildren(rc.el("p", { className: "soft" }, "Nothing passes the filters."));
  };

  /* What the columns and the colors mean, for what is shown now. */
  const explain = () => {
    const diffusion = run.diffusion, one = word("token"), key = (color, name) => {
      const sample = rc.el("i", { className: "key" });
      sample.style.background = `var(${color})`;
      return rc.el("span", {}, sample, name);
    };
    const less = [key("--less", "π below μ"), key("--more", "π above μ"), rc.el("span", {}, "the stronger, the farther apart")];
    const colorKeys = {
      d: diffusion ? [key("--bad", "the stronger, the larger the exact KL")] : less,
      weight: run.applied ? [key("--less", "weight below 1"), key("--more", "above 1")] : ["weights are not applied: no color"],
      kept: [key("--masked", "masked"), key("--bad", "rejected"), key("--curve-1", "truncated"), "kept: no color"],
      surprisal: [key("--curve-2", "the stronger, the less likely under μ")],
    }[view.color];
    const marks = [rc.el("span", { className: "token rejected" }, "rejected"), ...(run.applied ? [rc.el("span", { className: "token truncated" }, "weight truncated")] : [])];
    const ratio = diffusion ? "J = log π − log μ of a denoising step; share of KL: its exact KL, of the sum over the log." : "d = log π − log μ, nats; share of k3: exp(d) − 1 − d of the token, of the sum over the log.";
    legend.replaceChildren(
      rc.el("p", {}, `μ is the sampler, π the trainer. ${ratio} Rows and positions count from 0; rows over all files of the log.`),
      ...(run.applied ? [] : [rc.el("p", {}, "Weights are not applied in this run: each kept " + one + " counts as 1.")]),
      rc.el("p", { className: "keys" }, rc.el("b", {}, `Color of a ${one}`), ...colorKeys, rc.el("b", {}, "Dotted line below"), ...marks),
      rc.el("p", { className: "hint" }, "Swipe the table sideways for log μ and log π."),
    );
  };

  /* Background of a token: blue where π is lower, red where it is higher; stronger where it is farther. */
  const tint = (i) => {
    const strength = (x) => Math.min(1, Math.asinh(8 * x) / Math.asinh(16));
    const mix = (color, x) => (x > 0.02 ? `color-mix(in srgb, ${color} ${Math.round(78 * x)}%, transparent)` : "");
    if (view.color === "weight" && !run.applied) return "";
    const d = view.color === "weight" ? Math.log(Math.max(run.weight[i], 1e-3)) : run.d[i];
    if (view.color === "kept") return ["var(--masked)", "", mix("var(--bad)", 0.8), mix("var(--curve-1)", 0.6)][run.state[i]];
    if (view.color === "surprisal") return mix("var(--curve-2)", Math.min(1, -run.mu[i] / 8));
    if (run.diffusion && view.color === "d") return mix("var(--bad)", Math.sqrt(run.stepKl[i] / run.most));
    return Number.isFinite(d) ? mix(d > 0 ? "var(--more)" : "var(--less)", strength(Math.abs(d))) : "var(--masked)";
  };

  /* Why a token was rejected, where that is certain: a log-prob is missing, or only one thing can reject. */
  const stateOf = (i) => rc.STATES[run.state[i]] + (run.state[i] !== 2 ? "" : !Number.isFinite(run.d[i]) ? ": a log-prob is missing" : run.rejects ? ` by ${run.rejects}` : "");

  /* The file of a row, and the row in it. */
  const fileOf = (row) => {
    for (const [name, rows, first] of run.files) {
      if (row < rows) return [["file, row in it", `${name}, ${row + first}`]];
      row -= rows;
    }
    return [];
  };

  const facts = (i) => {
    const d = run.d[i], row = run.rowOf[i], names = [["share of " + unit(), rc.percent(run.share[i])], ["log μ", rc.number(run.mu[i])], ["log π", rc.number(run.mu[i] + d)], [run.diffusion ? "J" : "d", rc.number(d)], [unit(), rc.number(run.share[i] * run.kl)], ["weight", run.applied ? rc.number(run.weight[i]) : "not applied"], ["state", stateOf(i)], ["step", String(run.step[row])], ["row, position", `${run.row[row]}, ${position(i)}`], ...fileOf(run.row[row])];
    if (run.diffusion) names.unshift(["timestep", rc.number(run.time[i])]);
    else names.unshift(["token", label(i)]);
    return rc.el("dl", { className: "facts" }, ...names.map(([name, value]) => rc.el("div", {}, rc.el("dt", {}, name), rc.el("dd", {}, value))));
  };

  /* What both policies predicted at a step: its column of the decoded strip, the sampler's above the trainer's. */
  const tile = (picture, column, columns) => ["sampler", "trainer"].map((who, line) => {
    const node = rc.el("span", { className: "tile", role: "img", title: `x̂₀ of the ${who}`, ariaLabel: `x̂₀ of the ${who}` });
    node.style.backgroundImage = `url(data:image/jpeg;base64,${picture})`;
    node.style.backgroundSize = `${100 * columns}% 200%`;
    node.style.backgroundPosition = `${columns > 1 ? (100 * column) / (columns - 1) : 0}% ${100 * line}%`;
    return node;
  });

  /* The chosen sequence: at most WINDOW tokens around the chosen one. */
  let current = null;
  const show = (row, chosen) => {
    current = [row, chosen];
    const start = run.starts[row], end = run.starts[row + 1];
    const first = Math.min(Math.max(start, chosen - rc.WINDOW / 2), Math.max(start, end - rc.WINDOW)), last = Math.min(end, first + rc.WINDOW);
    const spans = [], picture = run.pictures[run.row[row]];
    for (let i = first; i < last; i++) {
      const span = rc.el("span", { className: "token" + (i === chosen ? " chosen" : "") + (run.state[i] > 1 ? ` ${rc.STATES[run.state[i]]}` : "") });
      span.textContent = run.diffusion ? `${rc.number(run.time[i])}\n${rc.number(run.share[i] * run.kl)}` : run.id[i] < 0 ? "·" : shownText(run.id[i]);
      span.style.background = tint(i);
      span.dataset.i = i;
      if (picture) span.prepend(...tile(picture, i - start, end - start));
      spans.push(span);
    }
    const jump = (to, name) => rc.el("button", { onclick: () => show(row, to) }, name);
    const title = `row ${run.row[row]} · training step ${run.step[row]} · ${end - start} ${what()}s · reward ${rc.number(run.reward[row])} · ${rc.percent(run.rowShare[row])} of ${unit()}`;
    const strip = rc.el("div", { className: (run.diffusion ? "strip" : "text") + (Object.keys(run.texts).length ? "" : " ids") }, ...spans);
    strip.addEventListener("click", (event) => {
      const step = event.target.closest("[data-i]");
      if (step) show(row, +step.dataset.i);
    });
    const prompt = promptOf(row);
    detail.replaceChildren(
      rc.el("p", { className: "where" }, title),
      facts(chosen),
      ...(prompt ? [rc.el("div", { className: "prompt" }, rc.el("b", {}, "prompt "), prompt)] : []),
      ...(first > start ? [jump(Math.max(start, first - rc.WINDOW / 2), `↑ ${first - start} earlier`)] : []),
      ...(picture ? [rc.el("p", { className: "soft" }, "x̂₀ that the sampler predicted; below it, that of the trainer; then timestep and exact KL")] : []),
      strip,
      ...(last < end ? [jump(Math.min(end - 1, last + rc.WINDOW / 2), `↓ ${end - last} later`)] : []),
    );
  };

  /* The controls, and the same by keyboard; of pictures in their own words. */
  const words = runs.some((one) => one.diffusion) ? { tokens: "steps", sequences: "pictures", token: "step", sequence: "picture", d: "exact KL" } : {};
  const word = (name) => words[name] || name;
  const modes = ["tokens", "sequences"].map((mode) => rc.el("button", { value: mode, onclick: () => update({ mode }) }, word(mode)));
  const choice = (title, values, change) => rc.el("select", { title, onchange: (event) => change(event.target.value) }, ...values.map((value) => rc.el("option", { value }, word(value))));
  const colors = choice(`Color of the ${word("tokens")} (c)`, ["d", "weight", "kept", "surprisal"], (color) => {
    view.color = color;
    explain();
    if (current) show(...current);
  });
  const search = rc.el("input", { type: "search", placeholder: `search ${run.diffusion ? "prompts" : "text, id, prompt"}  (/)`, oninput: () => update({ search: search.value.trim() }) });
  const least = rc.el("input", { type: "number", min: 0, step: 0.1, placeholder: "0", oninput: () => update({ least: +least.value || 0 }) });
  const states = choice(`Which ${word("tokens")}`, ["all", "kept", "truncated", "rejected", "masked"], (filter) => update({ filter }));
  const heavy = () => rc.showHeavy(run, rc.largest(Array.from(run.share.keys()), tokenKeys.share, 10), label, (k) => {
    [search.value, least.value, states.value] = ["", "", "all"];
    update({ mode: "tokens", sort: "share", search: "", filter: "all", least: 0 });
    list.choose(k);
  });
  rc.heavy = () => heavy();
  const picker = runs.length > 1 ? choice("Run", runs.map((one) => one.run), async (name) => {
    run = await rc.openRun(runs.find((one) => one.run === name));
    rc.showBreakdowns(run);
    update({});
    heavy();
  }) : null;
  const tools = rc.el("div", { className: "tools" }, picker, rc.el("span", { className: "buttons" }, ...modes), rc.el("label", {}, "color ", colors), rc.el("label", {}, "show ", states), rc.el("label", {}, runs.some((one) => one.diffusion) ? "|J| ≥ " : "|d| ≥ ", least), search, count, rc.el("span", { className: "soft" }, `j k: next, previous · ← →: along the ${word("sequence")} · s: ${word("tokens")}, ${word("sequences")}`));
  box.append(tools, legend, rc.el("div", { className: "panes" }, list.node, detail));

  const along = (by) => {
    if (!current) return;
    const [row, i] = current, to = i + by;
    if (to >= run.starts[row] && to < run.starts[row + 1]) show(row, to);
  };
  Object.assign(rc.keys, {
    j: () => list.choose(list.chosen + 1),
    k: () => list.choose(list.chosen - 1),
    ArrowRight: () => along(1),
    ArrowLeft: () => along(-1),
    s: () => update({ mode: view.mode === "tokens" ? "sequences" : "tokens" }),
    "/": () => search.focus(),
    c: () => {
      colors.selectedIndex = (colors.selectedIndex + 1) % colors.options.length;
      colors.dispatchEvent(new Event("change"));
    },
  });
  rc.redraw.push(() => current && show(...current));
  update({});
  heavy();
  rc.showBreakdowns(run);
};

(async () => {
  await rc.ready;
  const box = document.getElementById("viewer");
  if (box) await rc.viewer(box);
  document.documentElement.dataset.ready = "true";
})();
