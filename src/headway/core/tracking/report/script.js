"use strict";
// Draws the page's charts at their true width, with zoom, crosshair, smoothing, and a choice of horizontal axes. Without this script, each
// chart is a table of numbers.
//
// `page.py` (`_encode_data`) writes the data:
//   runs      label, restarts (seconds), and events as [kind, step, seconds, text]
//   kinds     sign (SVG path), tone, and line (whether the event is a vertical line), by kind of event
//   steps     whether all runs have steps; otherwise `s` below contains seconds
//   ends      first and last step of the step axis
//   axes      counts of tokens or samples by name of the axis: for each run, s (steps) and n (counts at these steps)
//   crowd     number of event lines above which they are drawn fainter
//   dashes    SVG dash pattern by line number, four for each color
//   marks     SVG path by kind of non-finite value
//   panels    charts: title, unit, zero (whether values start at 0), tall, smooth, and lines. A line has run (index), label, color, dotted,
//             dashed, s (steps), t (seconds), v (values; null is a gap), for long series lo and hi (extremes of each point), and m (marks
//             [kind, first step, last step, first second, last second, number of values])
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  // Margins of a chart in pixels
  const LEFT = 56, RIGHT = 14, TOP = 22, BOTTOM = 26;
  const NUM_COLORS = data.dashes.length / 4;
  // axis: "step", "time", or a name in data.axes. smoothing: width of the smoothing window as a fraction of a series. zoom: [from, to] on the axis, or null.
  const state = { axis: "step", smoothing: 0, zoom: null, hiddenRuns: new Set(), hiddenKinds: new Set() };
  document.documentElement.classList.add("js");

  // ---------------------------------------------------------------- numbers as text, as in number_formats.py

  const formatBytes = (size) => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (Math.abs(size) < 1024) return unit === "B" ? `${size.toFixed(0)} B` : `${size.toFixed(1)} ${unit}`;
      size /= 1024;
    }
    return `${size.toFixed(1)} TiB`;
  };
  const formatDigits = (value, count) => String(Number(value.toPrecision(count)));
  const formatExponent = (value) => {
    const [mantissa, power] = value.toExponential(2).split("e");
    return `${mantissa.includes(".") ? mantissa.replace(/0+$/, "").replace(/\.$/, "") : mantissa}e${Number(power)}`;
  };
  const formatShort = (value) => {
    for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      // 0.9995: values that would round to 1000 of the smaller unit
      if (Math.abs(value) < 0.9995 * size) continue;
      return Math.abs(value / size) < 999 ? formatDigits(value / size, 3) + letter : formatExponent(value);
    }
    return formatDigits(value, 4);
  };
  const formatDuration = (seconds) => {
    if (Math.abs(seconds) < 60) return `${formatDigits(seconds, 3)} s`;
    const total = Math.round(seconds);
    const parts = [[Math.floor(total / 86400), "d"], [Math.floor(total / 3600) % 24, "h"], [Math.floor(total / 60) % 60, "min"], [total % 60, "s"]];
    const first = parts.findIndex(([amount]) => amount);
    return parts.slice(first, first + 2).filter(([amount]) => amount).map(([amount, unit]) => `${amount} ${unit}`).join(" ");
  };
  const formatValue = (value, unit) => {
    if (unit === "bytes") return formatBytes(value);
    if (unit === "share") return `${formatDigits(value * 100, 3)}%`;
    if (unit === "seconds") return formatDuration(value);
    if (unit === "rate" && Math.abs(value) >= 1e4) return formatShort(value);
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e9)) return formatExponent(value);
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    if (Math.abs(value) < 1000) return formatDigits(value, 4);
    return value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  };

  // ---------------------------------------------------------------- ticks of the axes

  // Number of decimals with which ticks at this distance differ
  const countDecimals = (step) => {
    if (step <= 0) return 3;
    const count = Math.max(0, -Math.floor(Math.log10(step)));
    const scaled = step * 10 ** count;
    return Math.min(8, count + (Math.abs(scaled - Math.round(scaled)) > 1e-6 ? 1 : 0)); // one more for a step of 2.5
  };
  const formatTick = (value, step, unit) => {
    if (unit === "bytes") return formatBytes(value).replace(".0 ", " ");
    if (unit === "share") return `${(value * 100).toFixed(countDecimals(step * 100))}%`;
    if (unit === "seconds") return formatDuration(value);
    if (value === 0) return "0";
    if (Math.max(Math.abs(value), step) >= 1e4) return formatShort(value);
    if (step < 0.0005) return formatExponent(value);
    return value.toFixed(countDecimals(step));
  };
  const ROUND_DURATIONS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  // Smallest round distance between ticks that is at least `minStep`: a round duration, a power of two bytes, or 1, 2, 2.5, 5 or 10 times a
  // power of ten
  const chooseTickStep = (minStep, unit) => {
    if (unit === "count") minStep = Math.max(minStep, 1);
    let factor = 1;
    if (unit === "seconds") {
      const duration = ROUND_DURATIONS.find((step) => step >= minStep);
      if (minStep > 0.5 && duration) return duration;
      factor = minStep > 1 ? 86400 : 1; // longer ones are round numbers of days
    } else if (unit === "bytes" && minStep >= 1) {
      return 2 ** Math.ceil(Math.log2(minStep * 0.999));
    }
    const power = 10 ** Math.floor(Math.log10(minStep / factor));
    const isAllowed = (step) => step * power * factor >= minStep * 0.999 && (unit !== "count" || Number.isInteger(step * power));
    return ([1, 2, 2.5, 5, 10].find(isAllowed) || 10) * power * factor;
  };
  const listTicks = (low, high, targetCount, unit) => {
    if (!(high > low) || !Number.isFinite(high - low)) return [low];
    const step = chooseTickStep((high - low) / targetCount, unit), ticks = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9 && ticks.length < 100; index++) {
      ticks.push(Math.abs(index * step) < step * 1e-9 ? 0 : index * step);
    }
    return ticks;
  };
  const listLogTicks = (low, high) => {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9), ticks = [];
    const stride = Math.max(1, Math.ceil((last - first) / 6)); // for at most seven powers of ten
    const factors = last - first < 2 ? [1, 2, 5] : [1];
    for (let power = first - 1; power <= last; power += 1) {
      if ((power - first) % stride && factors.length === 1) continue;
      for (const factor of factors) {
        const value = factor * 10 ** power;
        if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
      }
    }
    return ticks.length > 1 ? ticks : listTicks(low, high, 4, "number");
  };

  // ---------------------------------------------------------------- smoothing

  // Replaces values that are more than eight median deviations from the median of the eleven values around them (a Hampel filter)
  const replaceSpikes = (values) => values.map((value, index) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, index - 5), index + 6).filter((other) => other !== null).sort((a, b) => a - b);
    const middle = near.length >> 1, median = near[middle];
    const deviation = near.map((other) => Math.abs(other - median)).sort((a, b) => a - b)[middle];
    return Math.abs(value - median) > 8 * deviation && deviation > 0 ? median : value;
  });
  // Fits a straight line around each value, with Gaussian weights, and returns the lines' heights there (local linear regression). At the ends
  // of a series, where a weighted mean would lag behind, a line does not. `share` is the weights' standard deviation as a fraction of the series.
  const smoothValues = (values, share) => {
    const width = share * values.length;
    if (width < 0.5) return values;
    const reach = Math.min(Math.ceil(3 * width), values.length);
    const weights = Array.from({ length: reach + 1 }, (_, offset) => Math.exp(-0.5 * (offset / width) ** 2));
    const kept = replaceSpikes(values);
    return values.map((value, index) => {
      if (value === null) return null;
      // Sums over the neighbors: of w, w x, w x^2, w y and w x y
      let sumW = 0, sumX = 0, sumXX = 0, sumY = 0, sumXY = 0;
      for (let other = Math.max(0, index - reach); other <= Math.min(values.length - 1, index + reach); other++) {
        if (kept[other] === null) continue;
        const x = (other - index) / width, weight = weights[Math.abs(other - index)];
        sumW += weight;
        sumX += weight * x;
        sumXX += weight * x * x;
        sumY += weight * kept[other];
        sumXY += weight * x * kept[other];
      }
      const determinant = sumW * sumXX - sumX * sumX; // close to 0 if there is only one neighbor
      return determinant > 1e-9 * sumW * sumW ? (sumXX * sumY - sumX * sumXY) / determinant : sumY / sumW;
    });
  };
  // Limits outside of which values are spikes, as `find_spike_limits` in panels.py computes them
  const findSpikeLimits = (lows, highs) => {
    if (lows.length < 20) return [-Infinity, Infinity];
    const findQuantile = (values, share) => [...values].sort((a, b) => a - b)[Math.round(share * (values.length - 1))];
    const low = findQuantile(lows, 0.1), high = findQuantile(highs, 0.9);
    const spread = Math.max(high - low, 1e-12 * Math.max(Math.abs(low), Math.abs(high)));
    return [low - 6 * spread, high + 6 * spread];
  };

  // ---------------------------------------------------------------- series and ranges

  // Count of tokens or samples that a run had reached at a step. Between the logged steps, it is interpolated linearly; after the last one,
  // it continues at the pace before it.
  const countAt = ({ s: steps, n: counts }, step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return counts[low] + ((step - steps[low]) / (steps[high] - steps[low])) * (counts[high] - counts[low]);
  };
  // Position on the current axis of a step and its time in seconds
  const placeOnAxis = (run, step, seconds) => {
    if (state.axis === "time") return seconds;
    return state.axis === "step" ? step : countAt(data.axes[state.axis][run], step);
  };
  for (const panel of data.panels) {
    panel.isLog = false;
    panel.showsSpikes = false; // whether the value axis includes spikes
    for (const line of panel.lines) {
      line.smoothed = {}; // smoothed values, by axis and smoothing
      // By time, a run that wrote steps out of order is not in order.
      const order = line.t.map((_, index) => index).sort((a, b) => line.t[a] - line.t[b]);
      const isSorted = order.every((position, index) => position === index);
      const sortByTime = (values) => (values && !isSorted ? order.map((position) => values[position]) : values);
      // While a run stood still between two attempts there is nothing to draw.
      const times = sortByTime(line.t), restarts = line.dotted ? [] : data.runs[line.run].restarts;
      const timeGaps = new Set(restarts.map((moment) => times.findIndex((time) => time >= moment)));
      // gaps: indices of the points that are not connected to the point before them
      line.byAxis = {
        step: { x: line.s, v: line.v, lo: line.lo, hi: line.hi, gaps: new Set() },
        time: { x: times, v: sortByTime(line.v), lo: sortByTime(line.lo), hi: sortByTime(line.hi), gaps: timeGaps },
      };
      for (const [name, counts] of Object.entries(data.axes)) {
        line.byAxis[name] = { ...line.byAxis.step, x: line.s.map((step) => countAt(counts[line.run], step)) };
      }
    }
  }
  const getSeries = (line) => line.byAxis[state.axis];
  const getSmoothedValues = (panel, line) => {
    const { v } = getSeries(line);
    if (!panel.smooth || line.dotted || !state.smoothing) return v;
    const key = `${state.axis} ${state.smoothing}`;
    return (line.smoothed[key] ||= smoothValues(v, state.smoothing));
  };
  const isShown = (line) => !state.hiddenRuns.has(line.run);
  const findFullRange = () => {
    if (state.axis === "step") return data.ends;
    const all = data.panels.flatMap((panel) => panel.lines.map((line) => getSeries(line).x));
    let low = Math.min(...all.map((x) => x[0]));
    const high = Math.max(...all.map((x) => x[x.length - 1]));
    if (state.axis !== "time" && low < 0.05 * high) low = 0; // as `find_step_range` in panels.py
    return high > low ? [low, high] : [low - 0.5, high + 0.5];
  };
  const getShownRange = () => state.zoom || findFullRange();
  const getAxisUnit = () => (state.axis === "time" || !data.steps ? "seconds" : "count");
  // Index of the sorted number that is nearest to x
  const findNearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  const collectVisible = (panel, [from, to]) => {
    const means = [], lows = [], highs = [];
    for (const line of panel.lines.filter(isShown)) {
      const series = getSeries(line);
      series.x.forEach((x, index) => {
        if (x < from || x > to || series.v[index] === null) return;
        means.push(series.v[index]);
        lows.push((series.lo || series.v)[index]);
        highs.push((series.hi || series.v)[index]);
      });
    }
    return { means, lows, highs };
  };
  // Math.min(...values) would exceed the limit on arguments.
  const findMin = (values) => values.reduce((best, value) => Math.min(best, value), Infinity);
  const findMax = (values) => values.reduce((best, value) => Math.max(best, value), -Infinity);
  // Range of the value axis, as `find_value_range` and `_widen_range` in panels.py compute it
  const findValueRange = (panel, range) => {
    let { means, lows, highs } = collectVisible(panel, range);
    if (panel.isLog) {
      [means, lows, highs] = [means, lows, highs].map((values) => values.filter((value) => value > 0));
      return means.length ? [findMin(lows) / 1.15, findMax(highs) * 1.15] : [0.1, 1];
    }
    if (!means.length) return [0, 1];
    let low = findMin(lows), high = findMax(highs);
    if (!panel.showsSpikes) {
      const [lowLimit, highLimit] = findSpikeLimits(lows, highs);
      high = findMax(highs.filter((value) => value <= highLimit));
      low = findMin(lows.filter((value) => value >= lowLimit));
    }
    low = Math.max(low, -1e300); high = Math.min(high, 1e300);
    if (panel.zero && low >= 0) low = 0;
    const size = Math.max(Math.abs(low), Math.abs(high));
    if (high - low <= Math.max(1e-9 * size, 1e-300)) {
      const margin = 0.1 * size || 1;
      return [panel.zero && low === 0 ? 0 : low - margin, high + margin];
    }
    const margin = 0.06 * (high - low);
    return [low === 0 ? 0 : low - margin, high + margin];
  };

  // ---------------------------------------------------------------- drawing
  // The functions below return SVG. Only numbers and the page's own words go into these strings; names from a log are set as text.

  // Size of a chart and its ranges. x() and y() turn values into pixels, and toValue() turns a horizontal pixel into a value.
  const makeFrame = (panel, width) => {
    const height = panel.tall ? Math.max(250, Math.min(330, width * 0.3)) : 236;
    const [from, to] = getShownRange(), [low, high] = findValueRange(panel, [from, to]);
    const scale = panel.isLog ? Math.log10 : (value) => value, axisY = height - BOTTOM;
    const scaledLow = scale(low), scaledSpan = scale(high) - scaledLow;
    return {
      width, height, axisY, from, to, low, high, isLog: panel.isLog,
      x: (value) => LEFT + ((value - from) / (to - from)) * (width - LEFT - RIGHT),
      toValue: (pixel) => from + ((pixel - LEFT) / (width - LEFT - RIGHT)) * (to - from),
      // Values outside of the range are drawn at most one height beyond the chart, because browsers cannot draw at very large coordinates.
      y: (value) => axisY - Math.min(2, Math.max(-1, (scale(value) - scaledLow) / scaledSpan)) * (axisY - TOP),
    };
  };
  // Path through the values at the indices from first to last. Gaps interrupt it.
  const drawPath = (frame, series, values, [first, last]) => {
    let drawn = "", wasDrawn = false;
    const isDrawn = (index) => index <= last && values[index] !== null && (!frame.isLog || values[index] > 0);
    for (let index = first; index <= last; index++) {
      const isStart = !wasDrawn || series.gaps.has(index);
      // A point between two gaps is a line of no length, whose round ends are a dot.
      const isAlone = isStart && (!isDrawn(index + 1) || series.gaps.has(index + 1));
      wasDrawn = isDrawn(index);
      if (wasDrawn) drawn += `${isStart ? "M" : "L"}${frame.x(series.x[index]).toFixed(1)} ${frame.y(values[index]).toFixed(1)}${isAlone ? "h0" : ""}`;
    }
    return drawn;
  };
  // Areas between the minima and maxima at the indices from first to last. Gaps separate them.
  const drawBand = (frame, series, [first, last]) => {
    let drawn = "", upper = [], lower = [];
    const closeArea = () => {
      if (upper.length) drawn += `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
      upper = []; lower = [];
    };
    for (let index = first; index <= last + 1; index++) {
      if (series.gaps.has(index)) closeArea();
      if (index <= last && series.lo[index] !== null && (!frame.isLog || series.hi[index] > 0)) {
        const x = frame.x(series.x[index]).toFixed(1);
        upper.push(`${x} ${frame.y(series.hi[index]).toFixed(1)}`);
        lower.push(`${x} ${frame.y(frame.isLog ? Math.max(series.lo[index], frame.low) : series.lo[index]).toFixed(1)}`);
      } else {
        closeArea();
      }
    }
    return drawn;
  };
  const drawGrid = (frame, panel) => {
    const yTicks = frame.isLog ? listLogTicks(frame.low, frame.high) : listTicks(frame.low, frame.high, panel.tall ? 5 : 4, panel.unit);
    const yStep = yTicks.length > 1 ? yTicks[1] - yTicks[0] : 1;
    let drawn = "";
    for (const value of yTicks) {
      const y = frame.y(value), label = formatTick(value, frame.isLog ? value : yStep, panel.unit);
      drawn += `<path class="grid" d="M${LEFT} ${y.toFixed(1)}H${frame.width - RIGHT}"/>`;
      drawn += `<text class="tick" x="${LEFT - 8}" y="${(y + 3.5).toFixed(1)}" text-anchor="end">${label}</text>`;
    }
    const unit = getAxisUnit(), xTicks = listTicks(frame.from, frame.to, Math.max(2, Math.floor(frame.width / 110)), unit);
    const xStep = xTicks.length > 1 ? xTicks[1] - xTicks[0] : 1;
    for (const value of xTicks) {
      const x = frame.x(value), anchor = x > frame.width - 40 ? "end" : "middle";
      drawn += `<text class="tick" x="${x.toFixed(1)}" y="${frame.axisY + 17}" text-anchor="${anchor}">${formatTick(value, xStep, unit)}</text>`;
    }
    if (unit === "count") drawn += `<text class="tick" x="${LEFT - 8}" y="${frame.axisY + 17}" text-anchor="end">${state.axis}</text>`;
    return `${drawn}<path class="axis" d="M${LEFT} ${frame.axisY + 0.5}H${frame.width - RIGHT}"/>`;
  };
  // Returns a function that is called with the pixels of events from left to right. It decides whether to draw an event's line, and where to
  // draw its sign (null: not at all). A sign that would cover the one before it moves to the right, by at most 28 pixels. In a crowd, the
  // lines and signs that are drawn stand for their neighbors.
  const makeSignRow = () => {
    let lastLine = -Infinity, lastSign = -Infinity;
    return (x) => {
      const hasLine = Math.abs(x - lastLine) >= 3, sign = x < lastSign + 9 && x > lastSign - 36 ? lastSign + 9 : x;
      if (hasLine) lastLine = x;
      if (sign > x + 28) return [hasLine, null];
      lastSign = sign;
      return [hasLine, sign];
    };
  };
  // Events as {run (index), kind, text, x (position on the axis)}, from left to right
  const listShownEvents = (frame) =>
    data.runs.flatMap(({ events }, run) => events.map(([kind, step, seconds, text]) => ({ run, kind, text, x: placeOnAxis(run, step, seconds) })))
      .filter(({ run, kind, x }) => !state.hiddenRuns.has(run) && !state.hiddenKinds.has(kind) && x >= frame.from && x <= frame.to)
      .sort((a, b) => a.x - b.x);
  const drawEvents = (frame) => {
    const placeSign = makeSignRow(), events = listShownEvents(frame);
    const isCrowd = events.filter(({ kind }) => data.kinds[kind].line).length > data.crowd;
    return events.map(({ run, kind: name, x: position }) => {
      const kind = data.kinds[name], x = frame.x(position);
      const color = data.runs.length > 1 ? `c${run % NUM_COLORS}` : kind.tone;
      let drawn = `<path class="foot" d="M${x.toFixed(1)} ${frame.axisY - 5}V${frame.axisY}"/>`;
      if (kind.line) {
        const [hasLine, sign] = placeSign(x);
        drawn = hasLine ? `<path class="rule" d="M${x.toFixed(1)} ${TOP - 4}V${frame.axisY}"/>` : "";
        if (sign !== null) drawn += `<path class="sign" transform="translate(${sign.toFixed(1)} ${TOP - 11})" d="${kind.sign}"/>`;
      }
      return `<g class="event ${color}${isCrowd ? " crowd" : ""}">${drawn}</g>`;
    }).join("");
  };
  // Pair of what is drawn below all lines (the band, or the values before smoothing) and the line itself
  const drawLine = (frame, panel, line) => {
    const series = getSeries(line), values = getSmoothedValues(panel, line), color = `c${line.color % NUM_COLORS}`;
    // One point beyond each end, so that the line reaches the edges of the chart
    const first = Math.max(0, findNearest(series.x, frame.from) - 1), last = Math.min(series.x.length - 1, findNearest(series.x, frame.to) + 1);
    const range = [first, last];
    let under = "";
    if (series.lo) under = `<path class="band ${color}" d="${drawBand(frame, series, range)}"/>`;
    else if (values !== series.v) under = `<path class="raw ${color}" d="${drawPath(frame, series, series.v, range)}"/>`;
    const dashes = data.dashes[line.color % data.dashes.length] || (line.dashed ? "5 4" : "");
    let drawn = `<path class="line ${color}" d="${drawPath(frame, series, values, range)}"${dashes ? ` stroke-dasharray="${dashes}"` : ""}/>`;
    if (line.dotted) {
      series.x.forEach((x, index) => {
        const value = series.v[index];
        if (value === null || x < frame.from || x > frame.to || (frame.isLog && value <= 0)) return;
        drawn += `<circle class="dot ${color}" cx="${frame.x(x).toFixed(1)}" cy="${frame.y(value).toFixed(1)}" r="3"/>`;
      });
    }
    return [under, drawn];
  };
  const drawLines = (frame, panel, lines) => {
    const parts = lines.map((line) => drawLine(frame, panel, line));
    return parts.map(([under]) => under).join("") + parts.map(([, drawn]) => drawn).join("");
  };
  const drawMarks = (frame, line) => (line.m || []).map(([kind, firstStep, lastStep, firstTime, lastTime]) => {
    const from = placeOnAxis(line.run, firstStep, firstTime), to = placeOnAxis(line.run, lastStep, lastTime);
    if (to < frame.from || from > frame.to) return "";
    const start = frame.x(Math.max(from, frame.from)), end = frame.x(Math.min(to, frame.to)), y = kind === "-inf" ? frame.axisY - 7 : TOP + 7;
    const extent = end - start > 1 ? `<path class="lasts" d="M${start.toFixed(1)} ${y}H${end.toFixed(1)}"/>` : "";
    return `<g class="mark c${line.color % NUM_COLORS}">${extent}<path class="nonfinite" transform="translate(${start.toFixed(1)} ${y})" d="${data.marks[kind]}"/></g>`;
  }).join("");

  // Frames of the charts on the page. drawCard() adds `frame`, `cross` (crosshair) and `selection`, and the controls add `spikeTool`.
  const cards = [...document.querySelectorAll("figure[data-panel]")].map((figure) => (
    { figure, panel: data.panels[figure.dataset.panel], plot: figure.querySelector(".plot"), number: figure.dataset.panel }
  ));
  const drawCard = (card) => {
    const { panel, plot, number } = card, width = Math.max(220, Math.round(plot.clientWidth));
    const frame = (card.frame = makeFrame(panel, width)), lines = panel.lines.filter(isShown);
    plot.innerHTML = `<svg viewBox="0 0 ${width} ${frame.height}" role="img"><clipPath id="p${number}"><rect x="${LEFT - 4}" y="${TOP}" width="${width - LEFT - RIGHT + 8}" height="${frame.axisY - TOP + 1}"/></clipPath>`
      + drawGrid(frame, panel) + drawEvents(frame)
      + `<g clip-path="url(#p${number})">${drawLines(frame, panel, lines)}</g>`
      + lines.map((line) => drawMarks(frame, line)).join("") + '<path class="cross"/><rect class="chosen" width="0"/></svg>';
    plot.firstElementChild.setAttribute("aria-label", plot.dataset.label);
    plot.style.minHeight = `${frame.height}px`;
    card.cross = plot.querySelector(".cross");
    card.selection = plot.querySelector(".chosen");
    const { lows, highs } = collectVisible(panel, [frame.from, frame.to]);
    const numBeyond = highs.filter((value, index) => value > frame.high || lows[index] < frame.low).length;
    card.spikeTool.hidden = !(numBeyond && !panel.isLog) && !panel.showsSpikes;
    card.spikeTool.textContent = panel.showsSpikes ? "cut spikes off" : `${numBeyond} beyond the axis`;
  };
  let isFrameRequested = false;
  const requestRedraw = () => {
    if (isFrameRequested) return;
    isFrameRequested = true;
    requestAnimationFrame(() => {
      isFrameRequested = false;
      cards.forEach(drawCard);
      document.getElementById("unzoom").hidden = !state.zoom;
    });
  };

  // ---------------------------------------------------------------- crosshair, tooltip and zoom

  const createElement = (name, classes, content) => {
    const element = document.createElement(name);
    element.className = classes || "";
    if (content !== undefined) element.textContent = content;
    return element;
  };
  const tip = createElement("div", "tip");
  tip.hidden = true;
  document.body.append(tip);
  const formatTipValue = (value, unit) => (unit === "number" ? formatDigits(value, 5) : formatValue(value, unit));
  const fillTip = (card, x) => {
    const { panel, frame } = card;
    const head = getAxisUnit() === "seconds" ? formatDuration(x) : `${state.axis} ${Math.round(x).toLocaleString("en-US")}`;
    const rows = [createElement("div", "head", head)];
    for (const line of panel.lines.filter(isShown)) {
      const series = getSeries(line), index = findNearest(series.x, x), value = series.v[index];
      if (value === null || x < series.x[0] - 1e-9 || Math.abs(frame.x(series.x[index]) - frame.x(x)) > 40) continue;
      const row = createElement("div", `row c${line.color % NUM_COLORS}`);
      const runLabel = data.runs[line.run].label;
      const name = data.runs.length > 1 ? `${runLabel}${line.label ? ` · ${line.label}` : ""}` : line.label || panel.title;
      row.append(createElement("i"), createElement("span", "", name), createElement("b", "", formatTipValue(value, panel.unit)));
      if (series.lo && series.lo[index] !== series.hi[index]) {
        const [low, high] = [series.lo[index], series.hi[index]].map((extreme) => formatTipValue(extreme, panel.unit));
        row.append(createElement("span", "range", `mean; ${low} to ${high}`));
      }
      rows.push(row);
    }
    const near = listShownEvents(frame).filter((event) => Math.abs(frame.x(event.x) - frame.x(x)) < 5).slice(0, 4);
    for (const { run, text } of near) {
      rows.push(createElement("div", "happened", (data.runs.length > 1 ? `${data.runs[run].label}: ` : "") + text));
    }
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
    cards.forEach((card) => card.cross && card.cross.setAttribute("d", ""));
  };
  // Horizontal pixel of the chart at the pointer
  const findPointedPixel = (card, pointer) => {
    const box = card.plot.getBoundingClientRect();
    return Math.min(card.frame.width - RIGHT, Math.max(LEFT, ((pointer.clientX - box.left) / box.width) * card.frame.width));
  };
  const resetZoom = () => { state.zoom = null; requestRedraw(); };
  const addPointerListeners = (card) => {
    let dragStart = null; // pixel; null while no button is pressed
    card.plot.addEventListener("pointermove", (pointer) => {
      const pixel = findPointedPixel(card, pointer), x = card.frame.toValue(pixel);
      for (const other of cards) other.cross.setAttribute("d", `M${other.frame.x(x).toFixed(1)} ${TOP}V${other.frame.axisY}`);
      showTip(card, x, pointer);
      if (dragStart === null) return;
      card.selection.setAttribute("x", Math.min(dragStart, pixel));
      card.selection.setAttribute("y", TOP);
      card.selection.setAttribute("width", Math.abs(pixel - dragStart));
      card.selection.setAttribute("height", card.frame.axisY - TOP);
    });
    card.plot.addEventListener("pointerdown", (pointer) => {
      if (pointer.button !== 0) return;
      dragStart = findPointedPixel(card, pointer);
      card.plot.setPointerCapture(pointer.pointerId);
    });
    const endDrag = (pointer, doesZoom) => {
      if (dragStart === null) return;
      const start = dragStart, end = findPointedPixel(card, pointer);
      dragStart = null;
      card.selection.setAttribute("width", 0);
      if (!doesZoom || Math.abs(end - start) < 6) return;
      state.zoom = [card.frame.toValue(Math.min(start, end)), card.frame.toValue(Math.max(start, end))];
      requestRedraw();
    };
    card.plot.addEventListener("pointerup", (pointer) => endDrag(pointer, true));
    card.plot.addEventListener("pointercancel", (pointer) => endDrag(pointer, false));
    card.plot.addEventListener("pointerleave", hideTip);
    card.plot.addEventListener("dblclick", resetZoom);
  };

  // ---------------------------------------------------------------- controls

  const setPressed = (button, isPressed) => button.setAttribute("aria-pressed", String(isPressed));
  const addTool = (card, label, hint, onClick) => {
    const button = createElement("button", "", label);
    button.type = "button";
    button.title = hint;
    button.addEventListener("click", () => { onClick(button); requestRedraw(); });
    card.figure.querySelector(".tools").append(button);
    return button;
  };
  const countNonFinite = (line) => (line.m || []).reduce((total, [, , , , , count]) => total + count, 0);
  for (const card of cards) {
    const { panel } = card, numNonFinite = panel.lines.reduce((total, line) => total + countNonFinite(line), 0);
    if (numNonFinite) card.figure.querySelector(".tools").append(createElement("span", "", `${numNonFinite.toLocaleString("en-US")} not finite`));
    card.spikeTool = addTool(card, "", "show every value, or cut off those that would press the rest flat", () => { panel.showsSpikes = !panel.showsSpikes; });
    addTool(card, "log", "logarithmic values", (button) => { panel.isLog = !panel.isLog; setPressed(button, panel.isLog); });
    addPointerListeners(card);
  }
  const toggleHidden = (hidden, key, button) => {
    if (hidden.has(key)) hidden.delete(key); else hidden.add(key);
    setPressed(button, !hidden.has(key));
    requestRedraw();
  };
  for (const button of document.querySelectorAll("[data-run]")) button.addEventListener("click", () => toggleHidden(state.hiddenRuns, Number(button.dataset.run), button));
  for (const button of document.querySelectorAll("[data-kind]")) button.addEventListener("click", () => toggleHidden(state.hiddenKinds, button.dataset.kind, button));
  const axisButtons = [...document.querySelectorAll("[data-axis]")];
  for (const button of axisButtons) {
    button.addEventListener("click", () => {
      state.axis = button.dataset.axis;
      state.zoom = null;
      axisButtons.forEach((other) => setPressed(other, other === button));
      requestRedraw();
    });
  }
  const slider = document.getElementById("smoothing");
  state.smoothing = slider.value / 100;
  slider.addEventListener("input", () => {
    state.smoothing = slider.value / 100;
    document.getElementById("share").textContent = `${slider.value} %`;
    requestRedraw();
  });
  document.getElementById("unzoom").addEventListener("click", resetZoom);
  addEventListener("keydown", (event) => { if (event.key === "Escape") resetZoom(); });
  let lastWidth = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === lastWidth) return;
    lastWidth = document.body.clientWidth;
    requestRedraw();
  }).observe(document.body);
  cards.forEach(drawCard);
})();
