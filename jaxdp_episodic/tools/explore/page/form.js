// The settings of one design as fields: every field is a key of its request.
const RANGES = { // of the sliders; the boxes take whatever the library does
  noise_multiplier: [0.1, 100], num_steps: [1, 1e6, true], sampling_probability: [1e-4, 1],
  size: [1, 1000, true], population: [1, 1e5, true], num_classes: [2, 1e5, true],
  ways: [1, 100, true], num_episodes: [1, 1e4, true], steps_per_epoch: [1, 1e4, true],
  times: [1, 100, true], num_people: [1, 1e6, true], people_per_block: [1, 1e4, true],
  episodes_per_block: [1, 100, true], examples: [1, 1000, true], classes: [1, 1e4, true], tasks: [1, 1e4, true], delta: [1e-12, 1e-2], epsilon: [0.1, 20],
};
const DESIGNS = {
  MultistageSampling: "units within units",
  GroupedClasses: "N-way episodes",
  IndependentEpisodes: "independent episodes",
  PeopleBlocks: "blocks of people",
};
const PERSON = "person";
const BOUNDS = { // of one person, from the last level upwards
  examples: "most examples of a person in one class", classes: "most classes with a person's examples",
  tasks: "most tasks with a person's examples",
};
const SCHEMES = {
  Poisson: "Poisson sampling", WithoutReplacement: "a fixed number",
  RandomAllocation: "epochs, at random steps", ShuffledEpochs: "epochs, shuffled",
};
const FRESH = ["Poisson", "WithoutReplacement"];
const METHODS = { exact: "exact", pld: "certified upper bound", rdp: "Rényi upper bound" };
const RELATIONS = {
  add_remove: "is added or removed", replace_one: "gets other content", zero_out: "slot is emptied or filled",
};
const STEPS = 1000;

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

const keys = (path) => path.match(/[^.[\]]+/g);
export const get = (table, path) => keys(path).reduce((found, key) => found?.[key], table);

function set(table, path, value) {
  const parts = keys(path);
  const parent = parts.slice(0, -1).reduce((found, key) => found[key], table);
  if (value === undefined) delete parent[parts.at(-1)];
  else parent[parts.at(-1)] = value;
}

export function levelNames({ sampling }) {
  if (sampling.type === "GroupedClasses") return ["episode", "class", "example"];
  const inner = sampling.type === "MultistageSampling" ? sampling : sampling.sampling;
  const names = inner?.levels.map((level) => level.name) ?? [];
  return inner === sampling ? names : ["episode", ...names];
}

// The bounds of a person that a design needs.
export function boundsOf({ sampling }) {
  const levels = levelNames({ sampling }).length - (sampling.type === "MultistageSampling" ? 0 : 1);
  return Object.keys(BOUNDS).slice(0, levels);
}

// Small and large numbers as one would type them.
export const written = (value) =>
  typeof value === "number" && value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential() : String(value ?? "");

