"""Tensor parallelism, first by hand and then as a plan: each way against the whole computation.

    launch python3 -m mmm.examples.tensor_parallel

All ranks have the same samples; a matrix is cut over N of them. Rank i holds one part::

      rows      W = ┌ W₀ ┐   Y = X W = Σᵢ Xᵢ Wᵢ       forward    all-reduce: each rank has made a summand of Y
                    └ W₁ ┘   Xᵢ: its columns of X     backward   nothing: ∂Wᵢ = Xᵢᵀ ∂Y and ∂Xᵢ = ∂Y Wᵢᵀ

      columns   A = [ A₀│A₁ ]   Yᵢ = GeLU(X Aᵢ)       forward    all-gather of Y's columns
                                                      backward   all-reduce: each rank has made a summand of ∂X

Both are below, with the calls of ``torch.distributed`` written out. Columns and then rows, as in a feed-forward layer,
need no all-gather: Yᵢ is just what the rows want. That, as a plan, is in ``mmm.examples.tensor_plans``, with two
refinements: a sequence that is cut between the matrices, and a loss on logits that stay cut.

Of each, a line says how far output and gradients are from those of the whole computation. One that is too far ends the
run with exit code 1; --forget_all_reduce shows that it would.

Source: Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019,
section 3.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmm.errors import LayoutError
from mmm.examples.tensor_plans import SEQ, Case, Ways, columns_then_rows, forward_backward, loss_cut, sequence_cut
from mmm.parallel import Layout, build_mesh
from mmm.runtime.process_group import gather_floats
from mmm.runtime.ranks import whoami
from mmm.trainer.flags import run_main
from mmm.trainer.options import BaseOptions, parse
from mmm.trainer.run import start_run

LIMIT = {"fp64": 1e-12, "fp32": 1e-5}


@dataclass(frozen=True, kw_only=True)
class Config(BaseOptions):
    """Tensor parallelism by hand and as a plan; nothing is trained."""

    seed: int = 0
    """Decides the numbers that are computed with."""
    dtype: Literal["fp64", "fp32"] = "fp64"
    forget_all_reduce: bool = False
    """A bug to order: leave out the all-reduce after the rows."""


def rows_by_hand(case: Case, forget: bool = False) -> Ways:
    xi, wi = case.mine(case.x, -1), case.mine(case.w, 0)  # (batch, seq, dim/N), (dim/N, dim)
    y, dxi, dwi = forward_backward(torch.matmul, case.dy, xi, wi)  # backward: a summand has the gradient of the sum
    if not forget:
        dist.all_reduce(y, group=case.group)  # (batch, seq, dim): this rank's summand, then the sum
    whole = forward_backward(torch.matmul, case.dy, case.x, case.w)
    return [y, case.gather(dxi, -1), case.gather(dwi, 0)], whole


def columns_by_hand(case: Case) -> Ways:
    def layer(x: Tensor, a: Tensor) -> Tensor:
        return F.gelu(x @ a)

    ai, dyi = case.mine(case.w, 1), case.mine(case.dy, -1)  # (dim, dim/N), (batch, seq, dim/N)
    yi, dx, dai = forward_backward(layer, dyi, case.x, ai)
    dist.all_reduce(dx, group=case.group)  # (batch, seq, dim): this rank's summand, then the sum
    whole = forward_backward(layer, case.dy, case.x, case.w)
    return [case.gather(yi, -1), dx, case.gather(dai, 1)], whole


def differences(cut: list[Tensor], whole: list[Tensor]) -> list[float]:
    """Of the output, and of the gradients: the largest difference, over the largest number. A collective."""
    plain = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in cut]
    apart = [float((c - w).abs().max() / w.abs().max()) for c, w in zip(plain, whole, strict=True)]
    return [apart[0], max(apart[1:])]


def compare(case: Case, forget_all_reduce: bool = False) -> dict[str, list[float]]:
    """Each way's differences, the largest of any rank. A collective."""
    ways = {
        "rows_by_hand": rows_by_hand(case, forget_all_reduce),
        "columns_by_hand": columns_by_hand(case),
        "columns_then_rows": columns_then_rows(case),
        "sequence_cut": sequence_cut(case),
        "loss_cut": loss_cut(case),
    }
    everyone = {name: gather_floats(differences(*way), case.x.device) for name, way in ways.items()}
    return {name: [max(column) for column in zip(*rows, strict=True)] for name, rows in everyone.items()}


def train(config: Config) -> bool:
    """Try every way. Whether all are right."""
    config.check()
    ranks = whoami().world_size
    if SEQ % ranks:
        raise LayoutError(
            f"{ranks} ranks do not divide the sequence of {SEQ} and the widths: start "
            f"{' or '.join(str(n) for n in range(1, SEQ + 1) if SEQ % n == 0)}"
        )
    layout = Layout(tp=ranks).fit(ranks)
    with start_run("tensor_parallel", config, layout) as run:
        mesh = build_mesh(layout, run.device.type, config.timeout)["tp" if ranks > 1 else "dp_shard"]
        found = compare(Case(mesh, run.device, run.precision.storage, config.seed), config.forget_all_reduce)
        limit = LIMIT[run.precision.name]
        lines = [f"{'':20}{'output':>10}{'gradients':>12}   (allowed: {limit:.0e})"]
        for name, (output, gradient) in found.items():
            verdict = "" if max(output, gradient) <= limit else "   WRONG"
            lines.append(f"{name:20}{output:10.1e}{gradient:12.1e}{verdict}")
        run.log.info("cut over %d ranks, differs from the whole computation by\n%s", ranks, "\n".join(lines))
        if run.record is not None:
            row = {
                f"{name}_{what}": value
                for name, two in found.items()
                for what, value in zip(("output", "gradient"), two, strict=True)
            }
            run.record.update({**row, "allowed": limit})
    return all(value <= limit for two in found.values() for value in two)  # NaN is wrong as well


def main() -> None:
    if not train(parse(Config, __doc__)):
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
