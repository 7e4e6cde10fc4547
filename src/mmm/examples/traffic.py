"""Traffic: the bytes that each way of training sends in a step, counted and compared with a formula.

    launch python3 -m mmm.examples.traffic

The same small Transformer takes three steps on each layout that the number of ranks allows. In the third step all that
is passed to a process group is counted. For the rank that sends most, the table shows

    counted    the bytes that the best known algorithms send for these calls: a ring's all-reduce, all-gather, …
    formula    the bytes that the layout has to send, computed from nothing but the model's shapes

If the counted bytes of a layout are more than 5 % off the formula, on any rank and axis, the run ends with exit code 1.
Formulas and sources: docs/communication.md, `mmm.traffic.formulas`, `mmm.parallel.collective_bytes`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from mmm.comparison import worst
from mmm.data.text.text_data import TextData
from mmm.errors import LayoutError
from mmm.examples import _support as example
from mmm.layout import Layout, Techniques, batch_sizes
from mmm.models.definition import of_config
from mmm.models.llama.model import TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.models.llama.rules import transformer_rules
from mmm.models.rules import refuse
from mmm.parallel import build_mesh
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import partition_model
from mmm.run import options
from mmm.runtime.ranks import whoami
from mmm.traffic.count import count_traffic
from mmm.traffic.formulas import expected_traffic
from mmm.trainer.job import Job

# Largest relative difference of counted bytes and formula that is allowed.
LIMIT = 0.05
MICROBATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Config:
    """Count the bytes of a step on every layout."""

    LEFT_OUT: ClassVar = (*example.PlainTextConfig.LEFT_OUT, "summary", "log_every", "plots")
    CHOICES: ClassVar = example.SMALL
    model: example.Model = example.Model(preset="debug", n_layers=4, n_kv_heads=4)
    data: example.Text = example.Text(seq_length=64)
    run: options.RunFlags = options.RunFlags(dtype="fp32")


class Sent(NamedTuple):
    """Bytes that one rank sends in a step, by axis.

    Attributes:
        counted: bytes of the calls that it made.
        formula: bytes that the formula expects.
    """

    counted: dict[str, int]
    formula: dict[str, float]


def cases(ranks: int) -> dict[str, tuple[Layout, Techniques]]:
    """The layouts that this number of ranks allows, and the techniques on them, by the name in the table."""
    gpipe = Techniques(schedule="GPipe", microbatches=MICROBATCHES)
    one_f_one_b = Techniques(schedule="1F1B", microbatches=MICROBATCHES)
    listed = {
        "ddp": (Layout(), Techniques(data_parallel="ddp")),
        "zero1": (Layout(), Techniques(data_parallel="zero1")),
        "zero2": (Layout(), Techniques(data_parallel="zero2")),
        "fsdp": (Layout(), Techniques(data_parallel="fsdp")),
        "tp, seq. sharded": (Layout(tp=ranks), Techniques()),
        "pp, GPipe": (Layout(pp=ranks), gpipe),
        "pp, 1F1B": (Layout(pp=ranks), one_f_one_b),
        "cp, ring": (Layout(cp=ranks), Techniques(cp_style="ring")),
        "cp, ulysses": (Layout(cp=ranks), Techniques(cp_style="ulysses")),
    }
    # Two axes of at least 2 ranks each.
    if ranks % 2 == 0 and ranks > 2:
        listed["cp, usp"] = (Layout(cp=ranks), Techniques(cp_style="usp", ulysses=2))
        listed["hsdp"] = (Layout(dp_replicate=2), Techniques(data_parallel="hsdp"))
        listed["fsdp × tp"] = (Layout(tp=2), Techniques())
        listed["pp × tp"] = (Layout(pp=2, tp=ranks // 2), one_f_one_b)
    # The ranks that a layout leaves are data parallel.
    return {name: (layout.fit(ranks), techniques) for name, (layout, techniques) in listed.items()}


def job_of(
    layout: Layout,
    techniques: Techniques,
    sizes: TransformerConfig,
    samples: int,
    data: TextData,
) -> Job:
    """Decide how the model goes onto a layout. Needs no process group.

    Args:
        samples: number of samples in the global batch.

    Raises:
        LayoutError: the model does not go onto the layout.
    """
    plan = transformer_plan(sizes)
    model, sample = of_config(sizes).on_meta(sizes, samples // layout.dp, data.train.seq_length)
    return Job(
        layout=layout,
        techniques=techniques,
        sizes=sizes,
        model=model,
        sample=sample,
        plan=plan,
        partition=partition_model(model, plan, layout, techniques, sample),
        data=data,
    )


def measure(run: example.Run, name: str, job: Job) -> list[Sent]:
    """Count the third step on a layout. A collective of all ranks.

    Returns:
        What each rank sent.
    """
    layout = job.layout
    mesh = build_mesh(layout, run.device.type, run.options.timeout)
    model = ParallelModel(
        copy.deepcopy(job.model),
        job.plan,
        mesh,
        run.precision,
        job.techniques,
        job.partition,
        device=run.device,
        seed=run.seed,
    )
    batch = job.local_batch(job.data.train, 0, layout.dp_coordinate(run.rank.rank)).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model.forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()

    # The first steps send more: a pipeline its shapes, and DDP how it has packed its gradients into buckets.
    step()
    step()
    with count_traffic(mesh) as traffic:
        step()
    run.log.info("%s, layout %s: rank 0\n%s", name, layout, traffic.table())
    formula = expected_traffic(
        job.model,
        job.plan,
        layout,
        job.techniques,
        job.partition,
        model.modules,
        batch=job.local_batch_size,
        seq_length=job.data.train.seq_length,
        precision=run.precision,
    )
    by_rank: list[Any] = [None] * layout.ranks
    dist.all_gather_object(by_rank, Sent(traffic.by_axis, formula))
    return by_rank


def max_rel_diff(sent: Sent) -> float:
    """The largest relative difference of counted and formula over the axes; inf where only counted is not 0."""
    differences = [0.0]
    for axis in sent.counted.keys() | sent.formula.keys():
        counted = sent.counted.get(axis, 0)
        formula = sent.formula.get(axis, 0.0)
        if formula:
            differences.append(abs(counted / formula - 1))
        elif counted:
            differences.append(math.inf)
    return worst(differences)


def table(layouts: Mapping[str, Layout], sent: Mapping[str, Sequence[Sent]]) -> str:
    """The table: a line per layout and axis, for the rank that sends most.

    Args:
        layouts: by name.
        sent: what each rank sent, by name of the layout.
    """
    lines = ["                  layout                    axis              counted     formula  differ"]
    for name, by_rank in sent.items():
        most = max(by_rank, key=lambda rank: sum(rank.counted.values()))
        for axis, formula in most.formula.items():
            counted = most.counted.get(axis, 0)
            text = f"{name:18}{layouts[name]!s:<26}{axis:<13}{counted:12,}{formula:12,.0f}"
            lines.append(f"{text}{counted / formula - 1:8.2%}")
    return "\n".join(lines)


def train(config: Config) -> bool:
    """Count every layout, and log the table. Returns whether all are within 5 % of the formula."""
    ranks = whoami().world_size
    if ranks == 1:
        raise LayoutError(
            "1 rank: there is nobody to send to; start with `launch -n 4 --device cpu python3 -m mmm.examples.traffic`"
        )
    sizes = example.sizes_of(config.model)
    # What no layout takes. A layout that does not take the sizes is left out below.
    refuse(transformer_rules(sizes, Layout(), config.data.seq_length, ulysses=1))
    _, samples = batch_sizes(config.run.batch_size, config.run.global_batch_size, ranks, default=4)
    data = example.load_text(config.data, sizes.vocab_size, config.run.seed)
    # Raises where the text has fewer samples than one global batch.
    data.train.steps_per_epoch(samples)
    jobs: dict[str, Job] = {}
    left_out: dict[str, LayoutError] = {}
    for name, (layout, techniques) in cases(ranks).items():
        try:
            jobs[name] = job_of(layout, techniques, sizes, samples, data)
        except LayoutError as error:
            left_out[name] = error
    with example.start_run("traffic", config, Job(layout=Layout().fit(ranks), data=data)) as run:
        run.describe(model=sizes, global_batch_size=samples)
        for name, reason in left_out.items():
            run.note(f"{name} left out: {reason}")
        sent = {name: measure(run, name, job) for name, job in jobs.items()}
        layouts = {name: job.layout for name, job in jobs.items()}
        run.log.info(
            "bytes of a step, on the rank that sends most; %d samples of %d tokens in all\n%s",
            samples,
            config.data.seq_length,
            table(layouts, sent),
        )
        for_record = {}
        differences: list[float] = []
        for name, by_rank in sent.items():
            for_record[name] = [rank._asdict() for rank in by_rank]
            differences += map(max_rel_diff, by_rank)
        run.describe(traffic=for_record)
        largest = worst(differences)
        run.log.info(
            "counted and formula differ by %.2f%% at most (allowed: %.0f%%)",
            100 * largest,
            100 * LIMIT,
        )
    return largest <= LIMIT


if __name__ == "__main__":
    example.main(train, Config, __doc__)
