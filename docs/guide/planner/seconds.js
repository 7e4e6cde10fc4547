// What a rank sends in a step, by axis, and how long the step takes.
//
// A copy of src/mmm_lab/planner/traffic.py, src/mmm_lab/planner/network.py and src/mmm_lab/planner/cost.py for a Transformer in bfloat16 with
// AdamW, on an accelerator. Functions have the names of those that they are copies of, where the comments stand.

"use strict";

// ---- bytes sent

function factor(operation, ranks) {
  return ((operation === "all_reduce" ? 2 : 1) * (ranks - 1)) / ranks;
}

function groupOf(size, stride, machine) {
  const span = size * stride, each = machine.ranks_per_host;
  if (size === 1) return { size: 1, local: 1, crosses: false };
  const crosses = machine.hosts > 1 && (span > each || each % span !== 0);
  return { size, local: crosses ? Math.max(Math.floor(gcd(span, each) / stride), 1) : size, crosses };
}

function groupsOf({ layout, machine }) {
  const { pp, dp_replicate, dp_shard, cp, tp, ep } = layout;
  return {
    tp: groupOf(tp, 1, machine),
    cp: groupOf(cp, tp, machine),
    dp_shard: groupOf(dp_shard, tp * cp, machine),
    dp_replicate: groupOf(dp_replicate, tp * cp * dp_shard, machine),
    pp: groupOf(pp, tp * cp * dp_shard * dp_replicate, machine),
    dp_shard_cp: groupOf(dp_shard * cp, tp, machine), // fsdp, in the planner
    ep: groupOf(ep, tp * cp, machine),
  };
}

function sentBytes(c, stage) {
  const { model, layout, seq, microbatches, ulysses, replicas } = c, { cp, tp, ep, pp } = layout;
  const layers = layersOf(c, stage), roles = stage.kinds.map(({ kind }) => model.kinds[kind].role);
  const head = roles.includes("head") ? 1 : 0, embedding = roles.includes("embedding") ? 1 : 0;
  const found = sentByData(c, stage), tokens = (c.local * seq) / cp;
  const residual = replicas ? STORAGE : COMPUTE;
  if (tp > 1) {
    const products = model.n_experts ? 1 : 2;
    const pairs = 2 * (products * layers * (residual + COMPUTE) + (embedding + head) * residual);
    const summed = (2 * layers + head) * model.dim * residual + 3 * tokens * 4 * head;
    // Ranks that share a key/value head gather keys and values.
    const shared = model.n_kv_heads % tp ? 4 * layers * tokens * model.n_kv_heads * model.head_dim * COMPUTE : 0;
    found.tp = factor("all_gather", tp) * (pairs * tokens * model.dim + 2 * summed + shared);
  }
  if (cp > 1) {
    const head_ = tokens * model.head_dim, heads = Math.floor(model.n_heads / tp);
    const kvHeads = lcm(Math.floor(model.n_kv_heads / tp) || 1, ulysses);
    found.cp = (found.cp || 0) + contextBytes(cp, ulysses, heads * head_, 2 * kvHeads * head_, layers);
  }
  if (ep > 1) {
    const sent = (tokens / tp) * model.top_k * model.dim * COMPUTE;
    found.ep = 4 * layers * factor("all_to_all", ep) * sent;
  }
  if (pp > 1) {
    const end = stage.number === 0 || stage.number === pp - 1;
    let faced = 2 * stage.own - (end ? 1 : 0);
    if (SCHEDULES[c.schedule].v) faced = end ? 2 : 4;
    found.pp = faced * transformerLayer(c).boundary * tokens + 8 * factor("all_reduce", pp);
  }
  return Object.fromEntries(Object.entries(found).filter(([, sent]) => sent));
}

function contextBytes(cp, ulysses, queries, keys, layers) {
  if (ulysses > 1) return 2 * layers * factor("all_to_all", ulysses) * (2 * queries + keys) * COMPUTE;
  return layers * keys * (2 * (cp - 1) * COMPUTE + cp * Math.max(COMPUTE, 4));
}

