"use strict";
// Elements, formats, and the charts of curves. Every text of the data becomes a text node: names and
// messages may come from a stranger.

/** Return a new element. `props` are properties, and attributes where the name has a dash. */
function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name === "style") Object.assign(made.style, value);
    else if (name === "dataset") Object.assign(made.dataset, value);
    else if (name.includes("-") || name === "role" || name === "for") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const format = {
  number(value) {
    if (value === null || value === undefined) return "–";
    if (typeof value === "string") return value;
    const size = Math.abs(value);
    if (size >= 1e7 || (size > 0 && size < 1e-4)) return (+value.toPrecision(4)).toExponential();
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return String(+value.toPrecision(4));
  },
  seconds(value) {
    if (value < 60) return `${+value.toFixed(value < 10 ? 2 : 1)} s`;
    const total = Math.round(value), [h, m, s] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
    const two = (part) => String(part).padStart(2, "0");
    return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
  },
  clock(value) { return value < 60 && !Number.isInteger(value) ? String(+value.toFixed(2)) : format.seconds(value).replace(" s", ""); },
  date(text) {
    const found = new Date(text);
    return text && !isNaN(found) ? found.toISOString().replace("T", " ").slice(0, 16) + " UTC" : "";
  },
};

/** Return the value at `x` of the line through the points (xs, ys), continued at its ends. */
function interpolated(xs, ys, x) {
  if (xs.length < 2) return null;
  let high = xs.findIndex((other) => other >= x);
  high = high < 1 ? (high === 0 ? 1 : xs.length - 1) : high;
  const slope = (ys[high] - ys[high - 1]) / (xs[high] - xs[high - 1]);
  return ys[high - 1] + slope * (x - xs[high - 1]);
}

