// The page: controls, what is shown, and the address that has the question in it. The formulas are in plan.js.

"use strict";

const STEPS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024];
const MORE = [...STEPS, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384];
const GIB = 2 ** 30;
const MOST = { seq: 1e8, batch: 1e7, other: 1e6 }; // of a link: what `mmm plan` takes
const MEMORY_COLORS = { ...PLANNER_DATA.colors.memory, buffers: PLANNER_DATA.colors.memory.other };
const AXIS_COLORS = { ...PLANNER_DATA.colors.axes, dp_shard_cp: PLANNER_DATA.colors.axes.dp_shard };

// key: of a question. values: to choose from. where: whether it has a meaning, else `otherwise` is its value. A slider
// goes over its values by their places, and takes one more from a link.
const CONTROLS = [
  { key: "model", label: "Model", start: "llama-8b", values: () => Object.keys(PLANNER_DATA.models) },
  { key: "machine", label: "Machine", start: "perlmutter", values: () => Object.keys(PLANNER_DATA.machines) },
  { key: "hosts", label: "Hosts", start: 16, values: (q) => MORE.filter((n) => n <= machineOf(q).hosts) },
  {
    key: "devices",
    label: "Devices a host",
    start: 4,
    values: (q) => STEPS.filter((n) => n <= machineOf(q).ranks_per_host),
  },
  { key: "tp", label: "tp, tensor parallel", start: 4, values: () => STEPS.filter((n) => n <= 64) },
  { key: "cp", label: "cp, context parallel", start: 1, values: () => STEPS.filter((n) => n <= 64) },
  {
    key: "cp_style",
    label: "cp by",
    start: "ring",
    values: () => ["ring", "ulysses"],
    where: (q) => q.cp > 1,
    otherwise: () => "ring",
  },
  { key: "pp", label: "pp, pipeline", start: 1, values: () => STEPS.filter((n) => n <= 64) },
  {
    key: "schedule",
    label: "Schedule",
    start: "1F1B",
    values: () => Object.keys(SCHEDULES),
    where: (q) => q.pp > 1,
    otherwise: () => "1F1B",
  },
  {
    key: "stages",
    label: "Stages a rank",
    start: 2,
    values: () => [2, 3, 4],
    where: (q) => q.pp > 1 && SCHEDULES[q.schedule].most > SCHEDULES[q.schedule].least,
    otherwise: (q) => SCHEDULES[q.schedule].least,
  },
  { key: "ep", label: "ep, expert parallel", start: 1, values: () => [1, 2, 4, 8] },
  {
    key: "parallel",
    label: "Data parallel",
    start: "fsdp",
    values: () => ["ddp", "zero1", "zero2", "fsdp", "hsdp"],
    names: { zero1: "ZeRO-1", zero2: "ZeRO-2", fsdp: "FSDP (ZeRO-3)", ddp: "DDP", hsdp: "HSDP" },
  },
  {
    key: "dp_replicate",
    label: "Replicas",
    start: 2,
    values: () => STEPS,
    where: (q) => q.parallel === "hsdp",
    otherwise: () => 1,
  },
  { key: "seq", label: "Sequence length", start: 8192, values: () => [...Array(12).keys()].map((n) => 128 << n) },
  { key: "batch", label: "Global batch", start: 64, values: () => MORE },
  { key: "microbatches", label: "Micro-batches a step", start: 4, values: () => STEPS },
  {
    key: "checkpointing",
    label: "Activation checkpointing",
    start: "none",
    values: () => ["none", "selective", "full"],
  },
];

const machineOf = (question) => PLANNER_DATA.machines[question.machine];
const isNumber = (control) => typeof control.start === "number";
const wanted = Object.fromEntries(CONTROLS.map(({ key, start }) => [key, start])); // as it was moved, or linked to

let moved = ""; // the key of the control that was moved last

// What was asked for, where each control has a meaning.
function questionOf() {
  const question = { ...wanted };
  for (const { key, values, where, otherwise } of CONTROLS) {
    if (where && !where(question)) question[key] = otherwise(question);
    if (key === "hosts") question.hosts = Math.min(question.hosts, machineOf(question).hosts);
    if (key === "devices") question.devices = Math.min(question.devices, machineOf(question).ranks_per_host);
  }
  return question;
}

// ---- the address

function readAddress() {
  read(location.hash.slice(1));
}

function read(address) {
  const named = new URLSearchParams(address);
  for (const [key, text] of named) {
    const control = CONTROLS.find((each) => each.key === key);
    if (!control) continue;
    const value = isNumber(control) ? Number(text) : text;
    const whole = isNumber(control) && Number.isInteger(value) && value > 0 && value <= (MOST[key] ?? MOST.other);
    if (isNumber(control) ? whole : control.values(wanted).includes(value)) wanted[key] = value;
  }
  if (named.has("machine") && !named.has("devices")) wanted.devices = machineOf(wanted).ranks_per_host;
}

