"""Traffic: the bytes that each way of training sends in a step, counted, beside the formula.

    launch python3 -m mmm.examples.traffic

The same small Transformer takes three steps on each layout that the ranks allow; in the third, all that is passed to a
process group is counted there. Of the rank that sends most, the table has

    counted    by the algorithms that nobody undercuts: a ring's all-reduce, all-gather, …
    formula    what the layout has to send, from the model's shapes alone
    gloo       by the algorithms of gloo, which moves CPU tensors: its reduce-scatter is a whole all-reduce
    sockets    what the kernel says that the rank's sockets have sent in that step

A layout whose counted bytes are more than 5 % off the formula on any rank and axis ends the run with exit code 1.
Formulas and sources: docs/communication.md, `mmm.traffic.formulas`, `mmm.traffic.collective_bytes`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mmm.data.text.tokens import BYTES
from mmm.errors import LayoutError
from mmm.examples import _support as example
from mmm.layout import Layout, Techniques, batch_sizes
from mmm.models.transformer import Transformer, TransformerConfig
from mmm.parallel import build_mesh
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import Partition, partition_model
from mmm.parallel.plans.transformer import transformer_plan
from mmm.runtime.ranks import whoami
from mmm.traffic.formulas import expected_traffic
from mmm.traffic.step_table import Sent, count_step, max_rel_diff, table
from mmm.trainer.config.run import BatchOptions
from mmm.trainer.config.spec import RunSpec

LIMIT = 0.05


@dataclass(frozen=True, kw_only=True)
class Config:
    """Bytes a step of every layout."""

    microbatches: int = 4
    """Of the pipelines."""
    model: example.SmallTransformerOptions = example.SmallTransformerOptions(n_layers=4, n_kv_heads=4)
    data: example.PlainTextOptions = example.PlainTextOptions(seq_length=64)
    run: BatchOptions = BatchOptions(dtype="fp32")


class TrafficCase(NamedTuple):
    """A layout, and the techniques on it."""

    name: str
    layout: Layout
    techniques: Techniques = Techniques()


def cases(ranks: int, microbatches: int) -> list[TrafficCase]:
    """Those that the number of ranks allows."""
    pipe = {name: Techniques(schedule=name, microbatches=microbatches) for name in ("GPipe", "1F1B")}
    found = [TrafficCase(name, Layout(), Techniques(data_parallel=name)) for name in ("ddp", "zero1", "zero2", "fsdp")]
    found.append(TrafficCase("tp, seq. sharded", Layout(tp=ranks)))
    found += [TrafficCase(f"pp, {name}", Layout(pp=ranks), techniques) for name, techniques in pipe.items()]
    found += [
        TrafficCase(f"cp, {style}", Layout(cp=ranks), Techniques(cp_style=style)) for style in ("ring", "ulysses")
    ]
    if ranks % 2 == 0 and ranks > 2:
        found.append(TrafficCase("cp, usp", Layout(cp=ranks), Techniques(cp_style="usp", ulysses=2)))
        found.append(TrafficCase("hsdp", Layout(dp_replicate=2), Techniques(data_parallel="hsdp")))
        found.append(TrafficCase("fsdp × tp", Layout(tp=2)))
        found.append(TrafficCase("pp × tp", Layout(pp=2, tp=ranks // 2), pipe["1F1B"]))
    return [case._replace(layout=case.layout.fit(ranks)) for case in found]


def on_meta(sizes: TransformerConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(sizes)


def measure(
    run: example.Run, case: TrafficCase, partition: Partition, sizes: TransformerConfig, size: int
) -> list[Sent]:
    """The third step on a layout, by rank. A collective. size: samples of the global batch."""
    layout, plan, seed = case.layout, transformer_plan(sizes), run.seed
    mesh, model = build_mesh(layout, run.device.type, run.options.timeout), on_meta(sizes)
    trained = ParallelModel(
        on_meta(sizes), plan, mesh, run.precision, case.techniques, partition, device=run.device, seed=seed
    )
    tokens, local = run.resolved.data.train, size // layout.dp
    of_batch: dict[str, Any] = {"batch": local, "seq_length": tokens.seq_length, "precision": run.precision}
    formula = expected_traffic(model, plan, layout, case.techniques, partition, trained.modules, **of_batch)
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
    batch = tokens.batch(0, size, layout.dp_coordinate(run.rank.rank) * local, local).to(run.device)

    def step() -> None:
        trained.step(batch.inputs, batch.targets, batch.count)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # they send more: a pipeline shapes, DDP how it has packed its gradients
        step()
    by_rank, rank_0 = count_step(step, mesh, formula)
    run.log.info("%s, layout %s: rank 0\n%s", case.name, layout, rank_0.table())
    return by_rank


def train(config: Config) -> bool:
    """Every layout, and the table. Whether all are within 5 % of the formula."""
    ranks, sizes = whoami().world_size, config.model.sizes(BYTES)
    if ranks == 1:
        start = "start with `launch -n 4 --device cpu python3 -m mmm.examples.traffic`"
        raise LayoutError(f"1 rank: there is nobody to send to; {start}")
    _, size = batch_sizes(config.run.batch_size, config.run.global_batch_size, ranks, default=4)
    data = config.data.load(sizes.vocab_size, config.run.seed)
    model, plan = on_meta(sizes), transformer_plan(sizes)
    data.train.steps_per_epoch(size)  # there is one
    partitions, why_not = {}, {}
    for case in cases(ranks, config.microbatches):
        sample = torch.zeros(size // case.layout.dp, config.data.seq_length, dtype=torch.int64, device="meta")
        try:
            partitions[case] = partition_model(model, plan, case.layout, case.techniques, sample)
        except LayoutError as error:
            why_not[case] = error
    if not partitions:
        raise next(iter(why_not.values()))
    resolved = RunSpec(layout=Layout().fit(ranks), data=data)
    with example.start_run(
        "traffic", config, resolved, [example.Agreement(), example.StartUp(), example.Record()]
    ) as run:
        run.describe(model=sizes, global_batch_size=size)
        for case, why in why_not.items():
            run.note(f"{case.name} left out: {why}")
        found = {case: measure(run, case, partition, sizes, size) for case, partition in partitions.items()}
        worst = {case: max(map(max_rel_diff, by_rank)) for case, by_rank in found.items()}
        text = table({(case.name, str(case.layout)): by_rank for case, by_rank in found.items()})
        head = f"bytes of a step, on the rank that sends most; {size} samples of {config.data.seq_length} tokens in all"
        run.log.info("%s\n%s", head, text)
        run.describe(traffic={case.name: [step._asdict() for step in by_rank] for case, by_rank in found.items()})
        wrong = [case.name for case in found if not worst[case] <= LIMIT]
        most = f"counted and formula differ by {max(worst.values()):.2%} at most, of any layout, axis and rank"
        run.log.info("%s (allowed: %.0f %%)%s", most, 100 * LIMIT, f": {', '.join(wrong)}" if wrong else "")
    return not wrong


if __name__ == "__main__":
    example.run_main(lambda: sys.exit(not train(example.parse(Config, __doc__))))