// onChange() after an edit; onShape() after one that needs other fields; onDelta() and
// onTarget() after one that concerns all designs.
export function fields(request, page, { onChange, onShape, onDelta, onTarget }) {
  const { step } = request;
  let ids = 0;

  function field(place, label, ...controls) {
    const id = `field-${ids++}`;
    controls[0].id = id;
    controls[0].setAttribute("aria-describedby", `${id}-error`);
    return element("div", { class: controls[0].matches("select") ? "field wide" : "field", "data-place": place },
      element("label", { for: id }, label), ...controls,
      element("p", { class: "error", id: `${id}-error` }));
  }

  function number(place, label, { optional = false, table = request, then = onChange } = {}) {
    const [low, high, whole] = RANGES[keys(place).at(-1)];
    const box = element("input", { inputmode: "decimal", value: written(get(table, place)) });
    const slider = element("input", { type: "range", min: 0, max: STEPS, "aria-label": `${label}, slider` });
    const slide = () => {
      const value = Number(box.value) || low;
      slider.value = STEPS * Math.log(value / low) / Math.log(high / low);
      slider.setAttribute("aria-valuetext", box.value);
    };
    box.addEventListener("input", () => {
      const text = box.value.trim();
      const value = text === "" ? (optional ? undefined : NaN) : Number(text);
      // What JSON cannot hold, such as 1e400, is refused as it was typed.
      set(table, place, Number.isFinite(value) || value === undefined ? value : text);
      slide();
      then();
    });
    slider.addEventListener("input", () => {
      const value = Number((low * (high / low) ** (slider.value / STEPS)).toPrecision(3));
      set(table, place, whole ? Math.round(value) : value);
      box.value = written(get(table, place));
      slider.setAttribute("aria-valuetext", box.value);
      then();
    });
    slide();
    return field(place, label, box, ...(optional ? [] : [slider]));
  }

  function choice(place, label, options, { change = null } = {}) {
    const chosen = get(request, place) ?? "";
    const made = Object.entries(options).map(([value, text]) =>
      element("option", { value, selected: value === chosen }, text));
    return field(place, label, element("select", {
      onchange: (event) => {
        if (change) change(event.target.value);
        else set(request, place, event.target.value || undefined);
        if (change) onShape();
        else onChange();
      },
    }, ...made));
  }

  function text(place, label, value, change) {
    return field(place, label, element("input", { value, onchange: (event) => change(event.target.value) }));
  }

  function button(label, act) {
    return element("button", { type: "button", onclick: () => { act(); onShape(); } }, label);
  }

  function group(title, place, ...children) {
    return element("fieldset", { "data-place": place },
      element("legend", {}, title), element("p", { class: "error" }), ...children.filter(Boolean));
  }

  const more = (...children) => element("details", {}, element("summary", {}, "More"), ...children);

  // One level: how its units are drawn of each unit above.
  function scheme(place, title, types, { sized = true, named = null, extra = [] } = {}) {
    const { type, name } = get(request, place);
    const part = (key, label, options) => number(`${place}.${key}`, label, options);
    const switchTo = (other) => {
      const made = { ...structuredClone(page.schemes[other]), name };
      delete made.version;
      if (!sized || step.population) {
        delete made.population;
        delete made.population_is_exact;
      }
      set(request, place, made);
    };
    const inside = {
      Poisson: () => [
        part("sampling_probability", `probability of each ${name}`),
        sized && more(part("population", `most units of this level in a group, if bounded`, { optional: true })),
      ],
      WithoutReplacement: () => [
        part("size", `number drawn (${name})`),
        sized && part("population", `out of how many`, { optional: Boolean(step.population) }),
        sized && more(exactly(`${place}.population_is_exact`)),
      ],
      RandomAllocation: () => [
        part("steps_per_epoch", "steps in an epoch"), part("times", "steps of each unit in an epoch"),
      ],
      ShuffledEpochs: () => [part("steps_per_epoch", "steps in an epoch")],
    }[type]().filter(Boolean);
    const options = Object.fromEntries(types.map((other) => [other, SCHEMES[other]]));
    return group(title, place, named && text(`${place}.name`, "called", name, named),
      types.length > 1 && choice(`${place}.type`, "drawn", options, { change: switchTo }), ...inside, ...extra);
  }

  function exactly(place) {
    const box = element("input", {
      type: "checkbox", checked: Boolean(get(request, place)),
      onchange: (event) => { set(request, place, event.target.checked); onChange(); },
    });
    return field(place, "this is the exact number in every group", box);
  }

  function levels(place, first) {
    const list = get(request, place);
    const rename = (at) => (name) => {
      for (const unit of ["privacy_unit", "clip_unit"]) if (step[unit] === list[at].name) step[unit] = name;
      list[at].name = name;
      onShape();
    };
    const remove = (at) => {
      const [gone] = list.splice(at, 1);
      protect(step.privacy_unit);
      for (const unit of ["privacy_unit", "clip_unit"]) {
        if (step[unit] === gone.name) step[unit] = unit === "clip_unit" ? list[0].name : list.at(-1).name;
      }
    };
    const add = () => {
      const names = ["task", "class", "example", "unit"].filter((name) => !levelNames(step).includes(name));
      list.push({ ...structuredClone(page.schemes.WithoutReplacement), name: names[0] ?? `level ${list.length + 1}` });
      delete list.at(-1).version;
      protect(step.privacy_unit === PERSON ? PERSON : list.at(-1).name);
    };
    const made = list.map(({ name }, at) => scheme(`${place}[${at}]`, `Level ${at + 1}: ${name}`, at ? FRESH : first, {
      named: rename(at), extra: list.length > 1 ? [button("Remove this level", () => remove(at))] : [],
    }));
    return [...made, button("Add a level below", add)];
  }

  function drawn() {
    const { sampling } = step;
    const at = "step.sampling";
    if (sampling.type === "MultistageSampling") return levels(`${at}.levels`, Object.keys(SCHEMES));
    if (sampling.type === "IndependentEpisodes") {
      return [number(`${at}.num_episodes`, "episodes in a step"), ...levels(`${at}.sampling.levels`, FRESH)];
    }
    if (sampling.type === "PeopleBlocks") {
      return [number(`${at}.num_people`, "people in all"), number(`${at}.people_per_block`, "people in a block"),
        more(number(`${at}.episodes_per_block`, "episodes of a block")),
        scheme(`${at}.episodes`, "Episodes of all blocks", Object.keys(SCHEMES), { sized: false })];
    }
    const by = sampling.episodes ? "episodes" : "classes";
    const sizes = [number(`${at}.num_classes`, "classes in the pool"), number(`${at}.ways`, "ways: classes in an episode")];
    const other = () => {
      const made = sampling.episodes ? "classes" : "episodes";
      delete sampling[by];
      sampling[made] = { type: "Poisson", name: made === "classes" ? "class" : "episode", sampling_probability: 0.2 };
    };
    const units = { episodes: "episodes", classes: "classes, then grouped" };
    const which = element("select", { onchange: () => { other(); onShape(); } },
      ...Object.entries(units).map(([value, label]) => element("option", { value, selected: value === by }, label)));
    const schemes = by === "episodes" ? Object.keys(SCHEMES) : FRESH;
    return [...sizes, field(`${at}.drawn`, "what is drawn", which),
      scheme(`${at}.${by}`, by === "episodes" ? "Episodes" : "Classes", schemes, { sized: false }),
      scheme(`${at}.examples`, "Examples of each class", ["WithoutReplacement"])];
  }

  // A person is bounded by as many numbers as the design has levels.
  function protect(unit) {
    step.privacy_unit = unit;
    const bounds = unit === PERSON ? boundsOf(step) : [];
    const known = { ...page.people, ...step.people };
    if (bounds.length) step.people = { type: "PersonBounds", ...Object.fromEntries(bounds.map((name) => [name, known[name]])) };
    else delete step.people;
  }

  const inBlocks = step.sampling.type === "PeopleBlocks";
  const owned = inBlocks ? [] : levelNames(step).map((name) => [name, `one ${name}`]);
  const units = Object.fromEntries([...owned, [PERSON, "one person"]]);
  const clips = Object.fromEntries(levelNames(step).map((name) => [name, `each ${name}`]));
  const tree = step.population?.children_counts.map((counts, level) =>
    `${step.population.level_names[level] ?? `level ${level + 1}`}: ${counts.reduce((sum, n) => sum + n, 0).toLocaleString("en")}`);
  const change = (kind) => {
    const { noise_multiplier, neighboring_relation } = step;
    request.step = { ...structuredClone(page.examples[kind]), noise_multiplier, neighboring_relation };
    delete request.step.version;
    delete request.step.small_units;
  };
  return [
    element("p", { class: "error", "data-place": "" }),
    group("Noise and length", "request",
      number("step.noise_multiplier", "noise, in clip norms"),
      number("num_steps", "steps"),
      choice("method", "epsilon is", METHODS)),
    group("Who is protected", "step",
      choice("step.privacy_unit", "protected", units, { change: protect }),
      ...Object.keys(BOUNDS).filter((name) => step.people?.[name] != null).map((name) => number(`step.people.${name}`, BOUNDS[name])),
      choice("step.neighboring_relation", "which", RELATIONS, {
        change: (relation) => { step.neighboring_relation = relation; delete step.small_units; },
      }),
      choice("step.clip_unit", "clipped", { ...clips, step: "the whole step" }),
      more(choice("step.small_units", "units with fewer than are drawn",
        { "": "as the relation has it", keep: "give all they have", error: "are an error" }))),
    group("What a step draws", "step.sampling",
      choice("step.sampling.type", "design", DESIGNS, { change }),
      tree && element("p", { class: "note" }, `Real sizes, from the file: ${tree.join(", ")}. The worst path counts.`),
      ...drawn()),
    group("For all designs", "all",
      number("delta", "delta", { then: onDelta }),
      number("epsilon", "target epsilon, to find the noise", { table: page, then: onTarget })),
  ];
}
