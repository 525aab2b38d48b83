// Line charts as SVG elements that need no style sheet: what is seen is what is saved.
const NS = "http://www.w3.org/2000/svg";
const FONT = "system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";
const DASHES = ["", "9 4", "2 4", "10 4 2 4"];
const MARGIN = { left: 62, right: 38, top: 12, bottom: 44 };

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function palette() {
  const style = getComputedStyle(document.documentElement);
  // Resolved by the browser: light-dark() is no colour that other programs know.
  const probe = document.body.appendChild(document.createElement("i"));
  const colour = (name) => {
    probe.style.color = style.getPropertyValue(name);
    return getComputedStyle(probe).color;
  };
  const names = ["surface", "text", "muted", "line", "a", "b", "c", "d"];
  const found = Object.fromEntries(names.map((name) => [name, colour(`--${name}`)]));
  probe.remove();
  return { ...found, series: [found.a, found.b, found.c, found.d] };
}

export function swatch(place, colours) {
  const line = { x1: 1, y1: 6, x2: 31, y2: 6, stroke: colours.series[place] };
  return svg("svg", { width: 32, height: 12, "aria-hidden": "true" },
    svg("line", { ...line, "stroke-width": 3, "stroke-dasharray": DASHES[place] }));
}

// A power of ten as it is written, and other numbers with as few digits as they need.
export function tick(value) {
  const exponent = Math.log10(value);
  if (value > 0 && Math.abs(exponent) > 3.5 && Math.abs(exponent - Math.round(exponent)) < 1e-9) {
    const raised = [...String(Math.round(exponent))].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
    return `10${raised.join("")}`;
  }
  return Number(value.toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 6 });
}

function ticks({ low, high, log }, most) {
  if (log) {
    const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
    const every = Math.max(1, Math.ceil((last - first + 1) / most));
    const exponents = [];
    for (let e = last; e >= first; e -= every) exponents.push(e);
    return exponents.map((e) => 10 ** e);
  }
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-9); i++) values.push(i * step);
  return values;
}

const part = (axis, value) => axis.log
  ? Math.log(value / axis.low) / Math.log(axis.high / axis.low)
  : (value - axis.low) / (axis.high - axis.low);

export function places(width, height) {
  const [w, h] = [width - MARGIN.left - MARGIN.right, height - MARGIN.top - MARGIN.bottom];
  return {
    w, h,
    x: (axis, value) => MARGIN.left + w * part(axis, value),
    y: (axis, value) => MARGIN.top + h * (1 - part(axis, value)),
    xPart: (pixel) => Math.min(1, Math.max(0, (pixel - MARGIN.left) / w)),
  };
}

// spec: x, y: {label, low, high, log}; lines: [{place, letter, points, faded, mark}].
export function chart(spec, width, height, colours) {
  const at = places(width, height);
  const root = svg("svg", {
    width, height, viewBox: `0 0 ${width} ${height}`, "font-family": FONT, "font-size": 12,
    role: "img", "aria-label": spec.title,
  });
  const write = (text, x, y, extra = {}) =>
    root.append(svg("text", { x, y, fill: colours.muted, ...extra }, text));
  const [bottom, right] = [MARGIN.top + at.h, MARGIN.left + at.w];
  for (const value of ticks(spec.y, Math.max(3, Math.floor(at.h / 38)))) {
    const y = at.y(spec.y, value);
    root.append(svg("line", { x1: MARGIN.left, x2: right, y1: y, y2: y, stroke: colours.line }));
    write(tick(value), MARGIN.left - 8, y + 4, { "text-anchor": "end" });
  }
  for (const value of ticks(spec.x, Math.max(3, Math.floor(at.w / 70)))) {
    const x = at.x(spec.x, value);
    root.append(svg("line", { x1: x, x2: x, y1: bottom, y2: bottom + 5, stroke: colours.muted }));
    write(tick(value), x, bottom + 19, { "text-anchor": "middle" });
  }
  root.append(svg("line", { x1: MARGIN.left, x2: right, y1: bottom, y2: bottom, stroke: colours.muted }));
  write(spec.x.label, MARGIN.left + at.w / 2, height - 6, { "text-anchor": "middle", fill: colours.text });
  write(spec.y.label, 0, 0, {
    "text-anchor": "middle", fill: colours.text,
    transform: `translate(13 ${MARGIN.top + at.h / 2}) rotate(-90)`,
  });
  const inside = (axis, value) => Math.min(axis.high, Math.max(axis.low, value));
  const letters = [];
  for (const { place, letter, points, faded, mark } of spec.lines) {
    const drawn = points.filter(([, y]) => Number.isFinite(y) && (!spec.y.log || y > 0));
    if (!drawn.length) continue;
    const path = drawn.map(([x, y]) =>
      `${at.x(spec.x, inside(spec.x, x)).toFixed(1)},${at.y(spec.y, inside(spec.y, y)).toFixed(1)}`);
    const colour = place < 0 ? colours.muted : colours.series[place];
    root.append(svg("polyline", {
      points: path.join(" "), fill: "none", stroke: colour, "stroke-width": place < 0 ? 1 : 2.2,
      "stroke-dasharray": place < 0 ? "1 3" : DASHES[place], "stroke-linejoin": "round",
      opacity: faded ? 0.2 : 1,
    }));
    if (faded) continue;
    if (mark) {
      const [x, y] = [at.x(spec.x, inside(spec.x, mark[0])), at.y(spec.y, inside(spec.y, mark[1]))];
      root.append(svg("circle", { cx: x, cy: y, r: 4.5, fill: colours.surface, stroke: colour, "stroke-width": 2.2 }));
    }
    const start = spec.letterAt === "start";
    let [x, y] = path.at(start ? 0 : -1).split(",").map(Number);
    [x, y] = start ? [x + 2, y - 11] : [x + 6, y + 4];
    // Lines that end at one place have their letters in a row.
    while (letters.some((other) => Math.hypot(other[0] - x, other[1] - y) < 11)) x += 11;
    letters.push([x, y]);
    write(letter, x, y, { fill: colour, "font-weight": 700 });
  }
  return root;
}

// All charts in one picture, below what the lines stand for.
export function picture(specs, legend, colours) {
  const [width, height, top] = [430, 330, 24 + 22 * legend.length];
  const total = [specs.length * width, top + height + 36];
  const root = svg("svg", {
    xmlns: NS, width: total[0], height: total[1], viewBox: `0 0 ${total.join(" ")}`,
    "font-family": FONT, "font-size": 13,
  }, svg("rect", { width: total[0], height: total[1], fill: colours.surface }));
  legend.forEach(({ place, text }, row) => {
    const line = swatch(place, colours);
    line.setAttribute("x", 20);
    line.setAttribute("y", 13 + 22 * row);
    root.append(line, svg("text", { x: 62, y: 24 + 22 * row, fill: colours.text }, text));
  });
  specs.forEach((spec, column) => {
    const drawn = chart(spec, width, height, colours);
    drawn.setAttribute("x", column * width);
    drawn.setAttribute("y", top + 36);
    root.append(drawn, svg("text", {
      x: column * width + MARGIN.left, y: top + 24, fill: colours.text, "font-weight": 600,
    }, spec.title));
  });
  return root;
}
