// Which layouts go with a model and a batch: the rules of the planner, and their sentences.
//
// A copy of src/mmm_lab/planner/asked.py, src/mmm/layout.py, src/mmm/parallel/cp/styles.py and src/mmm/parallel/pp/schedules.py for
// a Transformer. Functions have the names of those that they are copies of, where the comments stand.

"use strict";

// least, most: stages a rank. v: they lie on the ranks there and back. splits: backward is split in two.
// microbatches: from pp, the least number, and what it is a multiple of.
const SCHEDULES = {
  GPipe: { least: 1, most: 1, microbatches: () => [1, 1] },
  "1F1B": { least: 1, most: 1, microbatches: (pp) => [pp, 1] },
  Interleaved1F1B: { least: 2, most: Infinity, microbatches: (pp) => [pp, pp] },
  LoopedBFS: { least: 2, most: Infinity, microbatches: () => [1, 1] },
  InterleavedZeroBubble: { least: 2, most: Infinity, splits: true, microbatches: (pp) => [pp, pp] },
  ZBVZeroBubble: { least: 2, most: 2, v: true, splits: true, microbatches: () => [1, 1] },
  DualPipeV: { least: 2, most: 2, v: true, splits: true, microbatches: (pp) => [2 * pp, 1] },
};

function nameOf(layout) {
  const axes = ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"].filter((axis) => layout[axis] !== 1);
  const short = (axis) => (axis === "dp_shard" && layout.dp_replicate === 1 ? "dp" : axis);
  return axes.map((axis) => `${short(axis)}${layout[axis]}`).join("·") || "1";
}

function whyNot(c) {
  return fit(c) || checkDataParallel(c) || transformerRules(c) || whyNotThis(c);
}

function fit({ layout, machine }) {
  const fixed = ["pp", "dp_replicate", "cp", "tp"].filter((axis) => layout[axis] > 1);
  const ranks = product(fixed.map((axis) => layout[axis]));
  if (machine.ranks % ranks) {
    const named = fixed.map((axis) => `${axis} ${layout[axis]}`).join(" · ");
    const step = ranks * layout.ep;
    const near = Math.max(roundHalfToEven(machine.ranks / step), 1) * step;
    const there = machine.ranks === 1 ? "is" : "are";
    return (
      `${named} needs a multiple of ${ranks} ranks, and there ${there} ${machine.ranks}: start ${near} ranks, ` +
      `or change the layout`
    );
  }
  if (layout.dp_shard % layout.ep) {
    return `ep ${layout.ep} does not divide dp_shard ${layout.dp_shard} (data-parallel ranks share the experts)`;
  }
  return "";
}

function roundHalfToEven(number) {
  const below = Math.floor(number);
  return number - below === 0.5 ? below + (below % 2) : Math.round(number);
}

function checkDataParallel({ parallel, layout, replicas }) {
  if (parallel === "hsdp" && layout.dp_replicate === 1) {
    return (
      `hsdp keeps replicas of a model that is sharded over dp_shard, and the layout ${nameOf(layout)} has one ` +
      `replica: give dp_replicate, or use fsdp`
    );
  }
  const others = ["pp", "cp", "tp", "ep"].filter((axis) => layout[axis] > 1);
  const there = others.map((axis) => `${axis} ${layout[axis]}`).join(" · ");
  if (parallel === "ddp" && others.length) {
    const alone = others.map((axis) => `${axis} 1`).join(" · ");
    return `ddp keeps the full model on every rank, which does not go with ${there}: use zero1 or fsdp, or ${alone}`;
  }
  if (replicas && layout.dp_replicate > 1 && (layout.dp_shard > 1 || others.length)) {
    return (
      `${parallel} has one data-parallel axis, and the layout has dp_replicate ${layout.dp_replicate} and ` +
      `${layout.dp_shard > 1 ? `dp_shard ${layout.dp_shard}` : there}: use hsdp, or leave dp_replicate 1`
    );
  }
  return "";
}

const HEADS = "each rank takes whole heads";

function tpRule(name, size, tp, why) {
  return size % tp ? `${name} ${size} ${size > tp ? "is not divisible by" : "<"} tp ${tp} (${why})` : "";
}

function transformerRules({ model, layout, seq, ulysses }) {
  const { cp, tp } = layout;
  const first = contextRules(model, layout, seq, ulysses) || expertRules(model, layout);
  if (first || tp === 1) return first;
  const tokens = "between the sharded matrices each rank takes the same number of tokens";
  const units = "each rank takes the same number of hidden units";
  return (
    kvHeadRules(model, tp) ||
    (cp === 1 || ulysses === 1 ? tpRule("n_heads", model.n_heads, tp, HEADS) : "") ||
    (model.n_experts ? "" : tpRule("ffn_dim", model.hidden_dim, tp, units)) ||
    (cp === 1 ? tpRule("seq_length", seq, tp, tokens) : "") ||
    ((tp - 1) * Math.ceil(model.vocab_size / tp) >= model.vocab_size
      ? `vocab_size ${model.vocab_size} sharded over tp ${tp} leaves a rank without any of it`
      : "")
  );
}

