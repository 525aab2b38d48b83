// The page: up to four designs, their answers as they come, and nothing that is stale.
import { chart, palette, picture, places, swatch, tick } from "./chart.js";
import { element, fields, written } from "./form.js";

const SLOW = ["run", "levels", "curve", "attack", "noise"];
const MOST = 4;
const FACTS = {
  "advantage": "true positives minus false ones",
  "true positives at 0.001": "found, 1 in 1,000 accused falsely",
  "true positives at 0.01": "found, 1 in 100 accused falsely",
  "true positives at 0.1": "found, 1 in 10 accused falsely",
  "Gaussian mu": "mu of Gaussian DP",
};
const CAPTIONS = {
  run: "What has been spent after so many steps.",
  curve: "Every epsilon with its delta; the ring is the delta asked for.",
  attack: "The share of members that an attacker finds at most, by the share of others accused falsely; dotted: guessing.",
};
const $ = (id) => document.getElementById(id);
const page = { ...(await (await fetch("start")).json()), epsilon: 2 };
const designs = [];
const cursors = {};
let [chosen, waiting, pumping, targetTimer, dark] = [0, [], false, 0, false];

function add(name, request) {
  const design = { name, request, answers: {}, before: {}, abort: new AbortController(), timer: 0 };
  designs.push(design);
  choose(designs.length - 1);
  changed(design);
}

const letter = (design) => "ABCD"[designs.indexOf(design)];

// --- Asking: the number at once, the rest when the hand rests ---

const body = ({ request }, part) => JSON.stringify({ request, ...(part === "noise" && { epsilon: page.epsilon }) });

async function post(part, content, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch(`answer/${part}`, { method: "POST", headers, body: content, signal });
  if (!response.ok) throw new Error(await response.text());
  $("said").textContent = "";
  return response.json();
}

async function ask(design, part) {
  const asked = body(design, part);
  try {
    const answer = await post(part, asked, design.abort.signal);
    // Whatever else was changed meanwhile has asked anew.
    if (asked !== body(design, part) || !designs.includes(design)) return false;
    design.answers[part] = answer;
    if (part === "epsilon") $("spoken").textContent = `${letter(design)}: epsilon ${answer.text ?? "refused"}`;
  } catch (error) {
    if (error.name !== "AbortError") $("said").textContent = `No answer: ${error.message}. Is the program still running?`;
    return false;
  }
  show();
  return true;
}

function changed(design) {
  $("spoken").textContent = "";
  design.abort.abort();
  design.abort = new AbortController();
  Object.assign(design.before, design.answers);
  design.answers = {};
  waiting = waiting.filter((one) => one.design !== design);
  clearTimeout(design.timer);
  design.timer = setTimeout(async () => {
    if (!(await ask(design, "epsilon")) || design.answers.epsilon.error) return;
    design.timer = setTimeout(() => later(design, SLOW), 120);
  }, 25);
  show();
}

function later(design, parts) {
  waiting.push(...parts.map((part) => ({ design, part })));
  pump();
}

async function pump() {
  if (pumping) return;
  pumping = true;
  while (waiting.length) {
    const first = Math.max(0, waiting.findIndex(({ design }) => design === designs[chosen]));
    const [{ design, part }] = waiting.splice(first, 1);
    await ask(design, part);
  }
  pumping = false;
}

function newTarget() {
  for (const design of designs) delete design.answers.noise;
  waiting = waiting.filter(({ part }) => part !== "noise");
  clearTimeout(targetTimer);
  targetTimer = setTimeout(() => {
    for (const design of designs) if (design.answers.run) later(design, ["noise"]);
  }, 150);
  show();
}

// --- Showing ---

function choose(place) {
  chosen = place;
  shape();
}

