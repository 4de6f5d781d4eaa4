"use strict";
// Draws the page's charts at their true width, with zoom, crosshair, smoothing and both axes. Without it each shows a table of figures.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const LEFT = 56, RIGHT = 14, TOP = 22, BOTTOM = 26, COLORS = data.dashes.length / 4;
  const state = { axis: "step", share: 0, zoom: null, hiddenRuns: new Set(), hiddenKinds: new Set() };
  const root = document.documentElement;
  root.classList.add("js");

  // ---------------------------------------------------------------- numbers

  const bytes = (size) => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (Math.abs(size) < 1024) return unit === "B" ? `${size.toFixed(0)} B` : `${size.toFixed(1)} ${unit}`;
      size /= 1024;
    }
    return `${size.toFixed(1)} TiB`;
  };
  const digits = (value, count) => String(Number(value.toPrecision(count)));
  const exponent = (value) => {
    const [mantissa, power] = value.toExponential(2).split("e");
    return `${mantissa.includes(".") ? mantissa.replace(/0+$/, "").replace(/\.$/, "") : mantissa}e${Number(power)}`;
  };
  const short = (value) => {
    for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= 0.9995 * size) return Math.abs(value / size) < 999 ? digits(value / size, 3) + letter : exponent(value);
    }
    return digits(value, 4);
  };
  const duration = (seconds) => {
    if (Math.abs(seconds) < 60) return `${digits(seconds, 3)} s`;
    const whole = Math.round(seconds);
    const parts = [[Math.floor(whole / 86400), "d"], [Math.floor(whole / 3600) % 24, "h"], [Math.floor(whole / 60) % 60, "min"], [whole % 60, "s"]];
    const first = parts.findIndex(([amount]) => amount);
    return parts.slice(first, first + 2).filter(([amount]) => amount).map(([amount, unit]) => `${amount} ${unit}`).join(" ");
  };
  const text = (value, unit) => {
    if (unit === "bytes") return bytes(value);
    if (unit === "share") return `${digits(value * 100, 3)}%`;
    if (unit === "seconds") return duration(value);
    if (unit === "rate" && Math.abs(value) >= 1e4) return short(value);
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e9)) return exponent(value);
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    return Math.abs(value) >= 1000 ? value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 }) : digits(value, 4);
  };
  const places = (step) => {
    if (step <= 0) return 3;
    const count = Math.max(0, -Math.floor(Math.log10(step)));
    const scaled = step * 10 ** count;
    return Math.min(8, count + (Math.abs(scaled - Math.round(scaled)) > 1e-6 ? 1 : 0));
  };
  const tickText = (value, step, unit) => {
    if (unit === "bytes") return bytes(value).replace(".0 ", " ");
    if (unit === "share") return `${(value * 100).toFixed(places(step * 100))}%`;
    if (unit === "seconds") return duration(value);
    if (value === 0) return "0";
    if (Math.max(Math.abs(value), step) >= 1e4) return short(value);
    if (step < 0.0005) return exponent(value);
    return value.toFixed(places(step));
  };
  const DURATIONS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const roundStep = (rough, unit) => {
    if (unit === "step") rough = Math.max(rough, 1);
    let factor = 1;
    if (unit === "seconds") {
      const fitting = DURATIONS.find((step) => step >= rough);
      if (rough > 0.5 && fitting) return fitting;
      factor = rough > 1 ? 86400 : 1;
    } else if (unit === "bytes" && rough >= 1) {
      return 2 ** Math.ceil(Math.log2(rough * 0.999));
    }
    const power = 10 ** Math.floor(Math.log10(rough / factor));
    return ([1, 2, 2.5, 5, 10].find((step) => step * power * factor >= rough * 0.999 && (unit !== "step" || Number.isInteger(step * power))) || 10) * power * factor;
  };
  const ticks = (low, high, target, unit) => {
    if (!(high > low) || !Number.isFinite(high - low)) return [low];
    const step = roundStep((high - low) / target, unit), found = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9 && found.length < 100; index++) {
      found.push(Math.abs(index * step) < step * 1e-9 ? 0 : index * step);
    }
    return found;
  };
  const logTicks = (low, high) => {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), found = [];
    const every = Math.max(1, Math.ceil((last - first) / 6));
    const inner = last - first < 2 ? [1, 2, 5] : [1];
    for (let power = first - 1; power <= last; power += 1) {
      if ((power - first) % every && inner.length === 1) continue;
      for (const factor of inner) {
        const value = factor * 10 ** power;
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
      }
    }
    return found.length > 1 ? found : ticks(low, high, 4, "number");
  };
  const withoutSpikes = (values) => values.map((value, index) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, index - 5), index + 6).filter((other) => other !== null).sort((a, b) => a - b);
    const half = near.length >> 1, deviation = near.map((other) => Math.abs(other - near[half])).sort((a, b) => a - b)[half];
    return Math.abs(value - near[half]) > 8 * deviation && deviation > 0 ? near[half] : value;
  });
  const smooth = (values, share) => {
    const width = share * values.length;
    if (width < 0.5) return values;
    const reach = Math.min(Math.ceil(3 * width), values.length);
    const weights = Array.from({ length: reach + 1 }, (_, offset) => Math.exp(-0.5 * (offset / width) ** 2));
    const kept = withoutSpikes(values);
    return values.map((value, index) => {
      if (value === null) return null;
      let weight = 0, first = 0, second = 0, total = 0, leaning = 0;
      for (let other = Math.max(0, index - reach); other <= Math.min(values.length - 1, index + reach); other++) {
        if (kept[other] === null) continue;
        const offset = (other - index) / width, own = weights[Math.abs(other - index)];
        weight += own;
        first += own * offset;
        second += own * offset * offset;
        total += own * kept[other];
        leaning += own * offset * kept[other];
      }
      const spread = weight * second - first * first;
      return spread > 1e-9 * weight * weight ? (second * total - first * leaning) / spread : total / weight;
    });
  };
  const calm = (lows, highs) => {
    const quantile = (values, share) => [...values].sort((a, b) => a - b)[Math.round(share * (values.length - 1))];
    const first = quantile(lows, 0.1), last = quantile(highs, 0.9), spread = Math.max(last - first, 1e-12 * Math.max(Math.abs(first), Math.abs(last)));
    return lows.length < 20 ? [-Infinity, Infinity] : [first - 6 * spread, last + 6 * spread];
  };

  // ----------------------------------------------------------------- series

  for (const panel of data.panels) {
    panel.isLog = false; panel.isWhole = false;
    for (const line of panel.lines) {
      line.cache = {};
      // By time, a run that wrote steps out of order is not in order.
      const order = line.t.map((_, index) => index).sort((a, b) => line.t[a] - line.t[b]);
      const isSorted = order.every((place, index) => place === index);
      const pick = (values) => (values && !isSorted ? order.map((place) => values[place]) : values);
      line.by = { step: { x: line.s, v: line.v, lo: line.lo, hi: line.hi }, time: { x: pick(line.t), v: pick(line.v), lo: pick(line.lo), hi: pick(line.hi) } };
      // While a run stood still between two attempts there is nothing to draw.
      const restarts = line.dotted ? [] : data.runs[line.run].restarts, times = line.by.time.x;
      line.by.time.begins = new Set(restarts.map((moment) => times.findIndex((x) => x >= moment)));
      line.by.step.begins = new Set();
    }
  }
  const smoothed = (panel, line) => {
    const own = line.by[state.axis];
    if (!panel.smooth || line.dotted || !state.share) return own.v;
    const key = `${state.axis} ${state.share}`;
    return (line.cache[key] ||= smooth(own.v, state.share));
  };
  const whole = () => {
    if (state.axis === "step") return data.ends;
    const all = data.panels.flatMap((panel) => panel.lines.map((line) => line.by.time.x));
    const low = Math.min(...all.map((x) => x[0])), high = Math.max(...all.map((x) => x[x.length - 1]));
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  };
  const across = () => state.zoom || whole();
  const isShown = (line) => !state.hiddenRuns.has(line.run);
  const unitAcross = () => (state.axis === "time" || !data.steps ? "seconds" : "step");
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };

  const visible = (panel, [from, to]) => {
    const means = [], lows = [], highs = [];
    for (const line of panel.lines.filter(isShown)) {
      const own = line.by[state.axis];
      own.x.forEach((x, index) => {
        if (x < from || x > to || own.v[index] === null) return;
        means.push(own.v[index]);
        lows.push((own.lo || own.v)[index]);
        highs.push((own.hi || own.v)[index]);
      });
    }
    return { means, lows, highs };
  };
  const least = (values) => values.reduce((best, value) => Math.min(best, value), Infinity);
  const most = (values) => values.reduce((best, value) => Math.max(best, value), -Infinity);
  const domain = (panel, ends) => {
    let { means, lows, highs } = visible(panel, ends);
    if (panel.isLog) {
      [means, lows, highs] = [means, lows, highs].map((values) => values.filter((value) => value > 0));
      return means.length ? [least(lows) / 1.15, most(highs) * 1.15] : [0.1, 1];
    }
    if (!means.length) return [0, 1];
    let low = least(lows), high = most(highs);
    if (!panel.isWhole) {
      const [lowest, highest] = calm(lows, highs);
      high = most(highs.filter((value) => value <= highest));
      low = least(lows.filter((value) => value >= lowest));
    }
    low = Math.max(low, -1e300); high = Math.min(high, 1e300);
    if (panel.zero && low >= 0) low = 0;
    const size = Math.max(Math.abs(low), Math.abs(high));
    if (high - low <= Math.max(1e-9 * size, 1e-300)) {
      const room = 0.1 * size || 1;
      return [panel.zero && low === 0 ? 0 : low - room, high + room];
    }
    const room = 0.06 * (high - low);
    return [low === 0 ? 0 : low - room, high + room];
  };

  // ------------------------------------------------------------------- draw

  // Only numbers and the page's own words go into these strings; names from a log are set as text.
  const path = (frame, own, values, [from, to]) => {
    let drawn = "", wasThere = false;
    const has = (index) => index <= to && values[index] !== null && (!frame.isLog || values[index] > 0);
    for (let index = from; index <= to; index++) {
      const isThere = has(index), begins = !wasThere || own.begins.has(index);
      // One between two gaps is a line of no length, whose round ends are a dot.
      const isAlone = begins && (!has(index + 1) || own.begins.has(index + 1));
      if (isThere) drawn += `${begins ? "M" : "L"}${frame.x(own.x[index]).toFixed(1)} ${frame.y(values[index]).toFixed(1)}${isAlone ? "h0" : ""}`;
      wasThere = isThere;
    }
    return drawn;
  };
  const band = (frame, own, [from, to]) => {
    let drawn = "", there = [], back = [];
    const close = () => {
      if (there.length) drawn += `M${there.join("L")}L${back.reverse().join("L")}Z`;
      there = []; back = [];
    };
    for (let index = from; index <= to + 1; index++) {
      if (own.begins.has(index)) close();
      if (index <= to && own.lo[index] !== null && (!frame.isLog || own.hi[index] > 0)) {
        const x = frame.x(own.x[index]).toFixed(1);
        there.push(`${x} ${frame.y(own.hi[index]).toFixed(1)}`);
        back.push(`${x} ${frame.y(frame.isLog ? Math.max(own.lo[index], frame.low) : own.lo[index]).toFixed(1)}`);
      } else {
        close();
      }
    }
    return drawn;
  };
  const makeFrame = (panel, width) => {
    const height = panel.tall ? Math.max(250, Math.min(330, width * 0.3)) : 236, [from, to] = across(), [low, high] = domain(panel, [from, to]);
    const scale = panel.isLog ? Math.log10 : (value) => value, foot = height - BOTTOM;
    const bottom = scale(low), reach = scale(high) - bottom;
    return {
      width, height, foot, from, to, low, high, isLog: panel.isLog,
      x: (value) => LEFT + ((value - from) / (to - from)) * (width - LEFT - RIGHT),
      back: (pixel) => from + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (to - from),
      y: (value) => foot - Math.min(2, Math.max(-1, (scale(value) - bottom) / reach)) * (foot - TOP),
    };
  };
  const drawGrid = (frame, panel) => {
    const up = frame.isLog ? logTicks(frame.low, frame.high) : ticks(frame.low, frame.high, panel.tall ? 5 : 4, panel.unit);
    let drawn = "";
    up.forEach((value, index) => {
      const y = frame.y(value), step = frame.isLog ? value : up.length > 1 ? up[1] - up[0] : 1;
      drawn += `<path class="grid" d="M${LEFT} ${y.toFixed(1)}H${frame.width - RIGHT}"/>`;
      drawn += `<text class="tick" x="${LEFT - 8}" y="${(y + 3.5).toFixed(1)}" text-anchor="end">${tickText(value, step, panel.unit)}</text>`;
    });
    const right = ticks(frame.from, frame.to, Math.max(2, Math.floor(frame.width / 110)), unitAcross());
    for (const value of right) {
      const x = frame.x(value), anchor = x > frame.width - 40 ? "end" : "middle";
      drawn += `<text class="tick" x="${x.toFixed(1)}" y="${frame.foot + 17}" text-anchor="${anchor}">${tickText(value, right.length > 1 ? right[1] - right[0] : 1, unitAcross())}</text>`;
    }
    if (unitAcross() === "step") drawn += `<text class="tick" x="${LEFT - 8}" y="${frame.foot + 17}" text-anchor="end">step</text>`;
    return `${drawn}<path class="axis" d="M${LEFT} ${frame.foot + 0.5}H${frame.width - RIGHT}"/>`;
  };
  // Signs that would lie on one another move aside; where a crowd is, lines and signs stand for their neighbors.
  const makeRow = () => {
    let rule = -Infinity, sign = -Infinity;
    return (x) => {
      const isApart = Math.abs(x - rule) >= 3, moved = x < sign + 9 && x > sign - 36 ? sign + 9 : x;
      if (isApart) rule = x;
      if (moved > x + 28) return [isApart, null];
      sign = moved;
      return [isApart, moved];
    };
  };
  const place = (event) => (state.axis === "time" ? event[2] : event[1]);
  const shownEvents = (frame) =>
    data.runs.flatMap((run, index) => (state.hiddenRuns.has(index) ? [] : run.events.map((event) => [index, event])))
      .filter(([, event]) => !state.hiddenKinds.has(event[0]) && place(event) >= frame.from && place(event) <= frame.to)
      .sort((a, b) => place(a[1]) - place(b[1]));
  const drawEvents = (frame) => {
    const row = makeRow();
    const events = shownEvents(frame), isCrowd = events.filter(([, event]) => data.kinds[event[0]].line).length > data.crowd;
    return events.map(([index, event]) => {
      const kind = data.kinds[event[0]], x = frame.x(place(event)), tone = data.runs.length > 1 ? `c${index % COLORS}` : kind.tone;
      let drawn = `<path class="foot" d="M${x.toFixed(1)} ${frame.foot - 5}V${frame.foot}"/>`;
      if (kind.line) {
        const [rule, sign] = row(x);
        drawn = rule ? `<path class="rule" d="M${x.toFixed(1)} ${TOP - 4}V${frame.foot}"/>` : "";
        if (sign !== null) drawn += `<path class="sign" transform="translate(${sign.toFixed(1)} ${TOP - 11})" d="${kind.sign}"/>`;
      }
      return `<g class="event ${tone}${isCrowd ? " crowd" : ""}">${drawn}</g>`;
    }).join("");
  };
  const drawLine = (frame, panel, line) => {
    const own = line.by[state.axis], color = `c${line.color % COLORS}`, values = smoothed(panel, line);
    const first = Math.max(0, nearest(own.x, frame.from) - 1), last = Math.min(own.x.length - 1, nearest(own.x, frame.to) + 1), range = [first, last];
    const dashed = data.dashes[line.color % data.dashes.length] || (line.dashed ? "5 4" : "");
    const under = own.lo ? `<path class="band ${color}" d="${band(frame, own, range)}"/>` : values !== own.v ? `<path class="raw ${color}" d="${path(frame, own, own.v, range)}"/>` : "";
    let drawn = `<path class="line ${color}" d="${path(frame, own, values, range)}"${dashed ? ` stroke-dasharray="${dashed}"` : ""}/>`;
    if (line.dotted) {
      own.x.forEach((x, index) => {
        const value = own.v[index];
        if (value === null || x < frame.from || x > frame.to || (frame.isLog && value <= 0)) return;
        drawn += `<circle class="dot ${color}" cx="${frame.x(x).toFixed(1)}" cy="${frame.y(value).toFixed(1)}" r="3"/>`;
      });
    }
    return [under, drawn];
  };
  const drawLines = (frame, panel, lines) => {
    const parts = lines.map((line) => drawLine(frame, panel, line));
    return parts.map(([under]) => under).join("") + parts.map(([, over]) => over).join("");
  };
  const drawMarks = (frame, line) => (line.m || []).map(([kind, s0, s1, t0, t1]) => {
    const [from, to] = state.axis === "time" ? [t0, t1] : [s0, s1];
    if (to < frame.from || from > frame.to) return "";
    const start = frame.x(Math.max(from, frame.from)), end = frame.x(Math.min(to, frame.to)), y = kind === "-inf" ? frame.foot - 7 : TOP + 7;
    const lasts = end - start > 1 ? `<path class="lasts" d="M${start.toFixed(1)} ${y}H${end.toFixed(1)}"/>` : "";
    return `<g class="mark c${line.color % COLORS}">${lasts}<path class="nonfinite" transform="translate(${start.toFixed(1)} ${y})" d="${data.marks[kind]}"/></g>`;
  }).join("");

  const figures = [...document.querySelectorAll("figure[data-panel]")].map((figure) => ({ figure, panel: data.panels[figure.dataset.panel], plot: figure.querySelector(".plot"), number: figure.dataset.panel }));
  const draw = (card) => {
    const { panel, plot, number } = card, width = Math.max(220, Math.round(plot.clientWidth)), frame = (card.frame = makeFrame(panel, width));
    const lines = panel.lines.filter(isShown);
    plot.innerHTML = `<svg viewBox="0 0 ${width} ${frame.height}" role="img"><clipPath id="p${number}"><rect x="${LEFT - 4}" y="${TOP}" width="${width - LEFT - RIGHT + 8}" height="${frame.foot - TOP + 1}"/></clipPath>`
      + drawGrid(frame, panel) + drawEvents(frame)
      + `<g clip-path="url(#p${number})">${drawLines(frame, panel, lines)}</g>`
      + lines.map((line) => drawMarks(frame, line)).join("") + '<path class="cross"/><rect class="chosen" width="0"/></svg>';
    plot.firstElementChild.setAttribute("aria-label", plot.dataset.label);
    plot.style.minHeight = `${frame.height}px`;
    card.cross = plot.querySelector(".cross");
    card.chosen = plot.querySelector(".chosen");
    const { lows, highs } = visible(panel, [frame.from, frame.to]);
    const beyond = highs.filter((value, index) => value > frame.high || lows[index] < frame.low).length;
    card.cut.hidden = !(beyond && !panel.isLog) && !panel.isWhole;
    card.cut.textContent = panel.isWhole ? "cut spikes off" : `${beyond} beyond the axis`;
  };
  let isAwaited = false;
  const redraw = () => {
    if (isAwaited) return;
    isAwaited = true;
    requestAnimationFrame(() => {
      isAwaited = false;
      figures.forEach(draw);
      document.getElementById("unzoom").hidden = !state.zoom;
    });
  };

  // ------------------------------------------------------------------ hover

  const make = (name, classes, words) => {
    const element = document.createElement(name);
    element.className = classes || "";
    if (words !== undefined) element.textContent = words;
    return element;
  };
  const tip = make("div", "tip");
  tip.hidden = true;
  document.body.append(tip);
  const value = (number, unit) => (unit === "number" ? digits(number, 5) : text(number, unit));
  const fillTip = (card, x) => {
    const { panel, frame } = card;
    const head = state.axis === "time" || !data.steps ? duration(x) : `step ${Math.round(x).toLocaleString("en-US")}`;
    const rows = [make("div", "head", head)];
    for (const line of panel.lines.filter(isShown)) {
      const own = line.by[state.axis], index = nearest(own.x, x);
      if (own.v[index] === null || x < own.x[0] - 1e-9 || Math.abs(frame.x(own.x[index]) - frame.x(x)) > 40) continue;
      const row = make("div", `row c${line.color % COLORS}`);
      const name = data.runs.length > 1 ? `${data.runs[line.run].label}${line.label ? ` · ${line.label}` : ""}` : line.label || panel.title;
      row.append(make("i"), make("span", "", name), make("b", "", value(own.v[index], panel.unit)));
      if (own.lo && own.lo[index] !== own.hi[index]) row.append(make("span", "range", `mean; ${value(own.lo[index], panel.unit)} to ${value(own.hi[index], panel.unit)}`));
      rows.push(row);
    }
    const near = shownEvents(frame).filter(([, event]) => Math.abs(frame.x(place(event)) - frame.x(x)) < 5).slice(0, 4);
    for (const [index, event] of near) rows.push(make("div", "happened", (data.runs.length > 1 ? `${data.runs[index].label}: ` : "") + event[3]));
    tip.replaceChildren(...rows);
  };
  const showTip = (card, x, pointer) => {
    fillTip(card, x);
    tip.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = tip;
    const left = pointer.clientX + 18 + width > innerWidth ? pointer.clientX - width - 18 : pointer.clientX + 18;
    tip.style.left = `${Math.max(6, left)}px`;
    tip.style.top = `${Math.max(6, Math.min(innerHeight - height - 6, pointer.clientY - height / 2))}px`;
  };
  const hideTip = () => {
    tip.hidden = true;
    figures.forEach((card) => card.cross && card.cross.setAttribute("d", ""));
  };
  const pointedAt = (card, pointer) => {
    const box = card.plot.getBoundingClientRect();
    return Math.min(card.frame.width - RIGHT, Math.max(LEFT, ((pointer.clientX - box.left) / box.width) * card.frame.width));
  };
  const watch = (card) => {
    let start = null;
    card.plot.addEventListener("pointermove", (pointer) => {
      const pixel = pointedAt(card, pointer), x = card.frame.back(pixel);
      for (const other of figures) other.cross.setAttribute("d", `M${other.frame.x(x).toFixed(1)} ${TOP}V${other.frame.foot}`);
      showTip(card, x, pointer);
      if (start === null) return;
      card.chosen.setAttribute("x", Math.min(start, pixel));
      card.chosen.setAttribute("y", TOP);
      card.chosen.setAttribute("width", Math.abs(pixel - start));
      card.chosen.setAttribute("height", card.frame.foot - TOP);
    });
    card.plot.addEventListener("pointerdown", (pointer) => {
      if (pointer.button !== 0) return;
      start = pointedAt(card, pointer);
      card.plot.setPointerCapture(pointer.pointerId);
    });
    const finish = (pointer, isKept) => {
      if (start === null) return;
      const end = pointedAt(card, pointer), from = start;
      start = null;
      card.chosen.setAttribute("width", 0);
      if (!isKept || Math.abs(end - from) < 6) return;
      state.zoom = [card.frame.back(Math.min(from, end)), card.frame.back(Math.max(from, end))];
      redraw();
    };
    card.plot.addEventListener("pointerup", (pointer) => finish(pointer, true));
    card.plot.addEventListener("pointercancel", (pointer) => finish(pointer, false));
    card.plot.addEventListener("pointerleave", hideTip);
    card.plot.addEventListener("dblclick", unzoom);
  };

  // --------------------------------------------------------------- controls

  const unzoom = () => { state.zoom = null; redraw(); };
  const press = (button, isPressed) => button.setAttribute("aria-pressed", String(isPressed));
  const tool = (card, words, hint, act) => {
    const button = make("button", "", words);
    button.type = "button";
    button.title = hint;
    button.addEventListener("click", () => { act(button); redraw(); });
    card.figure.querySelector(".tools").append(button);
    return button;
  };
  for (const card of figures) {
    const { panel } = card, marks = panel.lines.reduce((sum, line) => sum + (line.m || []).reduce((total, mark) => total + mark[5], 0), 0);
    const tools = card.figure.querySelector(".tools");
    if (marks) tools.append(make("span", "", `${marks.toLocaleString("en-US")} not finite`));
    card.cut = tool(card, "", "show every value, or cut off those that would press the rest flat", () => { panel.isWhole = !panel.isWhole; });
    tool(card, "log", "logarithmic values", (button) => { panel.isLog = !panel.isLog; press(button, panel.isLog); });
    watch(card);
  }
  const toggle = (set, key, button) => {
    if (set.has(key)) set.delete(key); else set.add(key);
    press(button, !set.has(key));
    redraw();
  };
  for (const button of document.querySelectorAll("[data-run]")) button.addEventListener("click", () => toggle(state.hiddenRuns, Number(button.dataset.run), button));
  for (const button of document.querySelectorAll("[data-kind]")) button.addEventListener("click", () => toggle(state.hiddenKinds, button.dataset.kind, button));
  const axes = [...document.querySelectorAll("[data-axis]")];
  for (const button of axes) {
    button.addEventListener("click", () => {
      state.axis = button.dataset.axis;
      state.zoom = null;
      axes.forEach((other) => press(other, other === button));
      redraw();
    });
  }
  const slider = document.getElementById("smoothing");
  state.share = slider.value / 100;
  slider.addEventListener("input", () => {
    state.share = slider.value / 100;
    document.getElementById("share").textContent = `${slider.value} %`;
    redraw();
  });
  document.getElementById("unzoom").addEventListener("click", unzoom);
  addEventListener("keydown", (key) => { if (key.key === "Escape") unzoom(); });
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    redraw();
  }).observe(document.body);
  figures.forEach(draw);
})();