function addressOf(question) {
  const shown = CONTROLS.filter(({ where }) => !where || where(question));
  return "#" + new URLSearchParams(shown.map(({ key }) => [key, question[key]]));
}

// ---- the lines to copy

function commandOf(q) {
  const words = [`mmm plan --exactly ${PLANNER_DATA.models[q.model].command} --site ${q.machine} --nhosts ${q.hosts}`];
  if (q.devices !== machineOf(q).ranks_per_host) words.push(`--gpus-per-host ${q.devices}`);
  words.push(`--seq-length ${q.seq} --global-batch ${q.batch}`);
  for (const axis of ["pp", "cp", "tp", "ep", "dp_replicate"]) if (q[axis] > 1) words.push(`--${axis.replace("_", "-")} ${q[axis]}`);
  if (q.parallel !== "fsdp") words.push(`--parallel ${q.parallel}`);
  if (q.pp > 1) words.push(`--schedule ${q.schedule} --stages-per-rank ${q.stages}`);
  if (q.cp > 1) words.push(`--cp-style ${q.cp_style}`);
  if (q.checkpointing !== "none") words.push(`--activation-checkpointing ${q.checkpointing}`);
  if (q.microbatches > 1 || q.pp > 1) words.push(`--microbatches ${q.microbatches}`);
  return words.join(" ");
}

// As src/mmm_lab/planner/script.py has it.
function launchLine(q, plan) {
  const words = [`launch -n ${plan.ranks}`];
  if (q.hosts > 1) words.push(`-ppn ${q.devices}`);
  if (q.hosts > 1 && !machineOf(q).scheduler) words.push("--hosts HOSTS");
  words.push(`python3 -m mmm.trainer.lm ${PLANNER_DATA.models[q.model].flags} --seq_length ${q.seq}`);
  words.push(`--global_batch_size ${q.batch} --dtype bf16 --parallel ${q.parallel}`);
  for (const axis of ["pp", "cp", "tp", "ep", "dp_replicate"]) if (q[axis] > 1) words.push(`--${axis} ${q[axis]}`);
  if (q.pp > 1) words.push(`--schedule ${q.schedule} --stages_per_rank ${q.stages}`);
  if (q.cp > 1) words.push(`--cp_style ${q.cp_style}`);
  if (q.checkpointing !== "none") words.push(`--activation_checkpointing ${q.checkpointing}`);
  if (q.microbatches > 1 || q.pp > 1) words.push(`--microbatches ${q.microbatches}`);
  words.push(`--loss_chunks ${plan.lossChunks} --dataset random --max_iters 20`);
  return words.join(" ");
}

// ---- controls

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function choicesOf(control, question) {
  const values = control.values(question);
  if (!isNumber(control) || values.includes(question[control.key])) return values;
  return [...values, question[control.key]].sort((a, b) => a - b);
}

function makeControl(control, changed) {
  const id = `planner-${control.key}`;
  const label = element("label", { for: id }, control.label);
  if (!isNumber(control)) {
    const input = element("select", { id });
    input.addEventListener("change", () => changed(control.key, input.value));
    return element("div", { class: "control", id: `${id}-row` }, label, input);
  }
  const input = element("input", { id, type: "range", min: 0, step: 1 });
  input.addEventListener("input", () => changed(control.key, Number(input.dataset.values.split(" ")[input.value])));
  const output = element("output", { for: id, "aria-live": "off" }); // the slider says it itself
  return element("div", { class: "control", id: `${id}-row` }, label, input, output);
}

function showControl(control, question) {
  const row = document.getElementById(`planner-${control.key}-row`), values = choicesOf(control, question);
  const input = row.querySelector("input, select"), value = question[control.key];
  row.hidden = Boolean(control.where && !control.where(question));
  if (!isNumber(control)) {
    if (!input.options.length) input.append(...values.map((each) => new Option(control.names?.[each] ?? each, each)));
    input.value = value;
    return;
  }
  input.dataset.values = values.join(" ");
  input.max = values.length - 1;
  input.value = values.indexOf(value);
  input.setAttribute("aria-valuetext", value.toLocaleString("en-US"));
  row.querySelector("output").textContent = value.toLocaleString("en-US");
}

// ---- what is shown

const rounded = (number) => number.toLocaleString("en-US", { maximumSignificantDigits: 3 });
const gib = (bytes) => `${rounded(bytes / GIB)} GiB`;
const gigabytes = (bytes) => `${rounded(bytes / 1e9)} GB`;

