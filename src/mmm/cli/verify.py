"""``mmm verify``: does a parallel program compute what its model does on one device?"""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """\
MODULE:NAME is a function of yours, looked for in the working directory too:

  MODEL          make_model() -> nn.Module, on the CPU
  --parallelize  parallelize(model, mesh) -> what the ranks run, or None where it changes the model in place
  --batch        make_batch() -> the global batch: a tensor, or a tuple, list or dict of tensors, samples along dim 0
  --step         step(model, batch) -> the mean loss; with a third parameter it gets the mesh, None on one device

Exit code: 0 the same, 1 not the same, 2 not comparable, or a wrong argument. docs/verify.md says more.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmm verify", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="MODULE:NAME of what makes the model on one device")
    parser.add_argument("--parallelize", metavar="MODULE:NAME", required=True, help="what makes it parallel")
    parser.add_argument("--batch", metavar="MODULE:NAME", required=True, help="what makes the global batch")
    parser.add_argument("--step", metavar="MODULE:NAME", help="default: cross-entropy, or mean squares, of a pair")
    parser.add_argument(
        "--mesh", nargs="+", default=["dp2"], help="axes with sizes, such as dp2,tp2; one or more meshes"
    )
    parser.add_argument(
        "--batch_axes",
        "--batch-axes",
        nargs="*",
        metavar="AXIS",
        help="the axes whose ranks have different samples; default: those called dp, data, fsdp, …",
    )
    parser.add_argument(
        "--local_batch",
        "--local-batch",
        metavar="MODULE:NAME",
        help="(batch, mesh) -> a rank's batch, where it is no equal part of the samples",
    )
    parser.add_argument("--optimizer", metavar="MODULE:NAME", help="parameters -> optimizer; default: SGD")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that the ranks may take (120)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the verdict with versions, hashes and command")
    parser.add_argument("--badge", metavar="FILE", type=Path, help="write it as a picture of one line (SVG)")
    return parser


def main(argv: list[str]) -> int:
    """Verify on one or more meshes. Returns the largest exit code of them. Raises UserError."""
    args = _parser().parse_args(argv)
    from mmm.verify.run import verify_subject  # imports torch
    from mmm.verify.subject import load_function, make_subject
    from mmm.verify.verdict import Verdict, write_badge, write_json

    def named(spec: str | None, flag: str):  # type: ignore[no-untyped-def]
        return None if spec is None else load_function(spec, flag)

    subjects = [
        make_subject(
            load_function(args.model, "MODEL"),
            load_function(args.parallelize, "--parallelize"),
            load_function(args.batch, "--batch"),
            named(args.step, "--step"),
            mesh,
            batch_axes=args.batch_axes,
            local_batch_fn=named(args.local_batch, "--local_batch"),
            optimizer_fn=named(args.optimizer, "--optimizer"),
        )
        for mesh in args.mesh
    ]
    verdicts: list[Verdict] = []
    for subject in subjects:
        verdict = verify_subject(subject, args.timeout)
        print(verdict, flush=True)
        if verdict.details:
            print(verdict.details.rstrip(), flush=True)
        verdicts.append(verdict)
    worst = max(verdicts, key=lambda verdict: verdict.exit_code)
    if args.json is not None:
        write_json(verdicts, subjects[-1], args.json)
    if args.badge is not None:
        write_badge(worst, [verdict.layout for verdict in verdicts], args.badge)
    return worst.exit_code