// The tabs and the fields, where they are others than before.
function shape() {
  const open = [...$("form").querySelectorAll("details")].map((details) => details.open);
  const focused = document.activeElement?.id;
  const design = designs[chosen];
  const name = element("input", { id: "name", value: design.name, oninput: (event) => { design.name = event.target.value; show(); } });
  const remove = element("button", { type: "button", onclick: () => {
    design.abort.abort();
    clearTimeout(design.timer);
    waiting = waiting.filter((one) => one.design !== design);
    designs.splice(chosen, 1);
    choose(Math.min(chosen, designs.length - 1));
  } }, `Remove design ${letter(design)}`);
  $("form").setAttribute("aria-labelledby", `tab-${chosen}`);
  $("form").replaceChildren(
    element("div", { class: "field name" }, element("label", { for: "name" }, `Design ${letter(design)}`), name),
    ...fields(design.request, page, {
      onChange: () => changed(design),
      onShape: () => { shape(); changed(design); },
      onDelta: () => designs.forEach((one) => { one.request.delta = design.request.delta; changed(one); }),
      onTarget: newTarget,
    }),
    ...(designs.length > 1 ? [remove] : []));
  [...$("form").querySelectorAll("details")].forEach((details, at) => { details.open = Boolean(open[at]); });
  $("designs").replaceChildren(...designs.map((_, place) => element("button", {
    type: "button", role: "tab", id: `tab-${place}`, class: `series-${place}`, "aria-controls": "form",
    "aria-selected": String(place === chosen), tabindex: place === chosen ? 0 : -1, onclick: () => choose(place),
    onkeydown: ({ key }) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
      if (!step) return;
      choose((place + step + designs.length) % designs.length);
      $(`tab-${chosen}`).focus();
    },
  })));
  $("add").hidden = designs.length >= MOST;
  if (focused) $(focused)?.focus();
  show();
}

const text = (design, part, render) => {
  const answer = design.answers[part];
  if (design.answers.epsilon?.error || answer?.error) return "–";
  return answer ? render(answer) : "…";
};

function showTabs(colours) {
  designs.forEach((design, place) => {
    const answer = design.answers.epsilon;
    const { step, num_steps } = design.request;
    const tab = $(`tab-${place}`);
    tab.setAttribute("aria-busy", String(!answer));
    tab.dataset.epsilon = answer?.epsilon ?? "";
    tab.replaceChildren(
      element("span", { class: "who" }, swatch(place, colours), ` ${letter(design)} `, element("span", {}, design.name)),
      element("span", { class: "epsilon" }, element("small", {}, "ε "), answer?.error ? "refused" : answer?.text ?? "…",
        element("small", { class: "nature" }, ` ${answer?.nature ?? ""}`)),
      element("span", { class: "what" }, `one ${step.privacy_unit}, noise ${step.noise_multiplier}, ${num_steps} steps`));
  });
}

function showError() {
  for (const place of $("form").querySelectorAll(".error")) place.textContent = "";
  for (const invalid of $("form").querySelectorAll("[aria-invalid]")) invalid.removeAttribute("aria-invalid");
  const { epsilon, noise } = designs[chosen].answers;
  const error = epsilon?.error ?? (noise?.error?.message.startsWith("epsilon") && { ...noise.error, place: "epsilon" });
  if (!error) return;
  const around = (place) => error.place === place || [".", "["].includes(error.place[place.length]) && error.place.startsWith(place);
  const found = [...$("form").querySelectorAll("[data-place]")].filter(({ dataset }) => dataset.place && around(dataset.place))
    .sort((a, b) => b.dataset.place.length - a.dataset.place.length)[0];
  const home = found ?? $("form").querySelector('[data-place=""]');
  // Labels in place of keys, which nobody sees on the page.
  const labels = Object.fromEntries([...$("form").querySelectorAll(".field[data-place]")].reverse()
    .map((field) => [field.dataset.place.split(/[.\]]/).at(-1), field.querySelector("label").textContent]));
  if (home.matches(".field")) labels[home.dataset.place.split(/[.\]]/).at(-1)] = home.querySelector("label").textContent;
  const message = error.message.replace(/^\w+(?= must )|\w+(?==)|\w+_\w+/g, (key) => labels[key] ?? key);
  (home.matches(".error") ? home : home.querySelector(".error")).textContent = message;
  if (home.matches(".field")) home.querySelector("input, select").setAttribute("aria-invalid", "true");
}

function lines(part, points, mark) {
  return designs.flatMap((design, place) => {
    if (design.answers.epsilon?.error) return [];
    const answer = design.answers[part] ?? design.before[part];
    if (!answer || answer.error) return [];
    return [{ place, letter: letter(design), points: points(answer), faded: !design.answers[part], mark: mark?.(design) }];
  });
}

const zip = (a, b) => a.map((x, at) => [Number(x === "inf" ? Infinity : x), Number(b[at] === "inf" ? Infinity : b[at])]);
// 1 where nothing is drawn, or all of it is 0.
const largest = (all, which) => Math.max(0, ...all.flatMap(({ points }) => points.map((p) => p[which])).filter(Number.isFinite)) || 1;

