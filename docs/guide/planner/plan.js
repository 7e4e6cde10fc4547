// One layout of a Transformer, as `mmm plan --exactly` sees it.
//
// rules.js, memory.js and seconds.js are copies of the planner's formulas. tests/docs/test_in_a_browser.py compares what
// the page shows with what the command says. Plain scripts, no modules: a page opened from a file may not import one.

"use strict";

// What was asked for, with what follows from it.
//
// question: model, machine (names); hosts, devices (a host); pp, dp_replicate, cp, tp, ep; parallel, schedule,
// stages, cp_style, checkpointing; microbatches, batch (the global one), seq.
function contextOf(data, question) {
  const model = data.models[question.model];
  const machine = { ...data.machines[question.machine], hosts: question.hosts, ranks_per_host: question.devices };
  machine.ranks = machine.hosts * machine.ranks_per_host;
  const { pp, dp_replicate, cp, tp, ep } = question;
  const dp_shard = machine.ranks / (pp * dp_replicate * cp * tp);
  const layout = { pp, dp_replicate, dp_shard, cp, tp, ep, dp: dp_replicate * dp_shard };
  const sequence = [0, ...Array(model.n_layers).fill(1), 2]; // the kind of each part
  const scores = 4 * question.seq ** 2 * model.n_heads * model.head_dim;
  const flops = model.kinds.map((kind) => kind.flops * question.seq + (kind.role === "layer" ? scores : 0));
  return {
    ...question, model, machine, layout, sequence, scores, flops,
    ulysses: question.cp_style === "ulysses" ? cp : 1,
    replicas: UNSHARDED.includes(question.parallel),
    local: question.batch / layout.dp,
  };
}

// ---- the answer

// { why } where the planner refuses; else memory by part of the rank that needs most, and the rest.
function planOf(data, question) {
  const c = contextOf(data, question), why = whyNot(c);
  if (why) return { why };
  const stages = stagesFor(c), batch = c.local / c.microbatches, chunks = lossChunks(c, batch);
  const needsMost = (moments) => Math.max(...moments.map(totalOf));
  const moments = largestBy(stages.map((stage) => momentsOf(c, stage, batch, chunks)), needsMost);
  const memory = largestBy(moments, totalOf), budget = c.machine.gpu_memory * c.machine.budget_part;
  const cost = stepCost(c, stages, batch, chunks), sent = sentBytes(c, stages[0]), groups = groupsOf(c);
  const between = Object.entries(sent).map(([axis, bytes]) => [axis, betweenHosts(axis, bytes, groups[axis])]);
  const flops = 3 * sum(c.sequence.map((kind) => c.flops[kind]));
  return {
    why: "",
    layout: c.layout,
    name: nameOf(c.layout),
    ranks: c.machine.ranks,
    local: c.local,
    microBatch: batch,
    lossChunks: chunks,
    memory,
    moments: Object.fromEntries(MOMENTS.map((name, place) => [name, moments[place]])),
    total: totalOf(memory),
    budget,
    fits: totalOf(memory) <= budget,
    sent,
    between: Object.fromEntries(between),
    ...cost,
    tokensPerSecond: (c.batch * c.seq) / cost.seconds,
    mfu: (c.batch * flops) / (cost.seconds * c.machine.peak * c.machine.ranks),
  };
}
