"""For examples that train a Transformer on text: their flags, what they decide before their ranks meet, their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch, RandomTokens
from mmm.data.text.corpus import Corpus, read_text_files, standard_library
from mmm.data.text.text_data import TextData
from mmm.data.text.tokens import BYTES, TextTokens
from mmm.errors import ConfigError
from mmm.examples._support.mistakes import for_a_mistake
from mmm.layout import Layout, Techniques, batch_sizes
from mmm.models.llama.model import PRESETS, Transformer, TransformerConfig
from mmm.models.llama.rules import transformer_rules
from mmm.models.rules import refuse, tp_rule
from mmm.run import options
from mmm.run.options import DEFAULT_BATCH_SIZE, DEFAULT_MAX_ITERS, Duration
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.runtime.ranks import whoami
from mmm.trainer.config import Evaluation, Model, Optimizer, Text
from mmm.trainer.job import Job

# Presets that train in seconds on a laptop.
SMALL = {"preset": ("debug", "small", "medium"), "optimizer": ("adamw", "sgd")}
# Flags of the trainers' groups that an example does not have: it shows one technique.
LEFT_OUT = (
    *("model", "dropout", "attention_dropout", "bias", "tie_word_embeddings", "init_from", "save_model"),
    *("dataset", "text_weights", "tokenizer", "token_dtype", "pack", "document_mask"),
    *("max_norm", "warmup", "lr_schedule", "min_lr", "decay", "gamma", "scale_lr", "base_batch_size", "betas"),
    *("weight_decay", "decayed", "on_nan"),
    *("eval_train", "prompt", "fingerprints", "profile", "profile_steps"),
    "tracker",
)
EXPERTS = ("n_experts", "top_k", "expert_dim", "balance_rate")


@dataclass(frozen=True, kw_only=True)
class TensorParallelOptions:
    """Tensor parallelism."""

    tpsize: Annotated[int, "tp"] = 1
    """Number of ranks along tp, over which each matrix is sharded."""


@dataclass(frozen=True, kw_only=True)
class PlainTextConfig:
    """Groups of flags of an example that trains a Transformer on text: on --text byte by byte."""

    model: Model = Model(preset="small")
    data: Text = Text()
    optimizer: Optimizer = Optimizer()
    duration: Duration = Duration()
    run: options.RunFlags = options.RunFlags(plots=True)

    LEFT_OUT: ClassVar[tuple[str, ...]] = (*LEFT_OUT, *EXPERTS)
    UNLISTED: ClassVar = ("own_work",)
    CHOICES: ClassVar[Mapping[str, Any]] = {"preset": PRESETS, "optimizer": ("adamw", "sgd")}


@dataclass(frozen=True, kw_only=True)
class TextConfig(PlainTextConfig):
    """Groups of flags of an example that also validates."""

    evaluation: Evaluation = Evaluation()


def sizes_of(flags: Model) -> TransformerConfig:
    """The sizes of the Transformer that the flags ask for.

    Raises:
        ConfigError: embedding and output of the preset share one weight, which no example shards as one; or the preset
            has experts, whose scores are a softmax, and those of an example are sigmoids.
    """
    preset = PRESETS[flags.preset or "small"]
    if preset.tie_word_embeddings:
        raise ConfigError(
            f"--preset {flags.preset} has one weight for embedding and output, which this program does not keep one: "
            "use mmm.trainer.lm, or another preset"
        )
    if preset.n_experts:
        raise ConfigError(f"--preset {flags.preset} has experts of its own: use mmm.trainer.lm, or another preset")
    sizes = {"vocab_size": BYTES, **flags.sizes()}
    if "dim" in sizes:
        # None lets the width follow dim, unless --ffn_dim says something else.
        sizes = {"ffn_dim": None, **sizes}
    return replace(preset, **sizes)


def load_text(flags: Text, vocab_size: int, seed: int) -> TextData:
    """The tokens to train on, and those to validate on.

    Raises:
        ConfigError: the vocabulary is smaller than the number of different bytes.
        DataError: a text cannot be used.
    """
    if flags.dataset == "random":
        train = RandomTokens(vocab_size, flags.seq_length, seed)
        validation = RandomTokens(vocab_size, flags.seq_length, seed + 1)
        return TextData(train, validation, {"dataset": "random"})
    if vocab_size < BYTES:
        raise ConfigError(f"--vocab_size {vocab_size}: text has {BYTES} different bytes; use at least {BYTES}")
    corpus: Corpus = read_text_files(flags.text) if flags.text else standard_library()
    train_text = TextTokens(corpus.train, flags.seq_length, seed, shuffle=True)
    validation_text = TextTokens(corpus.validation, flags.seq_length, seed, shuffle=False)
    facts = {"dataset": "text", **corpus.describe()}
    # A token is a byte.
    return TextData(train_text, validation_text, facts, bytes_per_token=1.0)


def fit(**axes: int) -> Layout:
    """The layout with these axes for the number of ranks that were started.

    Raises:
        LayoutError: the number of ranks is not a multiple of the product of the axes.
    """
    return Layout(**axes).fit(whoami().world_size)


def resolve_own(
    config: PlainTextConfig,
    layout: Layout,
    techniques: Techniques | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_iters: int = DEFAULT_MAX_ITERS,
) -> Job:
    """Find the text, and decide on model, batch and steps, for an example that parallelizes the model itself.

    Needs no process group.

    Args:
        layout: a layout that is fitted to the number of ranks.
        techniques: the techniques that the example writes out.
        batch_size: default number of samples of a step on each data-parallel coordinate.
        max_iters: default number of steps.

    Raises:
        UserError: something does not fit.
    """
    config = for_a_mistake(config)
    sizes = sizes_of(config.model)
    seq_length = config.data.seq_length
    refuse(transformer_rules(sizes, layout, seq_length, ulysses=1))
    local_batch_size, global_batch_size = batch_sizes(
        config.run.batch_size,
        config.run.global_batch_size,
        layout.dp,
        batch_size,
    )
    data = load_text(config.data, sizes.vocab_size, config.run.seed)
    # Raises where the text has fewer samples than one global batch.
    steps_per_epoch = data.train.steps_per_epoch(global_batch_size)
    notes: list[str] = []
    if isinstance(config, TextConfig):
        notes = data.validation_notes(config.evaluation.eval_batches, global_batch_size)
    # Shapes without memory: each rank later draws the weights that it holds.
    with torch.device("meta"):
        model = Transformer(sizes)
        sample = torch.zeros(local_batch_size, seq_length, dtype=torch.int64)
    return Job(
        layout=layout,
        techniques=techniques or Techniques(),
        sizes=sizes,
        model=model,
        sample=sample,
        data=data,
        steps=config.duration.steps(steps_per_epoch, max_iters),
        optimizer=config.optimizer.optimizer,
        notes=notes,
    )


def check_kv_heads(job: Job) -> None:
    """Raises LayoutError where ranks of tp would share a key/value head, for an example that shards matrices itself."""
    why = "each rank takes whole key/value heads; in mmm.trainer.lm several ranks can share one"
    refuse(tp_rule("n_kv_heads", job.sizes.n_kv_heads, job.layout.tp, why))


def text_steps(
    run: Run,
    job: Job,
    *,
    coordinate: int | None = None,
    place: Mapping[str, int] | None = None,
) -> Iterator[Step]:
    """`Run.steps` of a program that trains on text. Each step has this rank's samples of the global batch.

    Args:
        coordinate: the data-parallel coordinate whose samples these are. Default: this rank's.
        place: further coordinates of each row besides its step, such as ``{"stage": 1}``.
    """
    tokens = job.data.train
    samples = job.global_batch_size
    if coordinate is None:
        coordinate = run.layout.dp_coordinate(run.rank.rank)
    if place is None:
        run.log.info("%d steps of %d × %d tokens", job.steps, samples, tokens.seq_length, stacklevel=2)
    eval_every = None
    if isinstance(run.config, TextConfig):
        eval_every = run.config.evaluation.eval_every
    # A generator: each batch is made when its step begins.
    batches = (job.local_batch(tokens, step, coordinate).to(run.device) for step in range(job.steps))
    return run.steps(
        batches,
        job.steps,
        samples=samples,
        tokens=samples * tokens.seq_length,
        eval_every=eval_every,
        place=place,
    )


def validation_loss(run: Run, job: Job, local_loss: Callable[[Batch], Tensor], *modules: nn.Module) -> float:
    """The mean loss of the first global batches of the validation text. A collective of all ranks.

    Args:
        local_loss: computes this rank's part of the loss, from the samples of its data-parallel coordinate.
        modules: what this rank has of the model.
    """
    batches = [*job.validation_batches(run.config.evaluation.eval_batches, run.rank.rank, job.data.validation)]
    # The last batch of a text may have fewer targets than the others: all sums have the same divisor first.
    divisor = job.sample.numel() * job.layout.dp
    targets = sum(int(batch.count) for batch in batches)
    # Under tp the logits stay sharded over the vocabulary.
    with run.evaluating(*modules), loss_parallel():
        mean = run.mean_loss(local_loss(replace(batch.to(run.device), count=divisor)) for batch in batches)
    return mean * divisor * len(batches) / targets