function specs() {
  const delta = designs[chosen].request.delta;
  const run = lines("run", (a) => zip(a.num_steps, a.epsilon));
  const curve = lines("curve", (a) => zip(a.epsilon, a.delta),
    ({ answers, request }) => answers.epsilon && [answers.epsilon.epsilon, request.delta]);
  const attack = lines("attack", (a) => zip(a.false_positive_rate, a.true_positive_rate));
  const rate = (label) => ({ label, low: 1e-6, high: 1, log: true });
  const guess = { place: -1, letter: "", points: [[1e-6, 1e-6], [1, 1]] };
  return {
    run: { title: "Epsilon along the run", lines: run, rises: true,
      x: { label: "steps", low: 0, high: largest(run, 0) },
      y: { label: `epsilon at delta ${written(delta)}`, low: 0, high: largest(run, 1) * 1.05 } },
    curve: { title: "Privacy curve", lines: curve,
      x: { label: "epsilon", low: 0, high: largest(curve, 0) }, y: { label: "delta", low: 1e-12, high: 1, log: true } },
    attack: { title: "Membership attack", lines: [guess, ...attack], letterAt: "start", rises: true,
      x: rate("false positive rate"), y: rate("true positive rate, at most") },
  };
}

// The library's message without what its row says already.
const reason = (message) => message.replace(/^privacy_unit='\w+' with \w+: |; covered: .*$/g, "");

// A bound stays one: three digits, rounded up.
function up(value) {
  if (value === 0 || !Number.isFinite(value)) return String(value);
  const unit = 10 ** (Math.floor(Math.log10(value)) - 2);
  return tick(Math.ceil(value / unit - 1e-9) * unit);
}

function showChart(name, spec, colours) {
  const home = $(name).querySelector("div");
  const width = Math.max(260, home.clientWidth);
  const height = Math.round(Math.min(340, Math.max(230, width * 0.68)));
  const drawn = chart(spec, width, height, colours);
  home.replaceChildren(drawn);
  const pending = designs.some((d) => !d.answers[name] && !d.answers.epsilon?.error);
  $(name).setAttribute("aria-busy", String(pending));
  const caption = $(name).querySelector("figcaption");
  caption.textContent = CAPTIONS[name];
  if (cursors[name] === undefined) return;
  const { x } = spec;
  const raw = x.log ? x.low * (x.high / x.low) ** cursors[name] : x.low + (x.high - x.low) * cursors[name];
  // What is said to be read is what is read.
  const value = Math.min(x.high, Number(raw.toPrecision(3)));
  const at = places(width, height).x(x, value);
  drawn.append(Object.assign(drawn.firstChild.cloneNode(), {}));
  for (const [key, set] of Object.entries({ x1: at, x2: at, y1: 12, y2: height - 44, stroke: colours.muted })) drawn.lastChild.setAttribute(key, set);
  const read = spec.lines.filter((line) => line.letter && !line.faded).map(({ letter: of, points }) => {
    // The point of the line on the side where the bound is larger.
    const point = spec.rises ? points.find((p) => p[0] >= value * (1 - 1e-9)) : points.findLast((p) => p[0] <= value * (1 + 1e-9));
    return `${of} ${point ? up(point[1]) : "–"}`;
  });
  caption.textContent = `At ${x.label} ${tick(value)}, at most: ${read.join(", ")}`;
}

function table(name, head, rows) {
  const cells = (tag, row, scope) => row.map((cell, at) => element(at ? tag : "th", { scope: at && tag === "td" ? undefined : scope }, cell));
  $(name).querySelector("div").replaceChildren(element("table", {},
    element("thead", {}, element("tr", {}, ...cells("th", head, "col"))),
    element("tbody", {}, ...rows.map((row) => row instanceof Node ? row : element("tr", {}, ...cells("td", row, "row"))))));
}

