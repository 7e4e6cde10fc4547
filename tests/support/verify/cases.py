"""Right programs, and mistakes planted in them: (name, program, mesh, what the verdict has to say)."""

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from mmm_verify.subject import part_of, plain_step
from support.by_hand import nothing
from support.verify.models import CNN, GPT, GraphNet, Llama, Mixer
from support.verify.parallel import (
    also,
    averaged_by_hand,
    ddp,
    fsdp,
    megatron,
    megatron_under_fsdp,
    mixer,
    pipeline,
    pipeline_step,
    rank_one_off,
    scaled_gradient,
    shard_with_fsdp,
    titan,
    wrong_output,
)


@dataclass
class Case:
    name: str
    model: type
    parallelize: object
    mesh: str
    # A regular expression for the line that says where the two part, or for a finding.
    says: str = ""
    more: dict = field(default_factory=dict)

    def __str__(self):
        return self.name


def by_hand(mistake=None):
    def step(model, batch, mesh):
        return averaged_by_hand(plain_step, model, batch, mesh, mistake)

    return step


HAND = {"step_fn": by_hand()}
# An optimizer that hides no factor in a gradient.
SGD = {"optimizer_fn": partial(torch.optim.SGD, lr=0.1, foreach=False)}
PIPELINE = {"step_fn": pipeline_step}

# Programs that are right, each with its layouts.
RIGHT = [
    Case("titan tp2", Llama, titan, "tp2"),
    Case("titan dp2", Llama, titan, "dp2"),
    Case("titan dp2 tp2", Llama, titan, "dp2,tp2"),
    Case("megatron tp2", GPT, megatron, "tp2"),
    Case("megatron dp2 tp2", GPT, megatron, "dp2,tp2", more=HAND),
    Case("by hand dp2", GPT, nothing, "dp2", more=HAND),
    Case("ddp, statistics of the global batch", CNN, ddp, "dp2"),
    Case("ddp with AdamW", CNN, ddp, "dp2", more={"optimizer_fn": torch.optim.AdamW}),
    Case("megatron under FSDP, dp2 tp2", GPT, megatron_under_fsdp, "dp2,tp2"),
    Case("mixer dp2 tp2", Mixer, mixer, "dp2,tp2"),
    Case("fsdp of a graph net", GraphNet, fsdp, "dp2"),
    Case("fsdp of a GPT with a tied head, 4 ranks", GPT, lambda m, mesh: shard_with_fsdp(m, mesh, list(m.h)), "dp4"),
    Case("pipeline", Llama, pipeline, "pp2", more=PIPELINE),
    # Said in another way, and right: DTensors know how they are sharded.
    Case("titan, nothing prepared", Llama, partial(titan, mistake="no_gather"), "tp2"),
    Case("titan, inputs said to be replicated", Llama, partial(titan, mistake="input_said_replicated"), "tp2"),
    Case("columns gathered at once", Mixer, partial(mixer, mistake="up_alone"), "tp2"),
    Case("one rank", Mixer, nothing, "dp1"),
]


def titan_case(mistake, says, mesh="dp2,tp2"):
    return Case(f"titan {mesh}: {mistake}", Llama, partial(titan, mistake=mistake), mesh, says)


def mega(mistake, says, position=0, mesh="tp2", more=None):
    name = f"megatron {mesh}: {mistake} in block {position}"
    return Case(name, GPT, partial(megatron, mistake=mistake, position=position), mesh, says, more or {})


def of_all(factory, mistake, says, mesh, model):
    return Case(f"{factory.__name__} {mesh}: {mistake}", model, partial(factory, mistake=mistake), mesh, says)


def same_samples(batch, mesh):
    return part_of(batch, 0, 2)


def overlapping(batch, mesh):
    inputs, targets = batch
    first = 3 * mesh["dp"].get_local_rank()
    return inputs[first : first + 4], targets[first : first + 4]


def targets_rolled(batch, mesh):
    inputs, targets = part_of(batch, mesh["dp"].get_local_rank(), 2)
    return inputs, targets.roll(1, 0)


def tp_apart(batch, mesh):
    return part_of(batch, mesh.get_rank() % 2, 2)


def summed_loss(model, batch, mesh):
    loss = plain_step(model, batch)
    return loss if mesh is None else loss * 8


def unlike_loss(model, batch, mesh):
    loss = plain_step(model, batch)
    if mesh is None:
        return loss
    return loss + 0.01 * sum(p.square().sum() for p in model.parameters() if p.ndim == 1)


def half_the_targets(model, batch, mesh):
    inputs, targets = batch
    logits = model(inputs).flatten(0, 1)
    targets = targets.flatten()
    if mesh is not None:
        return F.cross_entropy(logits[::2], targets[::2])
    return F.cross_entropy(logits, targets)


