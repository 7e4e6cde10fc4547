"""What a program that trains on text decides before its ranks meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmm.data.text.text_data import TextData
from mmm.layout import Layout, Techniques, batch_sizes
from mmm.models.definition import check_sizes, of_config
from mmm.parallel.cp.styles import check_context_parallel, resolve_ulysses
from mmm.run.options import DEFAULT_BATCH_SIZE, Duration, Run
from mmm.runtime.ranks import DRY_RUN, whoami
from mmm.trainer.job import Job


def text_job(
    run: Run,
    duration: Duration,
    sizes: Any,
    layout: Layout,
    techniques: Techniques,
    seq_length: int,
    load: Callable[[], TextData],
    *,
    eval_batches: int,
) -> Job:
    """Find the text, and decide on model, batch and steps. Needs no process group.

    Args:
        run, duration: groups of the program's flags.
        sizes: sizes of the model.
        layout: the layout, fitted to the number of ranks.
        techniques: how the model is parallelized on it.
        seq_length: tokens of a sample.
        load: finds the text.
        eval_batches: number of global batches in an evaluation.

    Raises:
        UserError: anything that does not fit.
    """
    # Everything that does not need the text is refused first: to find it may take a download.
    techniques, notes = _with_ulysses(techniques, layout, sizes.n_heads)
    check_context_parallel(techniques, layout)
    check_sizes(sizes, layout, seq_length, techniques.ulysses_size(layout.cp))
    local_batch_size, global_batch_size = batch_sizes(
        run.batch_size, run.global_batch_size, layout.dp, DEFAULT_BATCH_SIZE
    )
    data = load()
    steps_per_epoch = data.train.steps_per_epoch(global_batch_size)
    notes += data.validation_notes(eval_batches, global_batch_size)
    model, sample = of_config(sizes).on_meta(sizes, local_batch_size, seq_length)
    return Job(
        layout=layout,
        techniques=techniques,
        sizes=sizes,
        model=model,
        sample=sample,
        data=data,
        steps=duration.steps(steps_per_epoch),
        notes=tuple(notes),
    )


def _with_ulysses(techniques: Techniques, layout: Layout, n_heads: int) -> tuple[Techniques, list[str]]:
    """`resolve_ulysses` for the ranks of this host, and a note if it has chosen a size."""
    rank = whoami()
    # A dry run has no hosts.
    ranks_per_host = None if rank.source == DRY_RUN else rank.local_world_size
    resolved = resolve_ulysses(techniques, layout, n_heads, ranks_per_host)
    if resolved == techniques:
        return techniques, []
    return resolved, [f"--ulysses {resolved.ulysses}: the most ranks of cp that share a host and divide the heads"]