function sentByData(c, stage) {
  const { model, layout, parallel, microbatches, replicas } = c;
  const sizes = sizesOf(c, stage), [shards] = shardsOf(c);
  const axis = layout.cp === 1 ? "dp_shard" : layout.dp_shard === 1 ? "cp" : "dp_shard_cp";
  if (replicas) {
    const [operation, elements] = parallel === "zero2" ? ["reduce_scatter", sizes.padded] : ["all_reduce", sizes.local];
    const reduced = factor(operation, shards) * elements;
    const updated = parallel === "ddp" ? 0 : factor("all_gather", shards) * sizes.padded;
    return { [layout.dp_replicate > 1 ? "dp_replicate" : axis]: STORAGE * (reduced + updated) };
  }
  const last = model.tied && stage.kinds.length === 1 ? sizes.padded : sizes.last;
  const gathered = layout.pp > 1 ? sizes.padded : microbatches * (2 * sizes.padded - last);
  return {
    [axis]: factor("all_gather", shards) * (COMPUTE * gathered + STORAGE * sizes.padded),
    dp_replicate: factor("all_reduce", layout.dp_replicate) * sizes.sharded * STORAGE,
  };
}

function betweenHosts(axis, sent, group) {
  if (!group.crosses) return 0;
  return axis === "ep" ? (sent * (group.size - group.local)) / Math.max(group.size - 1, 1) : sent / group.local;
}

// ---- seconds

function bandwidth({ local, crosses }, machine) {
  const inside = machine.link_bandwidth * machine.link_efficiency;
  if (!crosses) return inside;
  const outside = (machine.network_bandwidth * machine.network_efficiency * local) / machine.ranks_per_host;
  return local > 1 ? Math.min(inside, outside) : outside;
}

function collective(operation, group, size, machine, calls = 1) {
  if (group.size === 1) return 0;
  const hosts = group.crosses ? Math.floor(group.size / group.local) : 1;
  let ring = (group.local - 1) * machine.link_latency + (hosts - 1) * machine.network_latency;
  if (operation === "all_to_all") {
    const outside = group.crosses ? (group.size - group.local) / group.size : 0;
    const inside = (group.local - 1) / group.size;
    const network = (machine.network_bandwidth * machine.network_efficiency) / machine.ranks_per_host;
    const seconds = (inside * size) / (machine.link_bandwidth * machine.link_efficiency);
    return calls * ring + seconds + (outside ? (outside * size) / network : 0);
  }
  if (operation === "all_reduce") {
    ring = Math.min(
      2 * ring,
      2 * (Math.log2(group.local) * machine.link_latency + Math.log2(Math.max(hosts, 1)) * machine.network_latency)
    );
  }
  return calls * ring + (factor(operation, group.size) * size) / bandwidth(group, machine);
}

function send(size, group, machine) {
  if (!group.crosses) return size / (machine.link_bandwidth * machine.link_efficiency) + machine.link_latency;
  const rate = (machine.network_bandwidth * machine.network_efficiency) / machine.ranks_per_host;
  return size / rate + machine.network_latency;
}

function gatherAndReduce(group, size, machine) {
  return collective("all_gather", group, size, machine) + collective("reduce_scatter", group, size, machine);
}

const rateOf = (machine) => machine.peak * machine.matmul_efficiency;
const memoryRateOf = (machine) => machine.memory_bandwidth * machine.memory_efficiency;