// One bar of parts: [name, size, colour, striped]; whole: the size of its full width.
function bar(parts, whole) {
  const shown = element("div", { class: "bar", "aria-hidden": "true" });
  for (const [name, size, color, striped] of parts) {
    const part = element("span", { class: striped ? "part striped" : "part", title: name });
    part.style.width = `${(100 * size) / whole}%`;
    part.style.setProperty("--color", color);
    shown.append(part);
  }
  return shown;
}

// A table of the same: a swatch, a name, and its figures.
function table(caption, heads, rows) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  const body = rows.map(([name, color, striped, ...figures]) => {
    const swatch = element("span", { class: `swatch part${striped ? " striped" : ""}`, "aria-hidden": "true" });
    swatch.style.setProperty("--color", color);
    const cells = figures.map((text) => element("td", {}, text));
    return element("tr", {}, element("th", { scope: "row" }, swatch, name), ...cells);
  });
  const parts = [element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...body)];
  return element("table", { class: "figures" }, ...parts);
}

const partsOf = (memory) => PARTS.map((part) => [part, memory[part], MEMORY_COLORS[part]]).filter(([, size]) => size);

function memoryShown(plan) {
  const whole = 1.02 * Math.max(plan.budget, plan.total);
  const drawn = Object.entries(plan.moments).flatMap(([moment, memory]) => {
    const shown = bar(partsOf(memory), whole), mark = element("span", { class: "budget" });
    mark.style.left = `${(100 * plan.budget) / whole}%`;
    shown.append(mark);
    return [element("div", { class: "moment" }, `at ${moment}: ${gib(totalOf(memory))}`), shown];
  });
  const peak = Object.entries(plan.moments).find(([, memory]) => totalOf(memory) === plan.total)[0];
  const rows = partsOf(plan.memory).map(([part, size, color]) => [part, color, false, gib(size)]);
  rows.push(["together", "transparent", false, gib(plan.total)], ["budget", "var(--ink)", false, gib(plan.budget)]);
  const caption = `of the rank that needs most, at ${peak}; the line is the budget`;
  return section("Memory", ...drawn, table(caption, ["part", "size"], rows));
}

function sentShown(plan) {
  const axes = Object.entries(plan.sent);
  if (!axes.length) return section("Sent", element("p", {}, "Nothing: there is one device."));
  const most = Math.max(...axes.map(([, bytes]) => bytes));
  const bars = axes.map(([axis, bytes]) => {
    const between = plan.between[axis], color = AXIS_COLORS[axis];
    return bar([[axis, bytes - between, color], [`${axis}, between hosts`, between, color, true]], most);
  });
  const rows = axes.map(([axis, bytes]) => {
    const between = plan.between[axis];
    return [axis, AXIS_COLORS[axis], false, gigabytes(bytes - between), gigabytes(between)];
  });
  const caption = `by a rank${plan.layout.pp > 1 ? " of the first stage" : ""} in a step; striped: between hosts`;
  return section("Sent", ...bars, table(caption, ["axis", "inside a host", "between hosts"], rows));
}

function secondsShown(plan) {
  const { dtf: compute, dto: optimizer } = PLANNER_DATA.colors.parts;
  const waits = Object.entries(plan.waits).map(([axis, size]) => [`waits for ${axis}`, size, AXIS_COLORS[axis], true]);
  const parts = [["computes", plan.compute, compute, false], ...waits, ["optimizer", plan.optimizer, optimizer, false]];
  const idle = plan.seconds - parts.reduce((total, [, size]) => total + size, 0);
  if (plan.bubble) parts.push(["bubble", idle, "var(--idle)", false]);
  const share = (size) => `${((100 * size) / plan.seconds).toFixed(1)} %`;
  const rows = parts.map(([name, size, color, striped]) => [name, color, striped, `${rounded(size)} s`, share(size)]);
  rows.push(["a step", "transparent", false, `${rounded(plan.seconds)} s`, ""]);
  const bubble = `; bubble: ${(100 * plan.bubble).toFixed(1)} % of the pipeline's own time`;
  const caption = `of a step${plan.layout.pp > 1 ? bubble : ""}; striped: waiting`;
  return section("Time", bar(parts, plan.seconds), table(caption, ["", "seconds", "of the step"], rows));
}

function section(title, ...children) {
  return element("section", {}, element("h2", {}, title), ...children);
}

function verdictOf(question, plan) {
  const { model, machine, hosts, devices } = question, count = (number) => Math.round(number).toLocaleString("en-US");
  if (plan.why) return `No layout of ${model} on ${count(hosts * devices)} devices: ${plan.why}`;
  const memory = plan.fits
    ? `fits: ${gib(plan.total)} of ${gib(plan.budget)}`
    : `does not fit: ${gib(plan.total)} of ${gib(plan.budget)}, ${gib(plan.total - plan.budget)} are missing`;
  const rate = `${count(plan.tokensPerSecond)} tokens/s, MFU ${plan.mfu.toFixed(3)}`;
  const pace = `A step takes ${rounded(plan.seconds)} s: ${rate}`;
  const own = `${count(plan.local)} of ${count(question.batch)} samples, in micro-batches of ${count(plan.microBatch)}`;
  const batch = `Each of ${count(plan.layout.dp)} data-parallel ranks takes ${own}`;
  return `${model} as ${plan.name} on ${count(plan.ranks)} devices of ${machine} ${memory}. ${pace}. ${batch}.`;
}

