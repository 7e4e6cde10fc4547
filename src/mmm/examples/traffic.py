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

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mmm.comparison import worst
from mmm.data.text.tokens import BYTES
from mmm.errors import LayoutError
from mmm.examples import _support as example
from mmm.layout import Layout, Techniques, batch_sizes
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.parallel import build_mesh
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import Partition, partition_model
from mmm.runtime.ranks import whoami
from mmm.traffic.count import count_traffic
from mmm.traffic.formulas import expected_traffic
from mmm.trainer.config.run import BatchOptions
from mmm.trainer.job import Job

LIMIT = 0.05
MICROBATCHES = 4  # of the pipelines


@dataclass(frozen=True, kw_only=True)
class Config:
    """Bytes a step of every layout."""

    model: example.SmallTransformerOptions = example.SmallTransformerOptions(n_layers=4, n_kv_heads=4)
    data: example.PlainTextOptions = example.PlainTextOptions(seq_length=64)
    run: BatchOptions = BatchOptions(dtype="fp32")


class TrafficCase(NamedTuple):
    """A layout, and the techniques on it."""

    name: str
    layout: Layout
    techniques: Techniques = Techniques()


class Sent(NamedTuple):
    """One rank's bytes by axis, counted and expected."""

    counted: dict[str, int]
    formula: dict[str, float]


def cases(ranks: int) -> list[TrafficCase]:
    """Those that the number of ranks allows."""
    gpipe = Techniques(schedule="GPipe", microbatches=MICROBATCHES)
    one_f_one_b = Techniques(schedule="1F1B", microbatches=MICROBATCHES)
    listed = [
        *(TrafficCase(name, Layout(), Techniques(data_parallel=name)) for name in ("ddp", "zero1", "zero2", "fsdp")),
        TrafficCase("tp, seq. sharded", Layout(tp=ranks)),
        TrafficCase("pp, GPipe", Layout(pp=ranks), gpipe),
        TrafficCase("pp, 1F1B", Layout(pp=ranks), one_f_one_b),
        TrafficCase("cp, ring", Layout(cp=ranks), Techniques(cp_style="ring")),
        TrafficCase("cp, ulysses", Layout(cp=ranks), Techniques(cp_style="ulysses")),
    ]
    if ranks % 2 == 0 and ranks > 2:
        listed += [
            TrafficCase("cp, usp", Layout(cp=ranks), Techniques(cp_style="usp", ulysses=2)),
            TrafficCase("hsdp", Layout(dp_replicate=2), Techniques(data_parallel="hsdp")),
            TrafficCase("fsdp × tp", Layout(tp=2)),
            TrafficCase("pp × tp", Layout(pp=2, tp=ranks // 2), one_f_one_b),
        ]
    return [case._replace(layout=case.layout.fit(ranks)) for case in listed]


def on_meta(sizes: TransformerConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(sizes)


def partition_of(case: TrafficCase, sizes: TransformerConfig, size: int, seq_length: int) -> Partition:
    """How the model goes onto a layout. Raises LayoutError where it does not. size: samples of the global batch."""
    sample = torch.zeros(size // case.layout.dp, seq_length, dtype=torch.int64, device="meta")
    return partition_model(on_meta(sizes), transformer_plan(sizes), case.layout, case.techniques, sample)


def measure(
    run: example.Run, case: TrafficCase, partition: Partition, sizes: TransformerConfig, size: int
) -> list[Sent]:
    """The third step on a layout, by rank. A collective. size: samples of the global batch."""
    layout = case.layout
    plan = transformer_plan(sizes)
    mesh = build_mesh(layout, run.device.type, run.options.timeout)
    model = ParallelModel(
        on_meta(sizes), plan, mesh, run.precision, case.techniques, partition, device=run.device, seed=run.seed
    )
    tokens = run.resolved.data.train
    local = size // layout.dp  # samples of this rank
    batch = tokens.batch(0, size, layout.dp_coordinate(run.rank.rank) * local, local).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model.step(batch.inputs, batch.targets, batch.count)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # they send more: a pipeline shapes, DDP how it has packed its gradients
        step()
    with count_traffic(mesh) as traffic:
        step()
    run.log.info("%s, layout %s: rank 0\n%s", case.name, layout, traffic.table())
    formula = expected_traffic(
        on_meta(sizes),
        plan,
        layout,
        case.techniques,
        partition,
        model.modules,
        batch=local,
        seq_length=tokens.seq_length,
        precision=run.precision,
    )
    by_rank: list[Any] = [None] * layout.ranks
    dist.all_gather_object(by_rank, Sent(traffic.by_axis, formula))
    return by_rank


def max_rel_diff(sent: Sent) -> float:
    """The largest relative difference of counted and formula over the axes."""
    axes = {axis for side in (sent.counted, sent.formula) for axis, count in side.items() if count}
    pairs = [(sent.counted.get(axis, 0), sent.formula.get(axis, 0.0)) for axis in axes]
    return max((abs(counted / formula - 1) if formula else float("inf") for counted, formula in pairs), default=0.0)


def table(by_case: Mapping[TrafficCase, Sequence[Sent]]) -> str:
    """A line a layout and axis, of the rank that sends most."""
    lines = [f"{'':18}{'layout':<26}{'axis':<13}{'counted':>12}{'formula':>12}{'differ':>8}"]
    for case, by_rank in by_case.items():
        most = max(by_rank, key=lambda sent: sum(sent.counted.values()))
        for axis, formula in most.formula.items():
            counted = most.counted.get(axis, 0)
            differ = counted / formula - 1
            lines.append(f"{case.name:18}{case.layout!s:<26}{axis:<13}{counted:12,}{formula:12,.0f}{differ:8.2%}")
    return "\n".join(lines)


def train(config: Config) -> bool:
    """Every layout, and the table. Whether all are within 5 % of the formula."""
    ranks = whoami().world_size
    if ranks == 1:
        start = "start with `launch -n 4 --device cpu python3 -m mmm.examples.traffic`"
        raise LayoutError(f"1 rank: there is nobody to send to; {start}")
    sizes = config.model.sizes(BYTES)
    _, size = batch_sizes(config.run.batch_size, config.run.global_batch_size, ranks, default=4)
    data = config.data.load(sizes.vocab_size, config.run.seed)
    data.train.steps_per_epoch(size)  # there is one
    partitions = {}
    left_out = dict[str, LayoutError]()
    for case in cases(ranks):
        try:
            partitions[case] = partition_of(case, sizes, size, config.data.seq_length)
        except LayoutError as error:
            left_out[case.name] = error
    job = Job(layout=Layout().fit(ranks), data=data)
    with example.start_run("traffic", config, job) as run:
        run.describe(model=sizes, global_batch_size=size)
        for name, why in left_out.items():
            run.note(f"{name} left out: {why}")
        sent = {case: measure(run, case, partition, sizes, size) for case, partition in partitions.items()}
        head = f"bytes of a step, on the rank that sends most; {size} samples of {config.data.seq_length} tokens in all"
        run.log.info("%s\n%s", head, table(sent))
        run.describe(traffic={case.name: [one._asdict() for one in by_rank] for case, by_rank in sent.items()})
        largest = worst(max_rel_diff(one) for by_rank in sent.values() for one in by_rank)
        run.log.info("counted and formula differ by %.2f%% at most (allowed: %.0f%%)", 100 * largest, 100 * LIMIT)
    return largest <= LIMIT


if __name__ == "__main__":
    example.run_main(lambda: sys.exit(not train(example.parse(Config, __doc__))))
