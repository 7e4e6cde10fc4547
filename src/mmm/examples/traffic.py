"""Traffic: the bytes that each way of training sends in a step, counted, beside the formula.

    launch python3 -m mmm.examples.traffic

The same small Transformer takes three steps on each layout that the ranks allow; in the third, all that is passed to a
process group is counted there. Of the rank that sends most, the table has

    counted    by the algorithms that nobody undercuts: a ring's all-reduce, all-gather, …
    formula    what the layout has to send, from the model's shapes alone

A layout whose counted bytes are more than 5 % off the formula on any rank and axis ends the run with exit code 1.
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
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.parallel import build_mesh
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import partition_model
from mmm.run import options
from mmm.runtime.ranks import whoami
from mmm.traffic.count import count_traffic
from mmm.traffic.formulas import expected_traffic
from mmm.trainer.job import Job

LIMIT = 0.05
MICROBATCHES = 4  # of the pipelines


@dataclass(frozen=True, kw_only=True)
class Config:
    """Bytes a step of every layout."""

    LEFT_OUT: ClassVar = ("summary", "log_every", "plots")
    CHOICES: ClassVar = {"preset": example.SMALL}
    model: example.TransformerOptions = example.TransformerOptions(preset="debug", n_layers=4, n_kv_heads=4)
    data: example.PlainTextOptions = example.PlainTextOptions(seq_length=64)
    run: options.Run = options.Run(dtype="fp32")


class Sent(NamedTuple):
    """One rank's bytes by axis, counted and expected."""

    counted: dict[str, int]
    formula: dict[str, float]


def cases(ranks: int) -> dict[str, tuple[Layout, Techniques]]:
    """The layouts that the number of ranks allows, and the techniques on them."""
    gpipe = Techniques(schedule="GPipe", microbatches=MICROBATCHES)
    one_f_one_b = Techniques(schedule="1F1B", microbatches=MICROBATCHES)
    listed = {name: (Layout(), Techniques(data_parallel=name)) for name in ("ddp", "zero1", "zero2", "fsdp")}
    listed |= {
        "tp, seq. sharded": (Layout(tp=ranks), Techniques()),
        "pp, GPipe": (Layout(pp=ranks), gpipe),
        "pp, 1F1B": (Layout(pp=ranks), one_f_one_b),
        "cp, ring": (Layout(cp=ranks), Techniques(cp_style="ring")),
        "cp, ulysses": (Layout(cp=ranks), Techniques(cp_style="ulysses")),
    }
    if ranks % 2 == 0 and ranks > 2:
        listed |= {
            "cp, usp": (Layout(cp=ranks), Techniques(cp_style="usp", ulysses=2)),
            "hsdp": (Layout(dp_replicate=2), Techniques(data_parallel="hsdp")),
            "fsdp × tp": (Layout(tp=2), Techniques()),
            "pp × tp": (Layout(pp=2, tp=ranks // 2), one_f_one_b),
        }
    return {name: (layout.fit(ranks), techniques) for name, (layout, techniques) in listed.items()}


def job_of(layout: Layout, techniques: Techniques, sizes: TransformerConfig, samples: int, data: TextData) -> Job:
    """How the model goes onto a layout. Raises LayoutError where it does not. samples: of the global batch."""
    plan = transformer_plan(sizes)
    with torch.device("meta"):
        model = Transformer(sizes)
        sample = torch.zeros(samples // layout.dp, data.train.seq_length, dtype=torch.int64)
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
    """The third step on a layout, by rank. A collective."""
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

    for _ in range(2):  # they send more: a pipeline shapes, DDP how it has packed its gradients
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
    """The largest relative difference of counted and formula over the axes."""
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
    """A line a layout and axis, of the rank that sends most."""
    lines = [f"{'':18}{'layout':<26}{'axis':<13}{'counted':>12}{'formula':>12}{'differ':>8}"]
    for name, by_rank in sent.items():
        most = max(by_rank, key=lambda rank: sum(rank.counted.values()))
        for axis, formula in most.formula.items():
            counted = most.counted.get(axis, 0)
            text = f"{name:18}{layouts[name]!s:<26}{axis:<13}{counted:12,}{formula:12,.0f}"
            lines.append(f"{text}{counted / formula - 1:8.2%}")
    return "\n".join(lines)


def train(config: Config) -> bool:
    """Every layout, and the table. Whether all are within 5 % of the formula."""
    ranks = whoami().world_size
    if ranks == 1:
        start = "start with `launch -n 4 --device cpu python3 -m mmm.examples.traffic`"
        raise LayoutError(f"1 rank: there is nobody to send to; {start}")
    sizes = config.model.sizes()
    _, samples = batch_sizes(config.run.batch_size, config.run.global_batch_size, ranks, default=4)
    data = config.data.load(sizes.vocab_size, config.run.seed)
    data.train.steps_per_epoch(samples)  # there is one
    jobs: dict[str, Job] = {}
    left_out: dict[str, LayoutError] = {}
    for name, (layout, techniques) in cases(ranks).items():
        try:
            jobs[name] = job_of(layout, techniques, sizes, samples, data)
        except LayoutError as error:
            left_out[name] = error
    with example.start_run("traffic", config, Job(layout=Layout().fit(ranks), data=data)) as run:
        run.describe(model=sizes, global_batch_size=samples)
        for name, why in left_out.items():
            run.note(f"{name} left out: {why}")
        sent = {name: measure(run, name, job) for name, job in jobs.items()}
        lines = table({name: job.layout for name, job in jobs.items()}, sent)
        tokens = config.data.seq_length
        run.log.info(
            "bytes of a step, on the rank that sends most; %d samples of %d tokens in all\n%s", samples, tokens, lines
        )
        run.describe(traffic={name: [rank._asdict() for rank in by_rank] for name, by_rank in sent.items()})
        largest = worst(max_rel_diff(rank) for by_rank in sent.values() for rank in by_rank)
        run.log.info("counted and formula differ by %.2f%% at most (allowed: %.0f%%)", 100 * largest, 100 * LIMIT)
    return largest <= LIMIT


if __name__ == "__main__":
    example.main(train, Config, __doc__)