function layerSeconds(c, batch) {
  const { model, machine, layout, checkpointing, replicas } = c, { cp, tp, ep } = layout;
  const kept = transformerLayer(c), tokens = (batch * c.seq) / cp;
  const scores = ((c.scores / 2) * batch) / (tp * cp), flops = (c.flops[1] * batch) / (tp * cp) - scores;
  const traffic = (tokens * kept.traffic) / memoryRateOf(machine);
  const forward = Math.max(flops / rateOf(machine) + traffic, machine.layer_overhead);
  let again = { none: 0, selective: traffic, full: forward }[checkpointing];
  if (layout.pp > 1 && SCHEDULES[c.schedule].splits) again *= 2;
  const repeated = checkpointing === "none" ? 0 : 1, waits = { tp: 0, cp: 0, ep: 0 };
  if (tp > 1) {
    const size = (tokens * model.dim * (COMPUTE + (replicas ? STORAGE : COMPUTE))) / 2;
    waits.tp = (model.n_experts ? 1 : 2) * (2 + repeated) * gatherAndReduce(groupOf(tp, 1, machine), size, machine);
  }
  if (cp > 1) waits.cp = contextSeconds(c, tokens, scores, repeated);
  if (ep > 1) {
    const size = (tokens / tp) * model.top_k * model.dim * COMPUTE;
    waits.ep = (4 + 2 * repeated) * collective("all_to_all", groupOf(ep, tp * cp, machine), size, machine);
  }
  return { forward, backward: 2 * forward + again, ...waits };
}

function contextSeconds({ model, machine, layout, ulysses }, tokens, scores, repeated) {
  const { cp, tp } = layout, ring = cp / ulysses, heads = model.n_heads / tp;
  const kvHeads = lcm(Math.max(Math.floor(model.n_kv_heads / tp), 1), ulysses);
  const kv = kvHeads * model.head_dim * tokens * COMPUTE;
  if (ring === 1) {
    const sent = 2 * heads * model.head_dim * tokens * COMPUTE + 2 * kv;
    return (2 + repeated) * collective("all_to_all", groupOf(ulysses, tp, machine), sent, machine, 2);
  }
  const hop = send(2 * kv, groupOf(ring, tp, machine), machine);
  const hidden = (machine.overlap * scores) / ring / rateOf(machine), wide = Math.max(4 / COMPUTE, 1);
  const merged = (12 * heads * model.head_dim * tokens) / memoryRateOf(machine);
  const forward = (ring - 1) * (Math.max(hop - hidden, 0) + merged);
  const backward = ring * (Math.max((1 + wide) * hop - 2 * hidden, 0) + merged);
  return (1 + repeated) * forward + backward;
}

function headSeconds({ model, machine, layout, flops, seq }, batch, chunks) {
  const { cp, tp } = layout, tokens = (batch * seq) / cp, c = COMPUTE;
  const work = ((flops[0] + flops[2]) * batch) / (tp * cp);
  const traffic = tokens * ((model.vocab_size / tp) * (3 * c + 32) + 12 * c * model.dim);
  const seconds = ((chunks > 1 ? 4 : 3) * work) / rateOf(machine) + traffic / memoryRateOf(machine);
  return [seconds, 2 * gatherAndReduce(groupOf(tp, 1, machine), tokens * model.dim * c, machine)];
}

function bubbleOf(schedule, p, m, v) {
  const closed = bubbleFormula(schedule, p, m, v);
  if (closed !== null) return closed;
  return m >= p ? (p - 1) / (m * v + p - 1) : 1 - (m * v) / (p * v + m - 1);
}

function bubbleFormula(schedule, p, m, v) {
  const least = { InterleavedZeroBubble: p, ZBVZeroBubble: Math.floor((3 * p) / 2), DualPipeV: p }[schedule];
  if (least === undefined) return m < p && v > 1 ? null : (p - 1) / (m * v + p - 1);
  return m < least ? null : (p - 1) / (3 * m * v + p - 1);
}