function showTables(colours) {
  const heads = () => designs.map((design, place) => element("span", { class: "who" }, letter(design), " ", swatch(place, colours)));
  table("facts", ["at most", ...heads()], Object.entries(FACTS).map(([key, label]) =>
    [label, ...designs.map((d) => text(d, "attack", (a) => a.facts[key].replace("at most ", "").replace(/ \(.*/, "")))]));
  const targets = [...new Set([1, 2, 4, 8, Number(page.epsilon)])].filter((t) => t > 0 && Number.isFinite(t)).sort((a, b) => a - b);
  table("noise", ["for epsilon", ...heads()], targets.map((target) => [tick(target), ...designs.map((design) =>
    text(design, "noise", ({ targets: known, texts }) => texts[known.indexOf(target)] ?? "…"))]));
  table("levels", ["", "protected", "exact", "certified between"], designs.flatMap((design) => {
    const rows = design.answers.levels?.levels ?? [{ level: design.request.step.privacy_unit, pending: true }];
    return rows.map((row, at) => {
      const message = row.message && element("td", { colspan: row.text ? 1 : 2, class: "message" }, reason(row.message));
      const known = (value) => element("td", {}, text(design, row.pending ? "levels" : "epsilon", () => value));
      return element("tr", { class: row.level === design.request.step.privacy_unit ? "now" : "", "data-level": row.level,
        "data-epsilon": row.epsilon, "data-lower": row.lower, "data-upper": row.upper },
      element("th", { scope: "row" }, at ? "" : letter(design)), element("td", {}, row.level),
      ...(row.text || !message ? [known(row.text ?? "…")] : []), message || known(row.ends ?? "…"));
    });
  }));
}

function show() {
  const colours = palette();
  showTabs(colours);
  showError();
  for (const [name, spec] of Object.entries(specs())) showChart(name, spec, colours);
  showTables(colours);
  const title = (part) => $(part).querySelector("h2").textContent;
  const said = designs.flatMap((design) => [
    ...(design.answers.epsilon?.remarks ?? []),
    ...SLOW.flatMap((part) => design.answers[part]?.error ? [`${title(part)}: ${design.answers[part].error.message}`] : []),
  ].map((remark) => element("li", {}, `${letter(design)}: ${remark}`)));
  $("remarks").replaceChildren(...said);
  const whole = designs.every(({ answers }) => answers.epsilon?.error || SLOW.every((part) => answers[part]));
  for (const id of ["save-svg", "save-png"]) $(id).disabled = !whole;
  $("save-toml").disabled = !designs[chosen].answers.epsilon || Boolean(designs[chosen].answers.epsilon.error);
  document.body.dataset.settled = String(whole);
}

// --- Saving ---

function save(name, content, type) {
  const link = element("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function drawn() {
  const legend = designs.flatMap((design, place) => design.answers.epsilon?.error ? [] : [{
    place, text: `${letter(design)}  ${design.name}: epsilon ${design.answers.epsilon.text} at delta ${written(design.request.delta)}, `
      + `one ${design.request.step.privacy_unit} (${design.request.step.neighboring_relation}), noise ${design.request.step.noise_multiplier}, ${design.request.num_steps} steps`,
  }]);
  return picture(Object.values(specs()), legend, palette());
}

$("save-svg").onclick = () => save("privacy.svg", new XMLSerializer().serializeToString(drawn()), "image/svg+xml");
$("save-png").onclick = async () => {
  const made = drawn();
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(made)], { type: "image/svg+xml" }));
  await image.decode();
  const canvas = element("canvas", { width: 2 * image.width, height: 2 * image.height });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  canvas.toBlob((blob) => save("privacy.png", blob, "image/png"));
};
$("save-toml").onclick = async () => {
  const answer = await post("toml", body(designs[chosen]));
  if (answer.toml) save(`${designs[chosen].name.replace(/[^\w.-]+/g, "_") || "request"}.toml`, answer.toml, "application/toml");
};

// --- Around the charts ---

$("add").onclick = () => {
  const { name, request } = designs[chosen];
  add(`${name.replace(/ \d+$/, "")} ${designs.length + 1}`, structuredClone(request));
};
function paint(isDark) {
  [dark, document.documentElement.style.colorScheme] = [isDark, isDark ? "dark" : "light"];
  $("theme").textContent = isDark ? "Light" : "Dark";
  if (designs.length) show();
}
$("theme").onclick = () => paint(!dark);
for (const name of Object.keys(CAPTIONS)) {
  const home = $(name).querySelector("div");
  const move = (part) => { cursors[name] = part; show(); };
  Object.assign(home, { tabIndex: 0 });
  home.setAttribute("role", "group");
  home.setAttribute("aria-label", `${CAPTIONS[name]} The arrow keys read values.`);
  $(name).querySelector("figcaption").setAttribute("aria-live", "polite");
  home.onpointermove = (event) => move(places(home.clientWidth, 1).xPart(event.clientX - home.getBoundingClientRect().left));
  home.onpointerleave = () => move(undefined);
  home.onblur = () => move(undefined);
  home.onkeydown = (event) => {
    const step = { ArrowRight: 0.02, ArrowLeft: -0.02, Home: -1, End: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    move(Math.min(1, Math.max(0, (cursors[name] ?? 0.5) + step)));
  };
}
const night = matchMedia("(prefers-color-scheme: dark)");
night.addEventListener("change", () => paint(night.matches));
paint(night.matches);
addEventListener("resize", show);
add(page.name, page.request);
