"use strict";
// The sections of the report, and its controls.

const page = {
  data: null,
  onlyDifferences: true,

  start() {
    page.theme(page.remembered("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
      if (!page.remembered("theme")) { page.theme(event.matches ? "dark" : "light"); charts.refresh(); page.fillRuns(); }
    });
    document.getElementById("theme").addEventListener("click", () => {
      const other = document.documentElement.classList.contains("dark") ? "light" : "dark";
      page.theme(other);
      try { localStorage.setItem("treadle-theme", other); } catch { /* not available in a file */ }
      page.show(page.data);
    });
    page.controls();
    page.show(JSON.parse(document.getElementById("data").textContent));
  },

  remembered(name) {
    try { return localStorage.getItem(`treadle-${name}`); } catch { return null; }
  },

  theme(name) { document.documentElement.classList.toggle("dark", name === "dark"); },

  show(data) {
    page.data = data;
    document.title = data.title;
    document.getElementById("title").textContent = data.title;
    page.fillSummary();
    document.getElementById("curves").hidden = data.charts.length === 0;
    charts.build(data, document.getElementById("charts"));
    page.fillAxis();
    page.fillRuns();
    const sections = [page.findings, page.health, page.pictures, page.events, page.time, page.settings, page.commands];
    if (data.runs.length > 1) sections.unshift(...sections.splice(sections.indexOf(page.settings), 1));
    document.getElementById("sections").replaceChildren(...sections.map((make) => make()).filter(Boolean));
    const left = [];
    if (data.runs_left_out) left.push(`${data.runs_left_out} older runs are left out`);
    if (data.charts_left_out.count) left.push(`${data.charts_left_out.count} charts are left out: ${data.charts_left_out.first.join(", ")}`);
    if (data.parts_left_out.length) left.push(`left out, since a report has at most 6 MB: ${data.parts_left_out.join(", ")}`);
    document.getElementById("footer").textContent = [`Treadle ${data.version}, ${format.date(data.written)}`, ...left].join(" · ");
  },

  controls() {
    const { view } = charts, get = (id) => document.getElementById(id);
    get("smooth").value = view.smooth;
    get("smooth").addEventListener("input", () => { view.smooth = Number(get("smooth").value); charts.refresh(); });
    get("scale").value = view.scale;
    get("scale").addEventListener("change", () => { view.scale = get("scale").value; charts.refresh(); });
    get("marks").checked = view.marks;
    get("marks").addEventListener("change", () => { view.marks = get("marks").checked; charts.refresh(); });
    get("zoom-in").addEventListener("click", () => charts.scale(0.5));
    get("zoom-out").addEventListener("click", () => charts.scale(2));
    get("pan-left").addEventListener("click", () => charts.move(-0.25));
    get("pan-right").addEventListener("click", () => charts.move(0.25));
    get("reset").addEventListener("click", () => charts.zoom(null));
  },

  fillAxis() {
    const { view } = charts, known = ["step", "epoch", "time"].filter(charts.offers);
    if (!known.includes(view.axis)) view.axis = "step";
    const choices = known.map((axis) => {
      const input = el("input", { type: "radio", name: "axis", value: axis, checked: axis === view.axis });
      input.addEventListener("change", () => {
        view.axis = axis;
        view.range = null;
        charts.refresh();
      });
      return el("label", {}, input, axis);
    });
    document.getElementById("axis").replaceChildren(el("legend", {}, "Axis"), ...choices);
  },

  /** Fill the buttons that show and hide runs, if there are several. */
  fillRuns() {
    const { data } = page, { hidden } = charts.view;
    const buttons = data.runs.length < 2 ? [] : data.runs.map((run, index) => {
      const swatch = el("span", { className: "swatch", style: { borderTopColor: charts.color(index) } });
      const button = el("button", { type: "button", className: "run", title: run.directory, "aria-pressed": String(!hidden.has(run.directory)) }, swatch, el("span", { className: "name" }, run.name));
      button.disabled = !run.curves;
      button.addEventListener("click", () => {
        if (!hidden.delete(run.directory)) hidden.add(run.directory);
        button.setAttribute("aria-pressed", String(!hidden.has(run.directory)));
        charts.refresh();
      });
      return button;
    });
    document.getElementById("runs").replaceChildren(...buttons);
  },

  state(run) { return el("span", { className: `state ${run.state}` }, run.state); },

  fillSummary() {
    const { runs } = page.data, parent = document.getElementById("summary");
    const subtitle = document.getElementById("subtitle");
    if (runs.length > 1) {
      const counts = new Map();
      runs.forEach((run) => counts.set(run.state, (counts.get(run.state) ?? 0) + 1));
      subtitle.textContent = [...counts].map(([state, count]) => `${count} ${state}`).join(", ");
      parent.replaceChildren(page.comparison(runs));
      return;
    }
    const [run] = runs;
    const source = run.source && run.source !== run.task ? ` (${run.source})` : "";
    subtitle.replaceChildren(page.state(run), ` ${run.task}${source} · ${[run.backend, run.precision, run.devices].filter(Boolean).join(", ")}`);
    const cards = [];
    const card = (label, value, more, kind = "") => cards.push(el("div", { className: `card ${kind}` }, el("div", { className: "label" }, label), el("div", { className: "value" }, value), el("div", { className: "more" }, more ?? "")));
    for (const name of page.metrics(runs).slice(0, 4)) {
      const best = run.best[name], last = run.last[name];
      card(name, format.number(best.value), `best, in epoch ${best.epoch}; last ${format.number(last)}`);
    }
    if (!cards.length) for (const [name, value] of Object.entries(run.last).slice(0, 4)) card(name, format.number(value), "last");
    card("duration", format.seconds(run.seconds), format.date(run.started) && `started ${format.date(run.started)}`);
    card("steps", format.number(run.steps), run.epochs ? `${format.number(run.epochs)} epoch${run.epochs === 1 ? "" : "s"}` : "");
    const seconds = run.seconds - (run.costs?.compiling ?? 0);
    if (seconds > 0) {
      const examples = run.examples ? `${format.number(Math.round(run.examples / seconds))} examples per second, ` : "";
      card("steps per second", format.number(+(run.steps / seconds).toPrecision(3)), `${examples}without compiling`);
    }
    if (run.plan) card("plan", run.plan, Object.entries(run.versions).filter(([name]) => ["treadle", "keras", run.backend].includes(name)).map(([name, version]) => `${name} ${version}`).join(", "), "wide");
    const why = run.why ? el("p", { className: run.state === "finished" ? "why" : `why ${run.state}` }, run.why) : "";
    const restored = (run.events ?? []).filter((event) => event.text.startsWith("the weights are those of ")).at(-1);
    const weights = restored ? el("p", { className: "why" }, restored.text) : "";
    parent.replaceChildren(el("div", { className: "cards" }, ...cards), why, weights);
  },

  /** Return the names of the values with a best one: those of the validation, if there are any. */
  metrics(runs) {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.best ?? {})))];
    const validated = names.filter((name) => name.startsWith("val_"));
    return validated.length ? validated : names;
  },

  comparison(runs) {
    const names = page.metrics(runs).slice(0, 6);
    const lower = (name) => !/(accuracy|auc|precision|recall|f1|score|return)$/i.test(name);
    const winners = new Map(names.map((name) => {
      const values = runs.map((run) => run.best?.[name]?.value).filter((value) => value !== undefined);
      return [name, values.reduce((a, b) => (lower(name) ? Math.min(a, b) : Math.max(a, b)), lower(name) ? Infinity : -Infinity)];
    }));
    const rows = runs.map((run, index) => el("tr", { className: "best" },
      el("th", { scope: "row" }, el("span", { className: "run" }, el("span", { className: "swatch", style: { borderTopColor: charts.color(index) } }), el("span", {}, run.name))),
      el("td", {}, page.state(run)),
      ...names.map((name) => {
        const best = run.best?.[name];
        return el("td", { className: best && best.value === winners.get(name) ? "number best" : "number", title: best ? `in epoch ${best.epoch}` : "" }, best ? format.number(best.value) : "–");
      }),
      el("td", { className: "number" }, format.number(run.steps)),
      el("td", { className: "number" }, run.seconds === undefined ? "–" : format.seconds(run.seconds)),
      el("td", {}, run.why ?? "")));
    const heads = ["run", "state", ...names.map((name) => `best ${name}`), "steps", "duration", ""];
    return page.table(heads, rows, "short");
  },

  table(heads, rows, kind = "") {
    const numbers = (head) => (/^(best|steps?$|duration)/.test(head) ? "number" : "");
    const head = el("tr", {}, ...heads.map((text) => el("th", { scope: "col", className: kind ? numbers(text) : "" }, text)));
    return el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": heads.filter(Boolean).join(", ") }, el("table", { className: kind }, el("thead", {}, head), el("tbody", {}, ...rows)));
  },

  section(title, ...children) {
    const id = `section-${title.toLowerCase().replaceAll(" ", "-")}`;
    return el("section", { "aria-labelledby": id }, el("h2", { id }, title), ...children);
  },

  named(run) { return page.data.runs.length > 1 ? run.name : ""; },

  time() {
    const parts = [["training", 0, "the rest: steps, hooks and logs"], ["compiling", 5, ""], ["waiting", 3, "for data"], ["validating", 2, ""], ["saving", 1, "checkpoints"]];
    const used = new Set(), rows = [];
    for (const run of page.data.runs) {
      if (!run.costs || !(run.seconds > 0)) continue;
      const spent = Object.fromEntries(parts.slice(1).map(([name]) => [name, run.costs[name] ?? 0]));
      const known = Object.values(spent).reduce((a, b) => a + b, 0);
      spent.training = Math.max(0, run.seconds - known);
      const total = known + spent.training;
      const bar = el("div", { className: "bar" });
      for (const [name, color] of parts) {
        if (!spent[name]) continue;
        used.add(name);
        bar.append(el("span", { title: `${name}: ${format.seconds(spent[name])}`, style: { width: `${(100 * spent[name]) / total}%`, background: charts.color(color) } }));
      }
      const text = parts.filter(([name]) => spent[name]).map(([name]) => `${name} ${format.seconds(spent[name])}`).join(", ");
      rows.push(el("tr", {}, el("th", { scope: "row" }, run.name), el("td", {}, bar, text)));
    }
    if (!rows.length) return null;
    const keys = parts.filter(([name]) => used.has(name)).map(([name, color, more]) => el("span", { className: "key" }, el("i", { style: { background: charts.color(color) } }), more ? `${name} (${more})` : name));
    return page.section("Time", el("div", { className: "keys" }, ...keys), page.table(["run", "time spent"], rows));
  },

  /** Show the health of the layers as heat maps over layers and steps. */
  health() {
    const runs = page.data.runs.filter((run) => run.health);
    if (!runs.length) return null;
    return page.section("Health of the layers", ...runs.map((run) => page.heat(run)));
  },

  heat(run) {
    const { health } = run, { layers, steps } = health;
    const measures = [["gradient", "gradient norm"], ["ratio", "update / weights"], ["dead", "dead units"]].filter(([name]) => health[name].some((column) => column.some((value) => value !== null)));
    const at = el("div", { className: "at" }), scale = el("span", { className: "none" });
    const height = Math.max(14, Math.min(26, Math.round(420 / layers.length)));
    const canvas = el("canvas", { role: "img", style: { height: `${height * layers.length}px` } });
    const choice = el("select", { "aria-label": "Measure" }, ...measures.map(([name, label]) => el("option", { value: name }, label)));
    const end = steps.at(-1), width = 600;
    canvas.width = width;
    canvas.height = layers.length;
    // A column reaches from its step to the next one that was measured.
    const edges = steps.map((step, i) => (i === 0 ? 0 : Math.round((width * (step - 1)) / Math.max(1, end))));
    const draw = () => {
      const name = choice.value, share = name === "dead", known = health[name].flat().filter((value) => value !== null && value > 0 && value < 1e299);
      const logs = known.map(Math.log10).sort((a, b) => a - b);
      const [low, high] = share ? [0, 1] : [logs[0] ?? -1, Math.max(logs.at(-1) ?? 0, (logs[0] ?? -1) + 1)];
      const context = canvas.getContext("2d");
      context.clearRect(0, 0, width, layers.length);
      health[name].forEach((column, i) => column.forEach((value, j) => {
        if (value === null) return;
        const part = share ? Math.min(1, value) : value > 1e299 ? 2 : value > 0 ? (Math.log10(value) - low) / (high - low) : 0;
        context.fillStyle = part > 1 ? "#ff2d2d" : `hsl(${260 - 210 * part} ${55 + 30 * part}% ${22 + 44 * part}%)`;
        context.fillRect(edges[i], j, Math.max(1, (edges[i + 1] ?? width) - edges[i]), 1);
      }));
      scale.textContent = share ? "dark: 0 %, bright: 100 % dead" : `dark: ${format.number(10 ** low)} or less, bright: ${format.number(10 ** high)}; red: not finite`;
      canvas.setAttribute("aria-label", `${choice.selectedOptions[0].textContent} of ${layers.length} layers at ${steps.length} steps`);
    };
    choice.addEventListener("change", draw);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * width;
      const i = Math.max(0, edges.findLastIndex((edge) => edge <= x)), j = Math.min(layers.length - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * layers.length)));
      const value = health[choice.value][i][j];
      at.textContent = `step ${format.number(steps[i])} · ${layers[j].path} (${layers[j].class}): ${value !== null && value > 1e299 ? "not finite" : value === null ? "not measured" : format.number(value)}`;
    });
    draw();
    const bad = new Set(health.verdicts.flatMap((verdict) => verdict.layers));
    const names = el("div", { className: "names", style: { gridTemplateRows: `repeat(${layers.length}, ${height}px)` } }, ...layers.map((layer) => el("span", { title: `${layer.path} (${layer.class})`, className: bad.has(layer.path) ? "warning" : "" }, layer.path)));
    const verdicts = health.verdicts.map((verdict) => el("p", { className: "warning" }, `step ${format.number(verdict.step)}: ${verdict.text}`));
    return el("div", { className: "heat" }, page.named(run) ? el("h3", {}, run.name) : null, el("p", {}, choice, " ", scale), el("div", { className: "grid" }, names, canvas), at, ...verdicts, ...health.notes.map((note) => el("p", { className: "none" }, note)));
  },

  /** Show each logged image of each run, with a slider over the steps. */
  pictures() {
    const figures = [];
    let left = 0;
    for (const run of page.data.runs) {
      left += run.images_left_out ?? 0;
      const names = [...new Set((run.images ?? []).map((image) => image.name))];
      for (const name of names) {
        const images = run.images.filter((image) => image.name === name);
        const image = el("img", { alt: "" }), caption = el("figcaption", {});
        const slider = el("input", { type: "range", min: 0, max: images.length - 1, "aria-label": `Step of ${name}` });
        slider.value = images.length - 1;
        const change = () => {
          const shown = images[slider.value];
          image.src = shown.source;
          image.alt = `${name} at step ${shown.step}`;
          caption.textContent = [page.named(run), name, `step ${format.number(shown.step)}`].filter(Boolean).join(" · ");
        };
        slider.addEventListener("input", change);
        slider.hidden = images.length < 2;
        change();
        figures.push(el("figure", {}, el("div", { className: "frame" }, image), caption, slider));
      }
    }
    if (!figures.length && !left) return null;
    const note = left ? el("p", { className: "none" }, `${left} images are left out: this file holds at most 6 MB. They are in the folder images of the run.`) : "";
    return page.section("Pictures", el("div", { className: "pictures" }, ...figures), note);
  },

  findings() {
    const checked = page.data.runs.filter((run) => run.findings);
    if (!checked.length) return null;
    const found = checked.flatMap((run) => run.findings.map((finding) => el("div", { className: "finding error" },
      el("p", { className: "head" }, [page.named(run), finding.code, finding.where, finding.line].filter(Boolean).join(" · ")),
      ...[["seen", finding.seen], ["why", finding.why], ["fix", finding.fix]].filter(([, text]) => text).map(([what, text]) => el("p", {}, `${what}: ${text}`)))));
    const rows = checked.flatMap((run) => run.sheet.map(([group, subject, text, mark]) => [group, subject, text, mark, ...(checked.length > 1 ? [page.named(run)] : [])]));
    const table = rows.length ? el("details", {}, el("summary", {}, "What the doctor measured"), page.table(["group", "subject", "fact", "unusual", ...(checked.length > 1 ? ["run"] : [])], rows)) : "";
    return page.section("Certain mistakes found by the doctor", ...(found.length ? found : [el("p", { className: "none" }, "none")]), table);
  },

  events() {
    const found = page.data.runs.flatMap((run) => (run.events ?? []).map((event) => ({ run, event })));
    if (!found.length) return null;
    const many = page.data.runs.length > 1, others = found.filter(({ event }) => event.kind !== "checkpoint");
    const saved = page.data.runs.filter((run) => run.events?.some((event) => event.kind === "checkpoint")).map((run) => {
      const steps = run.events.filter((event) => event.kind === "checkpoint").map((event) => format.number(event.step));
      return el("p", {}, `${many ? `${run.name}: ` : ""}checkpoint${steps.length > 1 ? "s" : ""} of step ${steps.join(", ")}`);
    });
    const rows = others.map(({ run, event }) => el("tr", {},
      el("td", { className: "number" }, format.number(event.step)),
      el("td", { className: event.kind === "end" ? run.state : event.kind }, event.kind),
      el("td", {}, event.text),
      many ? el("td", {}, run.name) : null));
    const checkpoints = many && saved.length ? el("details", {}, el("summary", {}, "Checkpoints"), ...saved) : el("div", {}, ...saved);
    const table = rows.length ? page.table(["step", "kind", "what happened", ...(many ? ["run"] : [])], rows, "events") : "";
    return page.section("Events", table, checkpoints);
  },

  /** Show the settings of all runs. Those that differ come first, and are marked. */
  settings() {
    const shown = (value) => {
      if (value === undefined || value === "null") return "–";
      return /^-?\d*\.\d{7,}(e-?\d+)?$/.test(value) ? String(+Number(value).toPrecision(6)) : value;
    };
    const runs = page.data.runs.filter((run) => run.settings), many = runs.length > 1;
    if (!runs.length) return null;
    const values = (group) => {
      const names = [...new Set(runs.flatMap((run) => Object.keys(run[group])))];
      return names.map((name) => ({ name, of: runs.map((run) => run[group][name]) })).map((row) => ({ ...row, differs: new Set(row.of).size > 1 }));
    };
    const facts = ["plan", "backend", "precision", "devices"].map((name) => ({ name, of: runs.map((run) => run[name]) })).filter((row) => row.of.some(Boolean)).map((row) => ({ ...row, differs: new Set(row.of).size > 1 }));
    const all = [...values("settings"), ...facts.filter((row) => !runs[0].settings[row.name]), ...values("versions").map((row) => ({ ...row, name: `version of ${row.name}` }))];
    all.sort((a, b) => Number(b.differs) - Number(a.differs));
    const place = el("div", {});
    const fill = () => {
      const listed = many && page.onlyDifferences ? all.filter((row) => row.differs) : all;
      const rows = listed.map((row) => el("tr", { className: many && row.differs ? "differs" : "" }, el("th", { scope: "row" }, row.name), ...row.of.map((value) => el("td", { title: value ?? "" }, shown(value)))));
      place.replaceChildren(rows.length ? page.table(["setting", ...(many ? runs.map((run) => run.name) : ["value"])], rows) : el("p", { className: "none" }, "all settings are equal"));
    };
    fill();
    const box = el("input", { type: "checkbox", checked: page.onlyDifferences });
    box.addEventListener("change", () => { page.onlyDifferences = box.checked; fill(); });
    return page.section("Settings", many ? el("p", {}, el("label", {}, box, " Only those that differ")) : "", place);
  },

  commands() {
    const rows = page.data.runs.flatMap((run) => (run.commands ?? []).map(({ what, command }) => {
      const button = el("button", { type: "button" }, "Copy"), code = el("code", {}, command);
      button.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(command);
          button.textContent = "Copied";
        } catch { getSelection().selectAllChildren(code); }
      });
      return el("div", { className: "command" }, el("span", { className: "what" }, [page.named(run), what].filter(Boolean).join(": ")), code, button);
    }));
    if (!rows.length) return null;
    if (page.data.runs.length === 1) return page.section("Commands", ...rows);
    return page.section("Commands", el("details", {}, el("summary", {}, "Resume, evaluate and inspect single runs"), ...rows));
  },
};

page.start();
