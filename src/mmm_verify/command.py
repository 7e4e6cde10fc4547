"""``mmm-verify``: does a parallel program compute what its model does on one device?"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mmm_verify.errors import ConfigError, is_for_user

if TYPE_CHECKING:
    from mmm_verify.subject import Subject

EPILOG = """\
MODULE:NAME is a function of yours, looked for in the working directory too:

  MODEL          make_model() -> nn.Module, on the CPU; or hf:config.json, torchvision:NAME, timm:NAME: random weights
  --parallelize  parallelize(model, mesh) -> what the ranks run, or None where it changes the model in place
  --batch        make_batch() -> the global batch: a tensor, or a tuple, list or dict of tensors, samples along dim 0
  --step         step(model, batch) -> the mean loss; with a third parameter it gets the mesh, None on one device

docs/verify.md says more.

examples:
  %(prog)s mlp:make_model
  %(prog)s mlp:make_model --write plan.py
  %(prog)s mlp:make_model --parallelize mlp:parallelize --batch mlp:make_batch --mesh dp2,tp2
exit codes: 0 the same; 1 not the same; 2 not comparable, rounded to float32, or wrong arguments
"""
A_PLAN = (
    "it names a function parallelize(model, mesh), such as the one of `{program} MODEL --write plan.py`, which is "
    "plan:parallelize; without --parallelize a plan is found"
)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="what makes the model on one device")
    parser.add_argument("--parallelize", metavar="MODULE:NAME", help="what makes it parallel; default: a plan is found")
    parser.add_argument("--write", metavar="FILE.py", type=Path, help="write the found plan as code")
    parser.add_argument("--batch", metavar="MODULE:NAME", help="what makes the global batch; default: one is made")
    parser.add_argument("--step", metavar="MODULE:NAME", help="default: cross-entropy, or mean squares, of a pair")
    parser.add_argument(
        "--mesh", nargs="+", help="axes with sizes, such as dp2,tp2; one or more meshes (dp2; of a found plan dp2 tp2)"
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


def main(
    argv: Sequence[str] | None = None,
    program: str = "mmm-verify",
    importer: Callable[[str], ModuleType] | None = None,
) -> int:
    """The command.

    Args:
        argv: the arguments; None: those of this process. program: its name, for messages.
        importer: as of `mmm_verify.propose.models.load_model`.

    Returns:
        The exit code: 2 for a user's error, printed as one message.
    """
    args = _parser(program).parse_args(argv)
    try:
        return _verify(args, program, importer)
    except Exception as error:
        if not is_for_user(error):
            raise
        print(f"{program}: error: {_printable(str(error))}", file=sys.stderr)
        return 2


def _printable(text: str) -> str:
    """A message with escapes for what moves a terminal's cursor, or changes its colours."""
    shown = [char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text]
    return "".join(shown)


def _optional(spec: str | None, flag: str) -> Any:
    """The function that a flag names; None where it is not given."""
    from mmm_verify.subject import load_function

    return None if spec is None else load_function(spec, flag)


def _parallelize(spec: str | None, program: str) -> Any:
    try:
        return _optional(spec, "--parallelize")
    except ConfigError as error:
        raise ConfigError(f"{error}; {A_PLAN.format(program=program)}") from None


def _verify(args: argparse.Namespace, program: str, importer: Callable[[str], ModuleType] | None) -> int:
    """Verify on one or more meshes. Returns the largest exit code of them. Raises UserError."""
    from mmm_verify.propose.models import SAMPLES, default_batch, import_torchvision, load_model  # imports torch
    from mmm_verify.run import verify_subject
    from mmm_verify.subject import make_subject
    from mmm_verify.verdict import Verdict, write_badge, write_json

    if args.write is not None and args.parallelize is not None:
        raise ConfigError("--write with --parallelize: a plan is found, and written, where none is given")
    model = load_model(args.model, importer or import_torchvision)
    parallelize_fn = _parallelize(args.parallelize, program)
    step_fn = _optional(args.step, "--step") or model.step_fn
    subjects = [
        make_subject(
            model.model_fn,
            parallelize_fn,
            _optional(args.batch, "--batch"),
            step_fn,
            mesh,
            batch_axes=args.batch_axes,
            local_batch_fn=_optional(args.local_batch, "--local_batch"),
            optimizer_fn=_optional(args.optimizer, "--optimizer"),
        )
        for mesh in args.mesh or (["dp2"] if parallelize_fn is not None else ["dp2", "tp2"])
    ]
    if args.batch is None:
        parts = math.lcm(*(subject.parts for subject in subjects))
        batch_fn = default_batch(model, parts * math.ceil(SAMPLES / parts), args.timeout)
        subjects = [replace(subject, batch_fn=batch_fn) for subject in subjects]
    lacking = 0
    if parallelize_fn is None:
        subjects, lacking = _with_found_plan(subjects, args.model, args.write, args.timeout)
    verdicts: list[Verdict] = []
    for subject in subjects:
        verdict = verify_subject(subject, args.timeout)
        print(verdict, flush=True)
        if verdict.details:
            print(verdict.details.rstrip(), flush=True)
        verdicts.append(verdict)
    if not verdicts:
        return lacking
    worst = max(verdicts, key=lambda verdict: verdict.exit_code)
    if args.json is not None:
        write_json(verdicts, subjects[-1], args.json)
    if args.badge is not None:
        write_badge(worst, [verdict.layout for verdict in verdicts], args.badge)
    return max(worst.exit_code, lacking if args.mesh else 0)


def _with_found_plan(
    subjects: list[Subject], model: str, path: Path | None, timeout: float
) -> tuple[list[Subject], int]:
    """Find a plan, print and write it. Returns the subjects that have it, without those whose mesh it has nothing for,
    and the exit code for those."""
    from mmm_verify.propose.code import load_code
    from mmm_verify.propose.find import find_plan

    proposal = find_plan(subjects, model, timeout)
    print(proposal, flush=True)
    parallelize_fn = load_code(proposal.code, path)
    if path is not None:
        print(f"  written         {path}: parallelize(model, mesh)")
    print(flush=True)
    with_plan = []
    for subject in subjects:
        if set(subject.axes) - set(subject.batch_axes) and not (proposal.tensor and proposal.tensor.groups):
            print(f"no plan for {subject.layout}: no matrices were found to shard over tp", flush=True)
        else:
            with_plan.append(replace(subject, parallelize_fn=parallelize_fn))
    return with_plan, 2 if len(with_plan) < len(subjects) else 0