/** Return a moving mean that forgets with `weight`, without a bias at its start; gaps stay. */
function smoothed(values, weight) {
  let mean = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

/** Return round values for the ticks between two numbers, also if they are 30 decades apart. */
function ticks(low, high, log) {
  const found = [];
  if (log) {
    const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
    const every = Math.max(1, Math.ceil((last - first + 1) / 7)), parts = last - first < 2 ? [1, 2, 5] : [1];
    for (let k = first - 1; k <= last; k += every) {
      for (const part of parts) {
        const value = +`${part}e${k}`;
        if (value >= low * 0.999999 && value <= high * 1.000001) found.push(value);
      }
    }
    if (every > 1 || found.length > 1) return found;
  }
  const rough = (high - low) / 7, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((part) => part * size >= rough * 0.999999) * size;
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return log ? found.filter((value) => value > 0) : found;
}

// uPlot draws no ticks if none of these, its own being fewer, is large enough for the range.
const INCREMENTS = Array.from({ length: 640 }, (_, i) => +`1e${i - 330}`).filter((value) => value > 0 && value < Infinity);

const charts = {
  data: null,
  view: { axis: "step", smooth: 0.6, scale: "auto", marks: true, range: null, hidden: new Set(), off: new Set() },
  drawn: [],

  color(index) {
    const dark = document.documentElement.classList.contains("dark");
    const known = dark
      ? ["#7aa7ff", "#ff9f5a", "#4ecb94", "#d59bff", "#f2cf52", "#4fd0e0", "#ff86a8", "#b5c0cc"]
      : ["#1d5fd1", "#d9480f", "#0d7a4f", "#8f35d8", "#a87800", "#0b8299", "#c2255c", "#566270"];
    if (index < known.length) return known[index];
    return `hsl(${Math.round(index * 137.5) % 360} 65% ${dark ? 68 : 42}%)`;
  },

  variable(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); },

  /** Return the place of a step of a run on the axis; null if it is unknown. */
  place(run, step) {
    const { axis } = charts.view, { clock } = run;
    if (axis === "step" || !clock) return step;
    if (axis === "time") return interpolated(clock.steps, clock.seconds, step);
    return interpolated(clock.epoch_steps, clock.epochs, step);
  },

  offers(axis) {
    if (axis === "step") return true;
    const key = axis === "time" ? "steps" : "epoch_steps";
    const running = charts.data.runs.filter((run) => run.clock);
    return running.length > 0 && running.every((run) => run.clock[key].length > 1);
  },

  /** Build the figure of each chart. Plots are drawn when they are first seen. */
  build(data, parent) {
    charts.drawn.forEach((chart) => chart.plot?.destroy());
    charts.data = data;
    charts.watcher?.disconnect();
    charts.watcher = new IntersectionObserver((seen) => {
      for (const entry of seen) {
        const chart = charts.drawn.find((other) => other.area === entry.target);
        if (!chart) continue;
        chart.visible = entry.isIntersecting;
        if (chart.visible && chart.stale) charts.draw(chart);
      }
    }, { rootMargin: "200px" });
    charts.sizes?.disconnect();
    charts.sizes = new ResizeObserver((found) => {
      for (const entry of found) {
        const chart = charts.drawn.find((other) => other.area === entry.target);
        if (chart?.plot && entry.contentRect.width > 0 && Math.abs(chart.plot.width - entry.contentRect.width) >= 1) {
          chart.plot.setSize({ width: entry.contentRect.width, height: chart.area.clientHeight });
        }
      }
    });
    charts.drawn = data.charts.map((facts, index) => charts.figure(facts, index, data));
    parent.replaceChildren(...charts.drawn.map((chart) => chart.figure));
    for (const chart of charts.drawn) {
      charts.watcher.observe(chart.area);
      charts.sizes.observe(chart.area);
    }
  },

  figure(facts, index, data) {
    const many = data.runs.length > 1;
    const labels = [...new Set(facts.curves.map(([, , label]) => label))];
    const chart = { facts, index, visible: false, stale: true, plot: null };
    chart.curves = facts.curves.map(([r, c, label]) => {
      const run = data.runs[r], curve = run.curves[c], nth = labels.indexOf(label);
      const dash = many && nth > 0 ? [[7, 4], [2, 3], [10, 3, 2, 3]][(nth - 1) % 3] : undefined;
      const name = !many ? (labels.length === 1 ? facts.title : label) : labels.length > 1 && nth > 0 ? `${run.name} · ${label}` : run.name;
      return { r, run, curve, label, dash, name, key: `${facts.title}\n${run.directory}\n${label}`, color: many ? r : nth };
    });
    chart.at = el("div", { className: "at" });
    const described = chart.curves.slice(0, 8).map(({ name, curve }) => {
      const known = curve.y.filter((value) => value !== null);
      return known.length ? `${name}: last ${format.number(known.at(-1))}, from ${format.number(known.reduce((a, b) => Math.min(a, b)))} to ${format.number(known.reduce((a, b) => Math.max(a, b)))}` : `${name}: no finite value`;
    });
    chart.area = el("div", { className: "plot", tabIndex: 0, role: "img", "aria-label": `${facts.title}. ${described.join("; ")}` });
    chart.area.addEventListener("keydown", (event) => charts.key(event));
    chart.legend = el("div", { className: "legend" });
    chart.figure = el("figure", { className: "chart" }, el("h3", {}, facts.title), chart.at, chart.area, chart.legend);
    charts.fillLegend(chart);
    return chart;
  },

  shows(entry) { return !charts.view.hidden.has(entry.run.directory) && !charts.view.off.has(entry.key); },

  fillLegend(chart) {
    const entries = chart.curves.filter((entry) => !charts.view.hidden.has(entry.run.directory));
    chart.legend.replaceChildren(...entries.map((entry) => {
      entry.value = el("span", { className: "value" });
      const swatch = el("span", { className: entry.dash ? "swatch dashed" : "swatch", style: { borderTopColor: charts.color(entry.color) } });
      const shown = !charts.view.off.has(entry.key);
      const button = el("button", { type: "button", title: entry.name, "aria-pressed": String(shown) }, swatch, el("span", { className: "name" }, entry.name), entry.value);
      button.addEventListener("click", () => {
        const { off } = charts.view;
        if (!off.delete(entry.key)) off.add(entry.key);
        button.setAttribute("aria-pressed", String(!off.has(entry.key)));
        charts.draw(chart);
      });
      return button;
    }));
    charts.values(chart, null);
  },

  /** Draw all charts again: those that are not seen now, when they are. */
  refresh() {
    cancelAnimationFrame(charts.frame);
    charts.frame = requestAnimationFrame(() => {
      for (const chart of charts.drawn) {
        charts.fillLegend(chart);
        chart.stale = true;
        if (chart.visible) charts.draw(chart);
      }
    });
  },

  /** Return what a curve shows: the raw line, and the smoothed one if there is one. */
  lines(entry, log) {
    const { curve, run } = entry, { smooth } = charts.view;
    const usable = (values) => (log ? values.map((v) => (v !== null && v > 0 ? v : null)) : values);
    const at = (steps) => steps.map((step) => charts.place(run, step));
    const raw = { x: at(curve.x), y: usable(curve.y), faint: false };
    if (curve.kind !== "steps" || smooth === 0 || curve.x.length < 20) return [raw];
    const means = { x: curve.mx ? at(curve.mx) : raw.x, y: usable(smoothed(curve.my ?? curve.y, smooth)), faint: false };
    return [{ ...raw, faint: true }, means];
  },

  /** Return whether a chart has a logarithmic scale: `auto` chooses it for losses of two decades. */
  isLog(chart) {
    const { scale } = charts.view;
    if (scale !== "auto" || !chart.facts.title.includes("loss")) return scale === "log";
    let [low, high] = [Infinity, -Infinity];
    for (const { curve } of chart.curves.filter(charts.shows)) {
      for (const value of curve.y) {
        if (value === null) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    return low > 0 && high / low > 100;
  },

  draw(chart) {
    const log = charts.isLog(chart);
    const { view } = charts, ink = charts.variable("--soft"), grid = charts.variable("--grid");
    chart.stale = false;
    chart.plot?.destroy();
    chart.plot = null;
    chart.lines = [];
    const tables = [], series = [{}];
    for (const entry of chart.curves.filter(charts.shows)) {
      for (const line of charts.lines(entry, log)) {
        if (line.x.some((x) => x === null)) continue;
        const stroke = charts.color(entry.color), points = entry.curve.kind !== "steps" && line.x.length <= 60;
        tables.push([line.x, line.y]);
        chart.lines.push({ ...line, entry });
        series.push({ stroke, alpha: line.faint ? 0.28 : 1, width: line.faint ? 1 : 1.8, dash: line.faint ? undefined : entry.dash, points: { show: points || line.x.length === 1, size: 5, fill: stroke } });
      }
    }
    const finite = tables.some(([, ys]) => ys.some((y) => y !== null));
    if (!tables.length || !finite) {
      const why = tables.length ? (log ? "no positive value for a log scale" : "no finite value") : "hidden";
      chart.area.replaceChildren(el("p", { className: "none" }, why));
      return;
    }
    chart.area.replaceChildren();
    const joined = uPlot.join(tables);
    const whole = charts.ends();
    const axes = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 5 }, font: "12px system-ui, sans-serif" };
    chart.plot = new uPlot({
      width: chart.area.clientWidth, height: chart.area.clientHeight, padding: [8, 12, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false, dist: 6 }, bind: { dblclick: () => () => charts.zoom(null) } },
      scales: {
        x: { time: false, range: () => view.range ?? whole },
        y: log ? { distr: 3 } : {},
      },
      axes: [
        { ...axes, size: 32, space: 60, values: (_, found) => found.map((tick) => (view.axis === "time" ? format.clock(tick) : format.number(+tick.toPrecision(10)))) },
        { ...axes, size: 58, incrs: INCREMENTS, space: 1, filter: (_, found) => found, splits: (_, __, low, high) => ticks(low, high, log), values: (_, found) => found.map(format.number) },
      ],
      series,
      hooks: {
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width > 0) {
            const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
            plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
            charts.zoom(range);
          }
        }],
        setCursor: [(plot) => charts.hover(chart, plot)],
        draw: [(plot) => charts.drawMarks(chart, plot)],
      },
    }, joined, chart.area);
    charts.gestures(chart);
  },

  /** Draw a line for each event of the shown runs; checkpoints as short ticks at the bottom. */
  drawMarks(chart, plot) {
    chart.marks = [];
    if (!charts.view.marks) return;
    const { ctx, bbox } = plot, ratio = devicePixelRatio || 1;
    const colors = { warning: "--warn", rollback: "--warn", resume: "--good", note: "--busy", end: "--bad", checkpoint: "--soft" };
    ctx.save();
    for (const run of new Set(chart.curves.filter(charts.shows).map((entry) => entry.run))) {
      for (const event of run.events ?? []) {
        const x = charts.place(run, event.step), at = x === null ? NaN : plot.valToPos(x, "x", true);
        if (!(at >= bbox.left - 1 && at <= bbox.left + bbox.width + 1)) continue;
        chart.marks.push({ at: (at - bbox.left) / ratio, event, run });
        ctx.strokeStyle = ctx.fillStyle = charts.variable(colors[event.kind] ?? "--soft");
        ctx.lineWidth = ratio;
        ctx.globalAlpha = 0.8;
        ctx.setLineDash(event.kind === "checkpoint" ? [] : [4 * ratio, 4 * ratio]);
        ctx.beginPath();
        const short = event.kind === "checkpoint", bottom = bbox.top + bbox.height;
        ctx.moveTo(at, bottom);
        ctx.lineTo(at, short ? bottom - 7 * ratio : bbox.top);
        ctx.stroke();
        if (!short) {
          ctx.beginPath();
          ctx.moveTo(at - 4 * ratio, bbox.top);
          ctx.lineTo(at + 4 * ratio, bbox.top);
          ctx.lineTo(at, bbox.top + 7 * ratio);
          ctx.fill();
        }
      }
    }
    ctx.restore();
  },

  /** Show the values at the cursor in this chart and in all others. */
  hover(chart, plot) {
    if (charts.moving) return;
    const { left } = plot.cursor, inside = left !== null && left !== undefined && left >= 0;
    const x = inside ? plot.posToVal(left, "x") : null;
    charts.moving = true;
    for (const other of charts.drawn.filter((one) => one.plot && one.visible)) {
      if (other !== chart) {
        const at = x === null ? -10 : other.plot.valToPos(x, "x");
        other.plot.setCursor({ left: at, top: x === null ? -10 : 10 }, false);
      }
      charts.values(other, x);
    }
    charts.moving = false;
    const near = inside ? (chart.marks ?? []).filter((mark) => Math.abs(mark.at - left) < 6) : [];
    if (near.length) {
      chart.at.textContent = `step ${format.number(near[0].event.step)}: ${near.map((mark) => mark.event.text).join("; ")}`;
    }
  },

  /** Write the values at `x` into the legend; the last ones if `x` is null. */
  values(chart, x) {
    const { axis } = charts.view;
    chart.at.textContent = x === null ? "" : axis === "time" ? format.seconds(x) : axis === "epoch" ? `epoch ${x.toFixed(2)}` : `step ${format.number(Math.round(x))}`;
    for (const entry of chart.curves) {
      if (!entry.value) continue;
      const line = x === null ? null : (chart.lines ?? []).find((one) => one.entry === entry);
      let value = entry.curve.y.at(-1);
      if (x !== null) {
        value = undefined;
        if (line?.x.length) {
          let [low, high] = [0, line.x.length - 1];
          while (low < high) {
            const middle = (low + high) >> 1;
            if (line.x[middle] < x) low = middle + 1;
            else high = middle;
          }
          const nearest = low > 0 && x - line.x[low - 1] < line.x[low] - x ? low - 1 : low;
          const [first, last] = [line.x[0], line.x.at(-1)], slack = (last - first) * 0.02;
          if (x >= first - slack && x <= last + slack) value = line.y[nearest];
        }
      }
      entry.value.textContent = value === null ? "not finite" : format.number(value);
    }
  },

  /** Return the ends of the axis over all charts. */
  ends() {
    const ends = charts.data.runs.filter((run) => run.clock).map((run) => charts.place(run, run.steps));
    return [0, Math.max(...ends.filter((end) => end !== null), 1e-9)];
  },

  zoom(range) {
    if (range) {
      const [low, high] = charts.ends(), width = Math.min(Math.max(range[1] - range[0], (high - low) * 1e-5), high - low);
      const start = Math.min(Math.max(range[0], low), high - width);
      range = width >= (high - low) * 0.9999 ? null : [start, start + width];
    }
    charts.view.range = range;
    cancelAnimationFrame(charts.zooming);
    charts.zooming = requestAnimationFrame(() => {
      for (const chart of charts.drawn) {
        if (!chart.plot) continue;
        if (chart.visible) chart.plot.setData(chart.plot.data, true);
        else chart.stale = true;
      }
    });
  },

  /** Zoom by a factor around a place from 0 (left) to 1, or move by a part of the width. */
  scale(factor, around = 0.5) {
    const [low, high] = charts.view.range ?? charts.ends(), center = low + (high - low) * around;
    charts.zoom([center - (center - low) * factor, center + (high - center) * factor]);
  },
  move(part) {
    if (!charts.view.range) return;
    const [low, high] = charts.view.range, by = (high - low) * part;
    charts.zoom([low + by, high + by]);
  },

  key(event) {
    const actions = { "+": () => charts.scale(0.5), "=": () => charts.scale(0.5), "-": () => charts.scale(2), ArrowLeft: () => charts.move(-0.25), ArrowRight: () => charts.move(0.25), 0: () => charts.zoom(null), Escape: () => charts.zoom(null) };
    if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  },

  /** Zoom and move with a wheel and with fingers. */
  gestures(chart) {
    const { over } = chart.plot, fingers = new Map();
    const share = (x) => (x - over.getBoundingClientRect().left) / over.clientWidth;
    over.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) charts.scale(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 100)) * 0.4), share(event.clientX));
      else if (charts.view.range && (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) charts.move((event.deltaX || event.deltaY) / over.clientWidth);
      else return;
      event.preventDefault();
    }, { passive: false });
    over.addEventListener("pointerdown", (event) => { if (event.pointerType === "touch") fingers.set(event.pointerId, event.clientX); });
    over.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) return;
      const before = [...fingers.values()];
      fingers.set(event.pointerId, event.clientX);
      const now = [...fingers.values()];
      if (now.length === 2) {
        const [old, wide] = [Math.abs(before[0] - before[1]), Math.abs(now[0] - now[1])];
        if (old > 10 && wide > 10) charts.scale(old / wide, share((now[0] + now[1]) / 2));
      } else if (charts.view.range) charts.move((before[0] - now[0]) / over.clientWidth);
      else chart.plot.setCursor({ left: share(event.clientX) * over.clientWidth, top: 10 });
    });
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) over.addEventListener(name, (event) => fingers.delete(event.pointerId));
  },
};