// The nearest values, below and above, of the control that was moved last, with which there is a layout; or else of
// each number: [control, value].
function waysOut(question) {
  const works = (key, value) => !planOf(PLANNER_DATA, { ...question, [key]: value }).why;
  const numbers = CONTROLS.filter((control) => isNumber(control) && !(control.where && !control.where(question)));
  const near = (control) => {
    const fitting = control.values(question).filter((value) => works(control.key, value));
    const below = fitting.filter((value) => value < question[control.key]).at(-1);
    const above = fitting.find((value) => value > question[control.key]);
    return [below, above].filter((value) => value !== undefined).map((value) => [control, value]);
  };
  const own = numbers.filter((control) => control.key === moved).flatMap(near);
  return own.length ? own : numbers.flatMap(near).slice(0, 4);
}

function offersShown(question, plan) {
  if (!plan.why) return [];
  return waysOut(question).map(([control, value]) => {
    const text = `${control.label.split(",")[0]} ${value.toLocaleString("en-US")}`;
    const offer = element("button", { type: "button" }, text);
    offer.addEventListener("click", () => {
      wanted[control.key] = value;
      history.replaceState(null, "", show());
    });
    return offer;
  });
}

function show() {
  const question = questionOf(), plan = planOf(PLANNER_DATA, question);
  for (const control of CONTROLS) showControl(control, question);
  const verdict = document.getElementById("planner-verdict");
  verdict.textContent = verdictOf(question, plan);
  verdict.className = plan.why || !plan.fits ? "no" : "yes";
  document.getElementById("planner-offers").replaceChildren(...offersShown(question, plan));
  const shown = document.getElementById("planner-shown");
  // Where there is no layout, the picture of the last one stays, in grey.
  shown.classList.toggle("last", Boolean(plan.why));
  if (!plan.why) shown.replaceChildren(memoryShown(plan), element("div", {}, secondsShown(plan), sentShown(plan)));
  const lines = [commandOf(question), ...(plan.why ? [] : [launchLine(question, plan)])];
  document.getElementById("planner-lines").textContent = lines.join("\n\n");
  document.getElementById("planner-json").textContent = JSON.stringify(plan, null, 1);
  return addressOf(question);
}

function colors(where, { paper, ink, grid, idle }) {
  const { cp: yes, tp: no, dp_shard: accent } = AXIS_COLORS; // green, vermilion and blue
  const named = Object.entries({ paper, ink, grid, idle, yes, no, accent });
  return `${where}#planner { ${named.map(([name, color]) => `--${name}: ${color};`).join(" ")} }`;
}

// A link to a question, further down the page: what it does not name is as it was at first.
function follow(link) {
  for (const { key, start } of CONTROLS) wanted[key] = start;
  read(link.dataset.question);
  history.replaceState(null, "", show());
}

function start() {
  const { light, dark } = PLANNER_DATA.themes;
  // The site's button for light and dark sets the attribute, and so does the reader's system.
  const theme = `${colors("", light)} ${colors("[data-md-color-scheme=slate] ", dark)}`;
  const changed = (key, value) => {
    wanted[key] = value;
    moved = key;
    if (key === "machine") wanted.devices = machineOf(wanted).ranks_per_host;
    history.replaceState(null, "", show());
  };
  const controls = CONTROLS.map((control) => makeControl(control, changed));
  document.getElementById("planner").replaceChildren(
    element("style", {}, theme),
    element(
      "div",
      { id: "planner-head" },
      element("output", { id: "planner-verdict" }),
      element("div", { id: "planner-offers", "aria-label": "the next sizes that go together" })
    ),
    element("form", { "aria-label": "a model, a machine, a layout" }, ...controls),
    element(
      "div",
      { id: "planner-answer" },
      element("div", { id: "planner-shown" }),
      element("h2", {}, "The same by command"),
      element("pre", {}, element("code", { id: "planner-lines" })),
      element("details", {}, element("summary", {}, "All figures as JSON"), element("pre", { id: "planner-json" }))
    )
  );
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-question]");
    if (!link) return;
    event.preventDefault();
    follow(link);
    document.getElementById("planner").scrollIntoView();
  });
  window.addEventListener("hashchange", () => {
    readAddress();
    show();
  });
  readAddress();
  show();
}

start();
