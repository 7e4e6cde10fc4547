"""Whether a group of matrices may be sharded, tried on one process: the sum over the parts is the whole.

The module around them is called once for each rank, with that rank's rows and columns, and with what it was called
with in the trace. What the row-wise matrix gives, summed over the ranks, has to be what it gave. Where that fails, an
integer that the module keeps, such as its number of heads, may have to be divided: `fixes` are looked for.
"""

from __future__ import annotations

import itertools
import linecache
import math
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mmm_verify.propose.channels import Sections, channels_of
from mmm_verify.propose.trace import Trace, first_line, is_matrix, is_transposed, widths
from mmm_verify.torch_private import tree_leaves

TOLERANCE = 1e-5  # relative; a module inside may compute in float32
MOST_INTEGERS = 8  # that are tried, and of them
MOST_FIXED = 3  # together
TORCH = os.path.dirname(torch.__file__)

Fix = tuple[str, str]  # a module's path, an attribute of it


@dataclass
class Group:
    """Matrices that are sharded together: the producers by columns, the consumers by rows.

    Attributes:
        producers: path → the sections of its output. consumers: paths. around: the innermost module that has them all.
        between: the modules in between whose parameters see a rank's channels alone.
        fixes: integers that have to be divided by the size of tp.
        written: of the matrices, those whose output is written in place.
        refused: why it cannot be sharded; empty if it can.
    """

    producers: dict[str, Sections]
    consumers: list[str]
    around: str = ""
    between: list[str] = field(default_factory=list)
    fixes: list[Fix] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    refused: str = ""

    @property
    def members(self) -> list[str]:
        return [*self.producers, *self.consumers]


def try_group(trace: Trace, group: Group, parts: int, known: Sequence[str]) -> None:
    """Set the group's `fixes`, or `refused`.

    Args:
        known: attributes that had to be divided in groups before this one, which are tried first.
    """
    try:
        whole = _outputs(trace, group, {})
    except Exception as error:  # whatever the user's code raises
        group.refused = f"{group.around or 'the model'} cannot be called again: {first_line(error)}"
        return
    kept = [trace.calls[path][0].output for path in group.consumers]
    if not all(_near([one], [other]) for one, other in zip(whole, kept, strict=True)):
        group.refused = f"{group.around or 'the model'} gives something else when it is called again"
        return
    weights = [_weights(trace.model, group, part, parts) for part in range(parts)]
    problems: list[_Problem] = []
    for fixes in _subsets(_integers(trace, group, parts), known):
        problem = _problem(trace, group, weights, fixes, whole)
        if not problem:
            group.fixes = list(fixes)
            return
        problems.append(problem)
    same_file = [problem for problem in problems if problem.file in (problems[0].file, "")]
    group.refused = max(same_file, key=lambda problem: problem.line).text  # the farthest that its forward came


@dataclass(frozen=True)
class _Problem:
    """Why the sum over the parts is not the whole, and where in the model's code that came up: without a file, after
    all of it."""

    text: str
    file: str = ""
    line: float = math.inf


