"""Flags of the examples that train a Transformer on text, what they decide before their ranks meet, and their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from mmm.data import Batch
from mmm.errors import LayoutError
from mmm.examples._support.mistakes import for_a_mistake
from mmm.examples._support.options import EvaluationOptions, OptimizerOptions, PlainTextOptions, TransformerOptions
from mmm.layout import Layout, Techniques, batch_sizes
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.run import options
from mmm.run.options import DEFAULT_MAX_ITERS, Duration
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.runtime.ranks import whoami
from mmm.trainer.job import Job


@dataclass(frozen=True, kw_only=True)
class PlainTextConfig:
    """The groups of flags of an example that trains a Transformer on text."""

    model: TransformerOptions = TransformerOptions()
    data: PlainTextOptions = PlainTextOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    duration: Duration = Duration()
    run: options.Run = options.Run(plots=True)

    def sizes(self) -> TransformerConfig:
        """The model asked for."""
        return self.model.sizes()


@dataclass(frozen=True, kw_only=True)
class TextConfig(PlainTextConfig):
    """The groups of flags of an example that also validates."""

    evaluation: EvaluationOptions = EvaluationOptions()


def fit(**axes: int) -> Layout:
    """The layout of these axes for the ranks that there are. Raises LayoutError where their sizes do not multiply to
    it."""
    return Layout(**axes).fit(whoami().world_size)


def resolve_own(
    config: PlainTextConfig,
    layout: Layout,
    techniques: Techniques | None = None,
    batch_size: int = 16,
    max_iters: int = DEFAULT_MAX_ITERS,
) -> Job:
    """For an example that parallelizes the model itself: find the text, and decide on model, batch and steps; needs no
    process group.

    Args:
        layout: fitted to the number of ranks.
        techniques: that the example writes out.
        batch_size: samples a step, per data-parallel coordinate, where no flag says.
        max_iters: steps, where no flag says.

    Raises:
        UserError: anything that does not fit.
    """
    sizes = config.sizes()
    seq_length = config.data.seq_length
    local_batch_size, global_batch_size = batch_sizes(
        config.run.batch_size, config.run.global_batch_size, layout.dp, batch_size
    )
    data = config.data.load(sizes.vocab_size, config.run.seed)
    steps_per_epoch = data.train.steps_per_epoch(global_batch_size)
    notes = []
    if isinstance(config, TextConfig):
        data.check(global_batch_size)
        batches = config.evaluation.eval_batches
        available = data.validation.steps_per_epoch(global_batch_size)
        if available < batches:
            notes.append(f"validation: {available} global batches instead of {batches}, all that the text has")
    with torch.device("meta"):
        model = Transformer(sizes)
        sample = torch.zeros(local_batch_size, seq_length, dtype=torch.int64)
    job = Job(
        layout=layout,
        techniques=techniques or Techniques(),
        sizes=sizes,
        model=model,
        sample=sample,
        data=data,
        steps=config.duration.steps(steps_per_epoch, max_iters),
        optimizer=config.optimizer.optimizer,
        notes=tuple(notes),
    )
    return for_a_mistake(config, job)


def check_tensor_parallel(job: Job) -> None:
    """For an example that shards matrices itself: raises LayoutError where ranks of tp would not have equal parts."""
    sizes = job.sizes
    tp = job.layout.tp
    for name, size in (("n_heads", sizes.n_heads), ("n_kv_heads", sizes.n_kv_heads), ("ffn_dim", sizes.hidden_dim)):
        if size % tp:
            text = f"{name} {size} is not divisible by tp {tp}"
            raise LayoutError(f"{text}: use a divisor, or mmm.trainer.lm, whose ranks can share a key/value head")


def text_steps(
    run: Run, job: Job, *, coordinate: int | None = None, place: Mapping[str, int] | None = None
) -> Iterator[Step]:
    """`Run.steps` of a program that trains on text: each has this rank's samples of the global batch.

    Args:
        coordinate: whose samples these are. Default: this rank's data-parallel coordinate.
        place: what a row says besides its step, such as ``{"stage": 1}``.
    """
    tokens = job.data.train
    samples = job.global_batch_size
    if coordinate is None:
        coordinate = run.layout.dp_coordinate(run.rank.rank)
    if place is None:
        run.log.info("%d steps of %d × %d tokens", job.steps, samples, tokens.seq_length, stacklevel=2)
    return run.steps(
        (job.local_batch(tokens, step, coordinate).to(run.device) for step in range(job.steps)),
        job.steps,
        samples=samples,
        tokens=samples * tokens.seq_length,
        eval_every=run.config.evaluation.eval_every if isinstance(run.config, TextConfig) else None,
        place=place,
    )


def validation_loss(run: Run, job: Job, local_loss: Callable[[Batch], Tensor], *modules: nn.Module) -> float:
    """The mean loss of the first global batches of the validation text. A collective.

    Args:
        local_loss: of the samples of this rank's data-parallel coordinate, this rank's part of the loss.
        modules: what this rank has of the model.
    """
    batches = job.validation_batches(run.config.evaluation.eval_batches, run.rank.rank, run.device)
    with run.evaluating(*modules), loss_parallel():  # under tp the logits stay sharded over the vocabulary
        return run.mean_loss(map(local_loss, batches))