def local_count(model, batch, mesh):
    """A mean over targets that are not padding, of which ranks have different counts."""
    inputs, targets = batch
    # Each sample has another number of targets.
    length = inputs[:, :1] % 5 + 2
    targets = targets.masked_fill(torch.arange(targets.shape[1]) >= length, -100)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


# Programs that are wrong in one way each, and what verify says.
MISTAKES = [
    titan_case("attention_norm", r"layers\.\d\.attention_norm"),
    titan_case("ffn_norm", r"layers\.\d\.ffn_norm"),
    titan_case("attention_norm", r"layers\.\d\.attention_norm.*", "tp2"),
    titan_case("ffn_norm", r"layers\.\d\.ffn_norm", "tp2"),
    titan_case("final_norm", r"norm"),
    titan_case("final_norm", r"norm", "tp2"),
    titan_case("w2_replicated_output", r"layers\.0|fails", "tp2"),
    titan_case("wo_columns", r"wo|attention|fails", "tp2"),
    titan_case("embedding_replicated", r"tok_embeddings|attention|fails", "tp2"),
    titan_case("local_logits", r"output|loss|fails", "tp2"),
    titan_case("not_causal", r"layers\.0\.attention"),
    titan_case("not_causal", r"layers\.0\.attention", "dp2"),
    titan_case("eps", r"norm on rank 0"),
    titan_case("eps", r"norm on rank 0", "tp2"),
    titan_case("last_layer_skipped", r"layers\.1"),
    titan_case("layers_swapped", r"layers\.[01]", "dp2"),
    titan_case("fsdp_over_tp", r"gradient|fails", "dp2,tp2"),
    titan_case("bf16", r"tok_embeddings|layers\.0", "dp2"),
    titan_case("unit_not_wrapped_ignored", r"layers\.0.*\n.*each dp rank kept its own", "dp2"),
    titan_case("unit_not_wrapped_ignored", r"layers\.0.*\n.*each dp rank kept its own"),
    titan_case("summed", r"every gradient\n.*2 times \(the size of dp\)", "dp2"),
    titan_case("summed", r"every gradient\n.*2 times \(the size of dp or tp\)"),
    titan_case("halved_again", r"every gradient\n.*1/2", "dp2"),
    titan_case("no_sync", r"gradient|fails", "dp2"),
    of_all(mixer, "down_partial", r"blocks\.1\.down", "tp2", Mixer),
    of_all(mixer, "norm_in_place_of_other", r"blocks\.1\.norm2|fails", "dp2", Mixer),
    of_all(mixer, "norm_in_place_of_other", r"blocks\.1\.norm2", "tp2", Mixer),
    of_all(mixer, "hook_scales", r"blocks\.0\.up", "tp2", Mixer),
    of_all(mixer, "hook_scales", r"blocks\.0\.up", "dp2", Mixer),
    of_all(mixer, "activation_detached", r"blocks\.0\.norm", "dp2", Mixer),
    of_all(mixer, "activation_detached", r"blocks\.0\.norm", "tp2", Mixer),
    of_all(mixer, "summed", r"every gradient\n.*2 times \(the size of dp or tp\)", "dp2,tp2", Mixer),
    of_all(mixer, "bf16", r"inlet|blocks\.0", "dp2", Mixer),
    of_all(mixer, "fsdp_over_tp", r"gradient|fails", "dp2,tp2", Mixer),
    of_all(mixer, "unit_not_wrapped_ignored", r"blocks\.0.*\n.*each dp rank kept its own", "dp2,tp2", Mixer),
    of_all(fsdp, "summed", r"every gradient\n.*2 times \(the size of dp\)", "dp2", GraphNet),
    of_all(fsdp, "unit_not_wrapped_ignored", r"embed.*\n.*each dp rank kept its own", "dp2", GraphNet),
    of_all(fsdp, "halved_again", r"every gradient\n.*1/2", "dp2", GraphNet),
    of_all(ddp, "local_statistics", r"bn1 on rank 0", "dp2", CNN),
    of_all(ddp, "not_wrapped", r"each dp rank kept its own", "dp2", CNN),
    of_all(ddp, "one_rank_frozen", r"conv1\.weight", "dp2", CNN),
    of_all(ddp, "buffers_forgotten", r"bn\d\.running_mean", "dp2", CNN),
    mega("no_f", r"h\.0\.ln_2", 0),
    mega("no_f", r"h\.1\.ln_2", 1),
    mega("no_g", r"h\.0\.(fc_out|drop|ln_1|proj)", 0),
    mega("no_g", r"h\.1\.(fc_out|drop|ln_1|proj)", 1),
    mega("g_sums_twice", r"h\.0\.fc|h\.0\.ln_2", 0),
    mega("g_sums_twice", r"h\.1\.fc|h\.1\.ln_2", 1),
    mega("bias_on_each", r"h\.0\.fc_out", 0),
    mega("bias_on_each", r"h\.1\.fc_out", 1),
    mega("wrong_columns", r"h\.0\.(fc|fc_out)", 0),
    mega("wrong_columns", r"h\.1\.(fc|fc_out)", 1),
    mega("same_columns", r"h\.0\.(fc|fc_out)", 0),
    mega("same_columns", r"h\.1\.(fc|fc_out)", 1),
    mega("all_heads", r"h\.0|fails", 0),
    mega("untied", r"no longer one parameter"),
    mega("untied", r"no longer one parameter", 0, "dp2,tp2", HAND),
    mega("tp_seeds", r"dropout"),
    mega("weight_drawn_anew", r"wpe\.weight"),
    mega("positions_shifted", r"wpe\.weight"),
    mega("no_f", r"h\.1\.ln_2", 1, "dp2,tp2", HAND),
    mega("bias_on_each", r"h\.0\.fc_out", 0, "dp2,tp2", HAND),
    mega("no_g", r"h\.0\.(fc_out|drop|ln_1|proj)", 0, "dp2,tp2", HAND),
    *(
        Case(f"by hand {mesh}: {mistake}", GPT, parallelize, mesh, says, {"step_fn": by_hand(mistake)})
        for mesh, parallelize in (("dp2", nothing), ("dp2,tp2", megatron))
        for mistake, says in (
            ("first_forgotten", r"wte|lm_head"),
            ("others_forgotten", r"each dp rank kept its own"),
            ("not_divided", r"every gradient\n.*2 times \(the size of dp"),
        )
    ),
    of_all(megatron_under_fsdp, "no_f", r"h\.0\.ln_2", "dp2,tp2", GPT),
    of_all(megatron_under_fsdp, "wrong_columns", r"h\.0\.(fc|fc_out)", "dp2,tp2", GPT),
    of_all(megatron_under_fsdp, "bias_on_each", r"h\.0\.fc_out", "dp2,tp2", GPT),
    Case("by hand: over the world", GPT, megatron, "dp2,tp2", "gradient", {"step_fn": by_hand("over_the_world")}),
    Case("pipeline: scaled", Llama, partial(pipeline, mistake="scaled"), "pp2", "loss|gradient", PIPELINE),
    Case(
        "pipeline: unscaled", Llama, partial(pipeline, mistake="unscaled"), "pp2", "every gradient\n.*2 times", PIPELINE
    ),
    Case("same samples", Llama, titan, "dp2", "sample", {"local_batch_fn": same_samples}),
    Case("samples that overlap", Llama, titan, "dp2", "sample", {"local_batch_fn": overlapping}),
    Case("tp ranks with other samples", Llama, titan, "tp2", "sample", {"local_batch_fn": tp_apart}),
    Case("targets of other samples", Llama, titan, "dp2", "loss", {"local_batch_fn": targets_rolled}),
    Case("loss 8 times", Llama, titan, "dp2", "loss", {"step_fn": summed_loss}),
    Case("loss with weight decay", CNN, ddp, "dp2", "loss", {"step_fn": unlike_loss}),
    Case("half of the targets", Llama, titan, "tp2", "loss", {"step_fn": half_the_targets}),
    Case("a mean over counts of their own", Llama, titan, "dp2", "loss", {"step_fn": local_count}),
    *(
        Case(f"gradient of {name} times {factor}", model, also(parallelize, scaled_gradient(name, factor)), mesh, name)
        for model, parallelize, mesh, names in (
            (Llama, titan, "tp2", ("layers.0.attention.wq.weight", "output.weight")),
            (Mixer, mixer, "tp2", ("blocks.1.up.weight", "inlet.bias")),
            (CNN, nothing, "dp1", ("conv2.weight",)),
        )
        for name in names
        for factor in (2.0, 1 + 1e-6)
    ),
    *(
        Case(f"rank 1 has another {name}", model, also(parallelize, rank_one_off(name)), mesh, name)
        for model, parallelize, mesh, name in (
            (Llama, titan, "tp2", "layers.1.ffn_norm.weight"),
            (Llama, titan, "dp2", "output.weight"),
            (Mixer, mixer, "dp2", "outlet.bias"),
            (GPT, megatron, "tp2", "h.0.ln_1.weight"),
        )
    ),
    *(
        Case(f"output of {name}: {kind}", model, also(parallelize, wrong_output(name, change)), mesh, name)
        for model, parallelize, mesh, name in (
            (Llama, titan, "dp2", "layers.0.feed_forward.w2"),
            (Mixer, mixer, "dp2", "blocks.1.norm"),
            (GraphNet, fsdp, "dp2", "message.1"),
            (GPT, megatron, "tp2", "h.1.proj"),
        )
        for kind, change in (("1e-7 more", lambda out: out * (1 + 3e-7)), ("rolled", lambda out: out.roll(1, 0)))
    ),
]