// Seconds of a step without data parallelism, of the slowest stage.
function workOf(c, stages, batch, chunks) {
  const { layout, machine, microbatches } = c, layer = layerSeconds(c, batch);
  const [head, headWaits] = headSeconds(c, batch, chunks);
  let slowest = { total: 0, compute: 0, waits: 0, layers: 0 };
  for (const stage of stages) {
    const layers = layersOf(c, stage);
    const compute = layers * (layer.forward + layer.backward) + (stage.hasHead ? head : 0);
    const waits = layers * layer.tp + (stage.hasHead ? headWaits : 0);
    const total = compute + waits + layers * (layer.cp + layer.ep);
    if (total > slowest.total || (total === slowest.total && compute > slowest.compute)) {
      slowest = { total, compute, waits, layers };
    }
  }
  let p2p = 0, bubble = 0;
  if (layout.pp > 1) {
    const passed = (transformerLayer(c).boundary * batch * c.seq) / layout.cp;
    p2p = 2 * stages[0].own * send(passed, groupOf(layout.pp, machine.ranks / layout.pp, machine), machine);
    bubble = bubbleOf(c.schedule, layout.pp, microbatches, stages[0].own);
  }
  const { total, compute, waits, layers } = slowest, forward = layers * layer.forward + head / 3;
  const exposed = { tp: waits, cp: layers * layer.cp, ep: layers * layer.ep, pp: p2p };
  return {
    seconds: (microbatches * (total + p2p)) / (1 - bubble),
    bubble,
    compute: microbatches * compute,
    forward,
    backward: compute - forward,
    exposed: Object.fromEntries(Object.entries(exposed).map(([axis, wait]) => [axis, microbatches * wait])),
  };
}

function stepCost(c, stages, batch, chunks) {
  const work = workOf(c, stages, batch, chunks);
  const data = dataParallelSeconds(c, stages, work);
  const optimizer = (10 * STORAGE * data.updated) / memoryRateOf(c.machine);
  const exposed = { ...work.exposed, dp_shard: data.shard, dp_replicate: data.replicate };
  return {
    seconds: work.seconds + data.shard + data.replicate + optimizer,
    compute: work.compute,
    waits: Object.fromEntries(Object.entries(exposed).filter(([, wait]) => wait > 0)),
    bubble: work.bubble,
    optimizer,
  };
}

// What dp_shard (with cp) and dp_replicate make a step wait, and the elements that a rank updates.
function dataParallelSeconds(c, stages, work) {
  const { machine, layout, parallel, replicas, microbatches } = c, groups = groupsOf(c);
  const forward = machine.overlap * work.forward, backward = machine.overlap * work.backward;
  const sizes = largestBy(stages.map((stage) => sizesOf(c, stage)), (each) => each.local);
  const { local, padded, sharded, tensors, units } = sizes;
  if (replicas) {
    const group = layout.dp_replicate > 1 ? groups.dp_replicate : groups.dp_shard_cp, size = local * STORAGE;
    const calls = parallel === "ddp" ? Math.max(1, roundHalfToEven(size / 25e6)) : tensors;
    const reduce = collective(parallel === "zero2" ? "reduce_scatter" : "all_reduce", group, size, machine, calls);
    let waits = layout.pp === 1 ? Math.max(reduce - backward, 0.1 * reduce) : reduce;
    if (parallel !== "ddp") waits += collective("all_gather", group, size, machine, tensors);
    if (layout.dp_replicate > 1) return { shard: 0, replicate: waits, updated: sharded };
    return { shard: waits, replicate: 0, updated: parallel === "ddp" ? local : sharded };
  }
  const group = groups.dp_shard_cp, copied = group.size > 1 ? (2 * padded) / memoryRateOf(machine) : 0;
  const gather = collective("all_gather", group, padded * COMPUTE, machine, units) + copied * COMPUTE;
  const reduce = collective("reduce_scatter", group, padded * STORAGE, machine, units) + copied * STORAGE;
  const replicate = collective("all_reduce", groups.dp_replicate, sharded * STORAGE, machine, units);
  const first = gather / Math.max(units, 1), gathers = Math.max(gather - forward, first);
  if (layout.pp > 1) return { shard: gathers + reduce, replicate, updated: sharded };
  const again = (1 - 1 / Math.max(units, 1)) * gather, late = Math.max(again - backward, 0);
  const last = Math.max(again + reduce - backward, 0.1 * reduce) - late;
  const left = Math.max(backward - again - reduce, 0);
  return {
    shard: microbatches * (gathers + late) + Math.max(last, 0),
    replicate: Math.max(replicate - left, 0.1 * replicate),
    updated: sharded,
  };
}
