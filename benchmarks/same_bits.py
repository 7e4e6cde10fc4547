"""The tables of docs/exact.md: the same bits on every mesh, and what they cost.

    python benchmarks/same_bits.py bits [--steps 20] [--ranks 8]
    python benchmarks/same_bits.py cost [--dim 256] [--pairs 3]

bits: trains two small models in three data types on every layout of `LAYOUTS`, on forked ranks of this host, and
compares the SHA-256 of all weights, all losses and all norms with those of one rank. Exit code 1 if one differs.
cost: CPU seconds of a step of an exact run and of an ordinary one, in turn, on the same layout.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from mmm.data import RandomTokens
from mmm.errors import UserError
from mmm.layout import Layout, Techniques
from mmm.models.definition import find
from mmm.models.gpt.model import GPTConfig
from mmm.models.llama.model import TransformerConfig
from mmm.optim.adamw import make_optimizer
from mmm.parallel import build_mesh, partition_model
from mmm.parallel.dp.data_parallel import needs_no_fsdp
from mmm.parallel.exact.trees import sum_near
from mmm.parallel.local import unsharded
from mmm.parallel.parallel_model import ParallelModel
from mmm.runtime.device import choose_precision
from mmm_verify.ranks.pool import RankPool

CPU = torch.device("cpu")
# Of a global batch.
SAMPLES = 8
SEQ = 16
# Odd sizes on purpose: a shard is not a multiple of what a vector register has, and shards differ in size.
TRANSFORMER = TransformerConfig(dim=48, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=100, vocab_size=96)
GPT = GPTConfig(dim=48, n_layers=2, n_heads=8, vocab_size=96, block_size=SEQ, bias=True)
MODELS = {"llama": TRANSFORMER, "gpt": GPT}
DTYPES = ("fp32", "bf16", "fp64")


@dataclass(frozen=True)
class Case:
    """A training: what it computes, and on which layout.

    Attributes:
        model: a key of `MODELS`.
        dtype: a key of `DTYPES`.
        exact: number of lanes. None: an ordinary run.
        sizes: sizes of the model. None: those of `MODELS`.
    """

    model: str = "llama"
    dtype: str = "fp32"
    exact: int | None = 8
    layout: Layout = Layout(dp_shard=1)
    techniques: dict[str, Any] = field(default_factory=dict)
    steps: int = 20
    sizes: Any = None
    seq: int = SEQ


@dataclass(frozen=True)
class Bits:
    """What is left of a training.

    Attributes:
        weights: SHA-256 of the full weights, by name.
        losses: the loss of each step.
        norms: the gradient's norm of each step, before clipping.
        seconds: CPU seconds of this rank in each step.
    """

    weights: dict[str, str]
    losses: list[float]
    norms: list[float]
    seconds: list[float]

    @property
    def digest(self) -> str:
        """SHA-256 of all weights, losses and norms."""
        hexadecimal = [value.hex() for value in self.losses + self.norms]
        text = " ".join([*self.weights.values(), *hexadecimal])
        return hashlib.sha256(text.encode()).hexdigest()


def partitioned(case: Case) -> tuple[Any, Any, Any]:
    """The model on the meta device, its plan, and its partition. Raises UserError if the case is refused."""
    definition = find(case.model)
    sizes = case.sizes or MODELS[case.model]
    model, sample = definition.on_meta(sizes, SAMPLES // case.layout.dp, case.seq)
    plan = definition.plan(sizes)
    techniques = Techniques(exact=case.exact, **case.techniques)
    return model, plan, partition_model(model, plan, case.layout, techniques, sample, case.dtype)


def train(rank: Any, case: Case) -> Bits:
    """Train on this rank of a layout, clipped AdamW. A collective of all ranks."""
    torch.set_num_threads(1)
    layout = case.layout
    precision = choose_precision(case.dtype, CPU)
    techniques = Techniques(exact=case.exact, **case.techniques)
    model, plan, partition = partitioned(case)
    local_batch = SAMPLES // layout.dp
    mesh = build_mesh(layout, "cpu")
    if needs_no_fsdp(layout, precision.mixed, techniques):
        mesh = replace(mesh, no_data_parallel=True)
    parallel = ParallelModel(model, plan, mesh, precision, techniques, partition, device=CPU, seed=0)
    optimizer = make_optimizer("adamw", parallel.parameters(), 1e-3, exact=case.exact is not None)
    tokens = RandomTokens((case.sizes or MODELS[case.model]).vocab_size, case.seq, 0)
    first_sample = layout.dp_coordinate(rank.rank) * local_batch
    losses = []
    norms = []
    seconds = []
    for step in range(case.steps):
        began = time.process_time()
        batch = tokens.batch(step, SAMPLES, first_sample, local_batch)
        loss = parallel.forward_backward(batch)
        norm = parallel.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
        # A rank has the loss of its samples, and of a pipeline only the last stage.
        by_rank = [torch.empty_like(loss) for _ in range(layout.ranks)]
        dist.all_gather(by_rank, loss)
        losses.append(float(sum_near([by_rank[of_loss] for of_loss in layout.loss_ranks()])))
        norms.append(float(norm))
    weights = {}
    for name, parameter in parallel.named_parameters():
        full = unsharded(parameter.detach()).contiguous()
        # NumPy has no bfloat16, so bytes are taken of every type.
        content = full.view(-1).view(torch.uint8).numpy().tobytes()
        weights[name] = hashlib.sha256(content).hexdigest()
    if layout.pp > 1:
        # Each stage has the weights of its layers.
        for of_stage in mesh.gather("pp", weights):
            weights |= of_stage
    return Bits(dict(sorted(weights.items())), losses, norms, seconds)


# Lanes, layout and techniques of each row of the table. The first is one rank.
ROWS: tuple[tuple[int, Layout, dict[str, Any]], ...] = (
    (8, Layout(dp_shard=1), {}),
    (8, Layout(dp_shard=2), {}),
    (8, Layout(dp_shard=4), {}),
    (8, Layout(dp_shard=8), {}),
    (8, Layout(dp_replicate=2, dp_shard=2), {"data_parallel": "hsdp"}),
    (8, Layout(dp_replicate=4, dp_shard=2), {"data_parallel": "hsdp"}),
    (8, Layout(pp=2, dp_shard=1), {}),
    (8, Layout(pp=2, dp_shard=1), {"schedule": "GPipe"}),
    (8, Layout(pp=2, dp_shard=2), {}),
    (8, Layout(pp=4, dp_shard=2), {}),
)


# Lanes and layout of each row of the table of costs.
COSTS: tuple[tuple[int, Layout], ...] = (
    (1, Layout(dp_shard=1)),
    (4, Layout(dp_shard=1)),
    (8, Layout(dp_shard=1)),
    (2, Layout(dp_shard=2)),
    (8, Layout(dp_shard=2)),
    (4, Layout(dp_shard=4)),
    (8, Layout(pp=2, dp_shard=1)),
)


def table_of_bits(pool: RankPool, steps: int, most_ranks: int) -> bool:
    """Print the table. Returns whether all bits are equal."""
    print("| `--exact` | layout | model | " + " | ".join(DTYPES) + " |")
    print("| --- | --- | --- |" + " --- |" * len(DTYPES))
    reference: dict[tuple[str, str], Bits] = {}
    all_equal = True
    for exact, layout, techniques in ROWS:
        if layout.ranks > most_ranks:
            continue
        for model in MODELS:
            cells = []
            for dtype in DTYPES:
                case = Case(model, dtype, exact, layout, techniques, steps)
                try:
                    partitioned(case)
                except UserError:
                    cells.append("refused")
                    continue
                bits = pool.run(train, layout.ranks, case)[0]
                one_rank = reference.setdefault((model, dtype), bits)
                cells.append(cell(bits, one_rank))
                all_equal = all_equal and bits.digest == one_rank.digest
            name = " ".join([str(layout), *techniques.values()])
            print(f"| {exact} | {name} | {model} | " + " | ".join(cells) + " |", flush=True)
    return all_equal


def cell(bits: Bits, reference: Bits) -> str:
    """The first digits of the SHA-256, and what differs from one rank."""
    if bits.digest == reference.digest:
        return f"`{bits.digest[:10]}`"
    different = [name for name, digest in bits.weights.items() if reference.weights.get(name) != digest]
    return f"**{len(different)} of {len(bits.weights)} tensors differ**"


def table_of_cost(pool: RankPool, dim: int, pairs: int) -> None:
    """Print CPU seconds of a step, of all ranks together: exact and ordinary runs in turn."""
    sizes = TransformerConfig(dim=dim, n_layers=2, n_heads=8, n_kv_heads=4, vocab_size=1024)
    print("| layout | `--exact` | ordinary, s | exact, s | exact / ordinary |")
    print("| --- | --- | --- | --- | --- |")
    for exact, layout in COSTS:
        case = Case(exact=exact, layout=layout, steps=4, sizes=sizes, seq=128)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(pairs):
            for is_exact in (False, True):
                of_pair = replace(case, exact=exact if is_exact else None)
                by_rank = pool.run(train, layout.ranks, of_pair)
                # The first step is warm-up.
                steps = [sum(bits.seconds[step] for bits in by_rank) for step in range(1, case.steps)]
                seconds[is_exact].append(statistics.median(steps))
        ordinary, with_lanes = (statistics.median(seconds[is_exact]) for is_exact in (False, True))
        ratios = [second / first for first, second in zip(seconds[False], seconds[True], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {case.layout} | {exact} | {ordinary:.2f} | {with_lanes:.2f} | {ratio} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("bits", "cost"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=8, help="leave out layouts of more ranks")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    pool = RankPool()
    try:
        if args.table == "bits":
            return int(not table_of_bits(pool, args.steps, args.ranks))
        table_of_cost(pool, args.dim, args.pairs)
        return 0
    finally:
        pool.close()


if __name__ == "__main__":
    sys.exit(main())