def _problem(
    trace: Trace, group: Group, weights: list[dict[str, Tensor]], fixes: Sequence[Fix], whole: list[Tensor]
) -> _Problem | None:
    """What is wrong with the sum over the parts; None if nothing is."""
    total: list[Tensor] = []
    # What a transposed matrix keeps as the channels that it gives; of a DTensor it is that of the full one, and right.
    own_widths = [(path, "nf") for path in group.producers if is_transposed(trace.model.get_submodule(path))]
    values = {fix: getattr(trace.model.get_submodule(fix[0]), fix[1]) // len(weights) for fix in fixes}
    values |= {fix: weights[0][f"{fix[0]}.weight"].shape[1] for fix in own_widths}
    with _changed(trace.model, values):
        for own in weights:
            try:
                outputs = _outputs(trace, group, own)
            except _Leak as error:
                return _Problem(str(error))
            except Exception as error:  # shapes that do not fit
                return _place_of(error)
            total = [one + other for one, other in zip(total, outputs, strict=True)] if total else outputs
            if any(one.shape != other.shape for one, other in zip(total, whole, strict=True)):
                return _Problem(f"with a part of the channels the output of {group.consumers[0]} has another shape")
    if _near(total, whole):
        return None
    names = " and ".join(group.consumers)
    return _Problem(f"what {names} computes of the parts, summed, is not what it computes of all channels")


def _near(tensors: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    for one, other in zip(tensors, others, strict=True):
        if one is None or other is None or one.shape != other.shape:
            return False
        if not (one - other).abs().max() <= TOLERANCE * other.abs().max():
            return False
    return True


def _outputs(trace: Trace, group: Group, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """What the consumers give when the module around them is called with these weights in place of its own.

    It goes on with what they gave in the trace, as a rank goes on with the sum.

    Raises:
        _Leak: what it returns is of another shape, and is used.
    """
    outputs: dict[str, Tensor] = {}

    def keep(path: str, output: Tensor) -> Tensor:
        outputs.setdefault(path, output.detach().clone())
        whole = trace.calls[path][0].output
        assert whole is not None
        return whole.clone()

    handles = [
        trace.model.get_submodule(path).register_forward_hook(
            lambda module, inputs, output, path=path: keep(path, output)  # type: ignore[misc]
        )
        for path in group.consumers
    ]
    call = trace.calls[group.around][0]
    prefix = f"{group.around}." if group.around else ""
    own = {name.removeprefix(prefix): value for name, value in weights.items()}
    args, kwargs = call.arguments
    try:
        with torch.no_grad():
            result = functional_call(trace.model.get_submodule(group.around), own, args, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    returned = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    for before, after in zip(call.returned, returned, strict=True):
        if before.shape != after.shape and trace.is_used(call, before):
            shapes = f"{tuple(before.shape)}, which would be {tuple(after.shape)}"
            raise _Leak(f"{group.around} also returns a tensor of {shapes}, and others take it")
    return [outputs[path] for path in group.consumers]


class _Leak(Exception):
    """Something other than the consumers' outputs depends on how many channels a rank has."""


def _weights(model: nn.Module, group: Group, part: int, parts: int) -> dict[str, Tensor]:
    """A rank's rows and columns, by the names of the parameters. A consumer's bias is that of rank 0 alone."""
    weights: dict[str, Tensor] = {}
    for path, sections in group.producers.items():
        module = model.get_submodule(path)
        own = torch.tensor(channels_of(sections, part, parts))
        for name, parameter in module.named_parameters(recurse=False):
            dim = 1 if name == "weight" and is_transposed(module) else 0
            weights[f"{path}.{name}"] = parameter.detach().index_select(dim, own)
    for path in group.consumers:
        module = model.get_submodule(path)
        width = widths(module)[0] // parts
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                weights[f"{path}.{name}"] = parameter.detach() if part == 0 else torch.zeros_like(parameter)
            else:
                dim = 0 if is_transposed(module) else 1
                weights[f"{path}.{name}"] = parameter.detach().narrow(dim, part * width, width)
    return weights


def _integers(trace: Trace, group: Group, parts: int) -> list[Fix]:
    """Attributes of the module around that may count heads or channels, the likelier ones first."""
    model = trace.model
    counts = {width for path in group.producers for width in (widths(model.get_submodule(path))[1],)}
    counts |= {width for sections in group.producers.values() for width, _ in sections}
    counts |= {widths(model.get_submodule(path))[0] for path in group.consumers}
    ranked: list[tuple[int, Fix]] = []
    for path, module in model.get_submodule(group.around).named_modules(prefix=group.around):
        if is_matrix(module) or (not any(module.children()) and any(True for _ in module.parameters())):
            continue
        for name, value in vars(module).items():
            if type(value) is not int or value <= 1 or value % parts or name.startswith("_"):
                continue
            named = "head" in name and "dim" not in name and "size" not in name
            if named or value in counts:
                ranked.append((0 if named else 1, (path, name)))
    return [fix for _, fix in sorted(ranked, key=lambda pair: pair[0])][:MOST_INTEGERS]


def _subsets(integers: list[Fix], known: Sequence[str]) -> Iterator[tuple[Fix, ...]]:
    yield ()
    before = tuple(fix for fix in integers if fix[1] in known)
    if before:
        yield before
    for size in range(1, MOST_FIXED + 1):
        yield from itertools.combinations(integers, size)


@contextmanager
def _changed(model: nn.Module, values: Mapping[Fix, int]) -> Iterator[None]:
    """With these attributes."""
    before: list[tuple[nn.Module, str, int]] = []
    for (path, name), value in values.items():
        module = model.get_submodule(path)
        before.append((module, name, getattr(module, name)))
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _place_of(error: BaseException) -> _Problem:
    """The line of the model's code where an error came up, and what it says."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(TORCH) and not frame.filename.startswith(os.path.dirname(__file__))
    ]
    if not frames:
        return _Problem(first_line(error))
    last = frames[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    text = f"{os.path.basename(last.filename)}:{last.lineno}: {line}: {first_line(error)}"
    return _Problem(text, last.filename, last.lineno or 0)