function contextRules({ n_heads }, { cp, tp }, seq, ulysses) {
  if (cp === 1) return "";
  const chunks = 2 * cp * tp, ranks = ulysses * tp, over = tp > 1 ? ` · tp ${tp}` : "";
  if (seq % chunks) {
    return (
      `seq_length ${seq} is not divisible by 2 · cp ${cp}${over} = ${chunks} (each rank takes two chunks of the same ` +
      `length)`
    );
  }
  if (ulysses > 1 && n_heads % ranks) {
    const text = `cp ${cp}${over}${tp > 1 ? ` = ${ranks}` : ""}`;
    return `n_heads ${n_heads} is not divisible by ${text} (under ulysses ${HEADS}; under ring tp does)`;
  }
  return "";
}

function expertRules({ n_experts }, { ep }) {
  if (ep === 1 || (n_experts && n_experts % ep === 0)) return "";
  if (!n_experts) return `ep ${ep}: the model has no experts to shard: give it n_experts, or use ep 1`;
  return `n_experts ${n_experts} is not divisible by ep ${ep} (each rank takes the same number of them)`;
}

function kvHeadRules({ n_kv_heads, head_dim }, tp) {
  if (n_kv_heads % tp === 0) return "";
  if (tp % n_kv_heads) {
    const why = "each rank takes whole key/value heads, or several ranks share one";
    return `n_kv_heads ${n_kv_heads} and tp ${tp}: one has to be a multiple of the other (${why})`;
  }
  if ((n_kv_heads * head_dim) % tp === 0) return "";
  const part = tp / n_kv_heads;
  const why = `each rank computes 1 / ${part} of a key/value head, and head_dim ${head_dim} is not divisible by ${part}`;
  return `n_kv_heads ${n_kv_heads} < tp ${tp}: ${why}`;
}

function whyNotThis(c) {
  const { layout, parallel, microbatches, local } = c;
  if (layout.pp > c.sequence.length) {
    return `pp ${layout.pp}: the model has ${c.sequence.length} parts, and each pp rank needs one`;
  }
  if (c.batch % layout.dp) {
    return `global batch ${c.batch} does not divide over ${layout.dp} data-parallel ranks`;
  }
  if (["zero1", "zero2", "hsdp"].includes(parallel) && layout.dp_shard * layout.cp === 1) {
    return (
      `${parallel} shards over dp_shard and cp, and the layout ${nameOf(layout)} has one rank there: ` +
      `use fsdp or ddp`
    );
  }
  if (parallel === "fsdp" && layout.dp_replicate > 1) {
    return `fsdp has no replicas, and the layout has dp_replicate ${layout.dp_replicate}: use hsdp`;
  }
  if (layout.pp > 1) return checkPipeline(c);
  if (local % microbatches) {
    return (
      `microbatches ${microbatches}: a batch of ${local} a data-parallel coordinate cannot be split into as many`
    );
  }
  return "";
}

function checkPipeline({ layout, schedule, stages, microbatches, local, sequence, checkpointing }) {
  const kind = SCHEDULES[schedule], pp = layout.pp, parts = sequence.length, wrong = [];
  if (stages < kind.least || stages > kind.most) {
    const takes = kind.most === kind.least ? `exactly ${kind.least}` : `at least ${kind.least}`;
    wrong.push(`stages_per_rank ${stages}: ${schedule} takes ${takes}`);
  } else if (pp * stages > parts) {
    wrong.push(
      `pp ${pp} with ${stages} stages a rank is ${pp * stages} stages, and the model has ${parts} parts to put into ` +
        `them: use fewer stages, or a model with more layers` +
        (kind.least > 1 ? ", or a schedule with one stage a rank (1F1B)" : "")
    );
  }
  const [least, multiple] = kind.microbatches(pp), why = [];
  if (microbatches < least) why.push(`${schedule} with pp ${pp} needs at least ${least}`);
  if (microbatches % multiple) why.push(`${schedule} needs a multiple of pp ${pp}`);
  if (local % microbatches) {
    why.push(`a batch of ${local} a data-parallel coordinate cannot be split into ${microbatches} equal parts`);
  }
  if (why.length) wrong.push(`microbatches ${microbatches}: ${why.join(", and ")}`);
  if (kind.splits && checkpointing === "selective") {
    wrong.push(
      `checkpointing selective with ${schedule}, which goes through the backward of a stage twice, for its input and ` +
        `for its weights: what was kept, PyTorch gives back once; use full (which then recomputes the forward twice), ` +
        `or 1F1B or Interleaved1F1B`
    );
  }
  return wrong.join("; ");
}
