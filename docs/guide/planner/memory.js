// What a rank has in memory at the peak of a step, by part.
//
// A copy of src/mmm_lab/planner/memory.py and src/mmm/models/llama/costs.py for a Transformer in bfloat16 with AdamW, on an
// accelerator. Functions have the names of those that they are copies of, where the comments stand.

"use strict";

const STORAGE = 4, COMPUTE = 2; // bytes of an element: weights, gradients and AdamW's state; matrix products
const STATE = 2; // elements of AdamW's state for a parameter
const STATISTIC = 4; // bytes of a float32
const CHUNK_BYTES = 250e6;
const UNSHARDED = ["ddp", "zero1", "zero2"]; // every rank keeps all parameters
const PARTS = ["parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "logits"];
const MOMENTS = ["the loss", "backward of the last layer", "backward of the first", "the end of backward"];

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const product = (numbers) => numbers.reduce((total, number) => total * number, 1);
const gcd = (a, b) => (b ? gcd(b, a % b) : a);
const lcm = (a, b) => (a / gcd(a, b)) * b;
const largestBy = (items, key) => items.reduce((best, item) => (key(item) > key(best) ? item : best));

// ---- what each pipeline rank has

function balanceStages(costs, stages) {
  const before = [0];
  for (const cost of costs) before.push(before.at(-1) + cost);
  const search = (limit, squares) => {
    let best = new Map([[0, [0, []]]]); // parts used so far → value, first part of each stage
    for (let stage = 0; stage < stages; stage++) {
      const extended = new Map();
      for (const [start, [value, firsts]] of best) {
        for (let end = start + 1; end <= costs.length; end++) {
          const cost = before[end] - before[start];
          const next = squares ? value + cost ** 2 : Math.max(value, cost);
          if (cost <= limit && (!extended.has(end) || next < extended.get(end)[0])) {
            extended.set(end, [next, [...firsts, start]]);
          }
        }
      }
      best = extended;
    }
    return best.get(costs.length);
  };
  const [slowest] = search(Infinity, false);
  const [, firsts] = search(slowest, true);
  return firsts.map((first, stage) => [first, firsts[stage + 1] ?? costs.length]);
}

function stagesFor({ layout, sequence, flops, schedule, stages: own }) {
  const { pp } = layout;
  const counted = (ranges) => {
    const counts = [0, 0, 0];
    for (const [first, end] of ranges) for (let part = first; part < end; part++) counts[sequence[part]] += 1;
    return counts.flatMap((count, kind) => (count ? [{ kind, count }] : []));
  };
  if (pp === 1) return [{ kinds: counted([[0, sequence.length]]), number: 0, hasHead: true, lastKind: 2, own: 1 }];
  const splits = balanceStages(sequence.map((kind) => flops[kind]), pp * own);
  const distinct = new Map(); // of stages that are alike the first
  for (let number = 0; number < pp; number++) {
    const round = [...Array(own).keys()].map((turn) => number + turn * pp);
    const turns = SCHEDULES[schedule].v ? [number, 2 * pp - 1 - number] : round;
    const stage = {
      kinds: counted(turns.map((turn) => splits[turn])),
      number,
      hasHead: turns.includes(splits.length - 1),
      lastKind: sequence[splits[Math.max(...turns)][1] - 1],
      own,
    };
    const key = JSON.stringify([stage.kinds, stage.hasHead, stage.lastKind]);
    if (!distinct.has(key)) distinct.set(key, stage);
  }
  return [...distinct.values()];
}

function shardsOf({ layout, replicas }) {
  const ranks = replicas ? layout.dp : layout.dp_shard;
  return [ranks * layout.cp, Math.max(Math.floor(ranks / layout.ep), 1) * layout.cp * layout.tp];
}

function localShape({ shape, dim, expert }, tp, ep) {
  if (expert) return [Math.floor(shape[0] / ep), ...shape.slice(1)];
  return shape.map((size, place) => (place === dim ? Math.ceil(size / tp) : size));
}

function sizesOfKind({ matrices }, { tp, ep }, [shards, expertShards]) {
  const sizes = { local: 0, padded: 0, sharded: 0 };
  for (const matrix of matrices) {
    const shape = localShape(matrix, tp, ep), n = matrix.expert ? expertShards : shards;
    let rows = shape[0], others = product(shape.slice(1));
    if (matrix.expert && rows % n && shape[1] % n === 0) {
      rows *= shape[1];
      others = product(shape.slice(2));
    }
    const each = Math.ceil(rows / n);
    sizes.local += product(shape);
    sizes.sharded += each * others;
    sizes.padded += each * n * others;
  }
  return sizes;
}

function sizesOf(c, stage) {
  const { model, layout } = c, shards = shardsOf(c);
  const rows = stage.kinds.map((each) => ({ ...each, ...sizesOfKind(model.kinds[each.kind], layout, shards) }));
  const total = (name) => sum(rows.map((row) => row.count * row[name]));
  const units = new Map(rows.map((row) => [row.kind, row.padded]));
  const sizes = { local: total("local"), padded: total("padded"), sharded: total("sharded") };
  let largest = Math.max(...units.values());
  const others = rows.filter((row) => model.kinds[row.kind].role !== "head").map((row) => row.padded);
  if (model.tied && layout.pp === 1) { // one parameter, which two parts have
    const shapes = model.kinds[0].matrices.map((matrix) => localShape(matrix, layout.tp, 1));
    const [height, dim] = largestBy(shapes, product);
    const each = Math.ceil(height / shards[0]) * dim;
    sizes.local -= height * dim;
    sizes.padded -= each * shards[0];
    sizes.sharded -= each;
    units.set(stage.lastKind, units.get(stage.lastKind) + units.get(0) - each * shards[0]);
    largest = Math.max(largest, units.get(stage.lastKind));
  }
  return {
    ...sizes,
    largest,
    tensors: sum(rows.map((row) => row.count * model.kinds[row.kind].matrices.length)),
    units: sum(rows.map((row) => row.count)),
    last: units.get(stage.lastKind),
    layer: others.length ? Math.max(...others) : largest,
  };
}

// ---- memory

function transformerLayer({ model, machine, layout, replicas }) {
  const { tp } = layout, c = COMPUTE, residual = replicas ? STORAGE : COMPUTE;
  const d = model.dim, e = model.head_dim, heads = model.n_heads / tp, ownKv = model.n_kv_heads / tp;
  const kvHeads = machine.device === "cuda" ? Math.max(ownKv, 1) : heads;
  const norm = (d * residual) / tp;
  const attention = c * e * (2 * heads + 2 * kvHeads) + STATISTIC * heads;
  let feedForward = (4 * c * model.hidden_dim) / tp, normed = 2 * c * d, hidden = model.hidden_dim / tp;
  if (model.n_experts) {
    const wide = Math.max(c, STATISTIC), k = model.top_k, f = model.expert_hidden_dim;
    feedForward = (wide * d * (wide !== c ? 1 : 0) + (wide + 8) * model.n_experts + 40 * k) / tp;
    feedForward += (k * (c * d * 2 + 4 * c * f)) / tp;
    normed = c * d * (1 + 1 / tp);
    hidden = (k * f) / tp;
  }
  const none = 2 * norm + normed + attention + feedForward + (2 * STATISTIC) / tp;
  const products = c * e * (heads + 2 * ownKv) + c * d + 2 * c * hidden + c * d;
  const boundary = (d * residual) / tp;
  return {
    none,
    selective: Math.min(boundary + products + c * e * heads + STATISTIC * heads, none),
    full: boundary,
    working: 2 * c * hidden + 2 * c * d,
    boundary,
    head: norm + c * d + STATISTIC / tp,
    traffic: (c * d * 10) / tp + 44 * e * (heads + ownKv) + 5 * c * hidden,
    position: 8 * e,
  };
}

function activationsOf(c, stage, batch) {
  const { layout, checkpointing, seq } = c, kept = transformerLayer(c);
  const tokens = (batch * seq) / layout.cp, positions = (seq / layout.cp) * kept.position;
  let layer = kept[checkpointing] * tokens, working = kept.working * tokens;
  if (checkpointing === "none") layer += positions;
  else working += kept.none * tokens + positions - layer; // one layer is computed again
  const layers = layersOf(c, stage);
  return {
    layers: layers * layer,
    head: stage.hasHead && layers ? kept.head * tokens : 0,
    working,
    layer: layers ? layer : 0,
  };
}

function layersOf({ model }, stage) {
  return sum(stage.kinds.filter(({ kind }) => model.kinds[kind].role === "layer").map(({ count }) => count));
}

function lossChunks({ model, layout, seq }, batch) {
  const elements = Math.floor((Math.ceil(model.vocab_size / layout.tp) * batch * seq) / layout.cp);
  if (elements * 4 <= 4 * CHUNK_BYTES) return 1;
  return Math.min(Math.ceil((elements * 4) / CHUNK_BYTES), Math.floor(seq / layout.cp));
}

function logitsOf({ model, layout, seq }, batch, chunks) {
  const tokens = (batch * seq) / layout.cp, wide = 4, vocabulary = Math.ceil(model.vocab_size / layout.tp);
  if (chunks === 1) return [tokens * vocabulary * wide * (layout.tp === 1 ? 3 : 4), 0];
  const summed = vocabulary * model.dim * (wide + COMPUTE) + tokens * model.dim * COMPUTE;
  return [Math.ceil(seq / layout.cp / chunks) * batch * vocabulary * 2 * (wide + COMPUTE), summed];
}

function inFlight(schedule, p, r, m, v) {
  if (schedule === "GPipe" || schedule === "LoopedBFS") return m;
  if (schedule === "1F1B") return Math.min(m, p - r);
  const interleaved = (v - 1) * p + 2 * (p - r - 1) + 1;
  if (schedule === "Interleaved1F1B") return Math.min(m * v, interleaved) / v;
  if (schedule === "InterleavedZeroBubble") return Math.min(m * v, interleaved + p) / v;
  return Math.min(m * v, 2 * p + 1) / v;
}

// Bytes by part of a rank of a stage, at each of MOMENTS.
function momentsOf(c, stage, batch, chunks) {
  const { layout, microbatches, parallel, replicas } = c, pipeline = layout.pp > 1;
  const sizes = sizesOf(c, stage), left = activationsOf(c, stage, batch);
  const [logits, summed] = stage.hasHead ? logitsOf(c, batch, chunks) : [0, 0];
  let flying = 1, passed = 0;
  if (pipeline) {
    flying = inFlight(c.schedule, layout.pp, stage.number, microbatches, stage.own);
    passed = ((transformerLayer(c).boundary * batch * c.seq) / layout.cp) * stage.own;
  }
  const activations = [
    flying * (left.layers + left.head + passed),
    flying * (left.layers + passed) + left.working + (flying - 1) * left.head,
    left.layer + left.working,
    0,
  ];
  const several = microbatches > 1 || pipeline;
  const held = replicas ? replicated(parallel, sizes, several, flying) : sharded(sizes, several, pipeline);
  return held.moments.map(([gradients, gathered, buffers], moment) => ({
    parameters: held.parameters,
    gradients,
    optimizer: held.optimizer,
    activations: activations[moment],
    gathered,
    buffers: buffers + (moment === 0 ? summed : 0),
    logits: moment === 0 ? logits : 0,
  }));
}

function totalOf(memory) {
  return sum(Object.values(memory));
}

function sharded(sizes, several, pipeline) {
  const own = sizes.sharded * STORAGE, shard = own / Math.max(sizes.padded, 1);
  const unsharded = several ? sizes.local * STORAGE : 0;
  const everything = pipeline ? sizes.local * COMPUTE : 0;
  const leaving = several ? STORAGE : STORAGE + COMPUTE;
  const { layer, largest, last } = sizes;
  return {
    parameters: own,
    optimizer: STATE * own,
    moments: [
      [unsharded, everything || last * COMPUTE, 0],
      [unsharded || shard * last, everything || 2 * layer * COMPUTE, last * STORAGE],
      [unsharded || own - shard * layer, everything || 2 * layer * COMPUTE, layer * leaving],
      [unsharded + own, everything || largest * COMPUTE, largest * leaving],
    ],
  };
}

function replicated(parallel, sizes, several, flying) {
  const full = sizes.local * STORAGE, own = sizes.sharded * STORAGE, copied = sizes.local * COMPUTE;
  const before = several || parallel === "ddp" ? full : 0;
  const [gradients, outgoing] = parallel === "zero2" ? [own, full] : [full, 0];
  return {
    parameters: full,
    optimizer: STATE * (parallel === "ddp" ? full : own),
    moments: [
      [before, flying * copied, 0],
      [before || sizes.last * STORAGE, flying * copied, 0],
      [before || full - sizes.layer * STORAGE, copied, 0],
      [gradients, copied, outgoing],
    ],
  };
}
