"""Tries on one process whether a group of matrices may be sharded: the sum over the ranks must be the full result.

The module around the matrices is called once for each rank, with that rank's rows and columns, and with the arguments
that it had in the trace. The outputs of the row-wise matrix, summed over the ranks, must equal its output in the trace.
If they do not, an integer that the module keeps, such as its number of heads, may have to be divided by the number of
ranks: such `fixes` are searched for.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mmm_verify.difference import relative_to_itself
from mmm_verify.errors import own_frame
from mmm_verify.propose.channels import Sections, channels_of
from mmm_verify.propose.trace import (
    Trace,
    first_line,
    has_parameters,
    is_convolution,
    is_matrix,
    is_transposed,
    widths,
)
from mmm_verify.torch_private import replaced, tensors_in

# Relative. A module inside may compute in float32.
TOLERANCE = 1e-5
# Relative. What is right in float64 is at most so far off.
EXACT = 1e-12
# The most integers that are tried, and the most of them at once.
MOST_INTEGERS = 8
MOST_FIXED = 3
# Attributes of convolutions and norms that count groups of channels.
GROUPS = ("groups", "num_groups")
TORCH = os.path.dirname(torch.__file__)
HERE = os.path.dirname(__file__)

# A module's path, and the name of an attribute of it.
Fix = tuple[str, str]


@dataclass
class Group:
    """Matrices that are sharded together: the producers by columns, the consumers by rows.

    Attributes:
        producers: path of each producer → the sections of its output.
        consumers: paths of the consumers.
        around: path of the innermost module that contains them all.
        between: paths of modules in between whose parameters see only one rank's channels.
        divided: names of parameters in between of which a rank needs a part → the dim, and its sections.
        gathered: paths of norms in between that compute with the channels of all ranks.
        fixes: integer attributes that must be divided by the size of tp.
        written: paths of those matrices whose output is written in place.
        refused: why the group cannot be sharded; empty if it can.
        mixing: path of a norm in between for which it was refused; empty if it was not for a norm.
    """

    producers: dict[str, Sections]
    consumers: list[str]
    around: str = ""
    between: list[str] = field(default_factory=list)
    divided: dict[str, tuple[int, Sections]] = field(default_factory=dict)
    gathered: list[str] = field(default_factory=list)
    fixes: list[Fix] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    refused: str = ""
    mixing: str = ""

    @property
    def members(self) -> list[str]:
        """The paths of all its matrices."""
        return [*self.producers, *self.consumers]


def try_group(trace: Trace, group: Group, n_ranks: int, known: Sequence[str]) -> None:
    """Try a group, and set its `fixes` or `refused`.

    Args:
        known: names of attributes that had to be divided in earlier groups; they are tried first.
    """
    around = group.around or "the model"
    try:
        full = _outputs(trace, group, {})
    # The user's code may raise anything.
    except Exception as error:
        group.refused = f"{around} cannot be called again: {first_line(error)}"
        return
    for path, output in zip(group.consumers, full, strict=True):
        expected = trace.calls[path][0].output
        # A module may draw random numbers, or count its calls.
        if expected is None or not relative_to_itself(output, expected) <= TOLERANCE:
            group.refused = f"{around} gives something else when it is called again"
            return
    # By rank, its rows and columns.
    weights = [_weights(trace.model, group, rank, n_ranks) for rank in range(n_ranks)]
    candidates = _subsets(_integers(trace, group, n_ranks), known)
    try_fixes = partial(_try_fixes, trace, group, weights, full)
    group.fixes, group.refused = _best_fixes(candidates, try_fixes)


def _best_fixes(
    candidates: Iterable[Sequence[Fix]], try_fixes: Callable[[Sequence[Fix]], float | _Problem]
) -> tuple[list[Fix], str]:
    """Try sets of fixes.

    Args:
        candidates: the sets, in the order in which they are tried.
        try_fixes: a set → how far the sum over the ranks is off, or why it is wrong.

    Returns:
        The first set that is exactly right, else the one that is the least off; and, if all are wrong, the reason.
    """
    problems: list[_Problem] = []
    best: Sequence[Fix] | None = None
    least = math.inf
    for fixes in candidates:
        outcome = try_fixes(fixes)
        if isinstance(outcome, _Problem):
            problems.append(outcome)
        elif outcome < least:
            best = fixes
            least = outcome
        # Others may be nearly right: where weights are small, attention is nearly the same with any number of heads.
        if least <= EXACT:
            break
    if best is None:
        return [], _farthest(problems)
    return list(best), ""


def _farthest(problems: Sequence[_Problem]) -> str:
    """The reason of the try in which the model's forward came farthest."""
    first_file = problems[0].file
    same_file = [problem for problem in problems if problem.file in (first_file, "")]
    return max(same_file, key=lambda problem: problem.line).text


@dataclass(frozen=True)
class _Problem:
    """Why the sum over the ranks is not the full result.

    Attributes:
        text: the reason.
        file: file of the model's code where an error came up; empty if its forward ran to the end.
        line: line in that file; infinite if its forward ran to the end.
    """

    text: str
    file: str = ""
    line: float = math.inf


def _try_fixes(
    trace: Trace,
    group: Group,
    weights: list[dict[str, Tensor]],
    full: list[Tensor],
    fixes: Sequence[Fix],
) -> float | _Problem:
    """Compare the sum over the ranks with the full result.

    Returns:
        How far the sum is off, relative to the largest element; or why it is wrong, or cannot be computed.

    Args:
        weights: each rank's rows and columns, by parameter name.
        full: the consumers' outputs with all channels.
        fixes: attributes that are divided by the number of ranks meanwhile.
    """
    model = trace.model
    values: dict[Fix, int] = {}
    n_ranks = len(weights)
    for path, name in fixes:
        value = getattr(model.get_submodule(path), name)
        values[path, name] = value // n_ranks
    # Conv1D keeps its number of output channels in `nf`. Its weight is (in, out).
    for path in group.producers:
        if is_transposed(model.get_submodule(path)):
            weight = weights[0][f"{path}.weight"]
            values[path, "nf"] = weight.shape[1]
    total: list[Tensor] = []
    with ExitStack() as stack:
        for (path, name), value in values.items():
            stack.enter_context(replaced(model.get_submodule(path), name, value))
        for rank, of_rank in enumerate(weights):
            try:
                with _gathered(trace, group, rank, n_ranks):
                    outputs = _outputs(trace, group, of_rank)
            except _Leak as error:
                return _Problem(str(error))
            # Shapes may not fit, for example.
            except Exception as error:
                return _place_of(error)
            if not total:
                total = outputs
            else:
                total = [one + other for one, other in zip(total, outputs, strict=True)]
            shapes = [tensor.shape for tensor in total]
            if shapes != [tensor.shape for tensor in full]:
                return _Problem(f"with a part of the channels the output of {group.consumers[0]} has another shape")
    errors = list(map(relative_to_itself, total, full))
    # False for NaN.
    if all(error <= TOLERANCE for error in errors):
        return max(errors, default=0.0)
    names = " and ".join(group.consumers)
    return _Problem(f"the outputs of {names} on all ranks, summed, are not its output with all channels")


def _outputs(trace: Trace, group: Group, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The consumers' outputs when the module around them is called with these weights in place of its own.

    The forward continues with the consumers' outputs of the trace, as a rank continues with the sum.

    Raises:
        _Leak: something else that the module returns has another shape, and is used.
    """
    outputs: dict[str, Tensor] = {}

    def keep(path: str, output: Tensor) -> Tensor:
        outputs.setdefault(path, output.detach().clone())
        in_trace = trace.calls[path][0].output
        assert in_trace is not None
        return in_trace.clone()

    handles = []
    for path in group.consumers:
        # A hook's result replaces the module's output.
        handle = trace.model.get_submodule(path).register_forward_hook(
            lambda module, inputs, output, path=path: keep(path, output)  # type: ignore[misc]
        )
        handles.append(handle)
    call = trace.calls[group.around][0]
    around = trace.model.get_submodule(group.around)
    prefix = f"{group.around}." if group.around else ""
    # functional_call names parameters from the module that it calls.
    own = {name.removeprefix(prefix): value for name, value in weights.items()}
    args, kwargs = call.arguments
    try:
        with torch.no_grad():
            result = functional_call(around, own, args, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    for before, after in zip(call.returned, tensors_in(result), strict=True):
        if before.shape == after.shape:
            continue
        # A cache of keys, for example, may have a rank's heads only, as long as nothing else takes it.
        if trace.is_used(call, before):
            before_shape = tuple(before.shape)
            after_shape = tuple(after.shape)
            raise _Leak(
                f"{group.around} also returns a tensor of {before_shape}, which would be {after_shape}, and others "
                "take it"
            )
    return [outputs[path] for path in group.consumers]


@contextmanager
def _gathered(trace: Trace, group: Group, rank: int, n_ranks: int) -> Iterator[None]:
    """Inside, norms that need all channels get a rank's, and return its channels of what they returned in the trace."""
    with ExitStack() as stack:
        for path in group.gathered:
            stack.enter_context(_of_a_rank(trace, path, rank, n_ranks))
        yield


def _of_a_rank(trace: Trace, path: str, rank: int, n_ranks: int) -> AbstractContextManager[None]:
    """Inside, a norm returns a rank's channels of what it returned in the trace."""
    module = trace.model.get_submodule(path)
    call = trace.calls[path][0]
    full_input = tensors_in(call.arguments)[0].detach()
    full_output = call.returned[0].detach()
    width = full_output.shape[-1] // n_ranks
    first = rank * width

    def forward(x: Tensor) -> Tensor:
        if not relative_to_itself(x, full_input.narrow(-1, first, width)) <= TOLERANCE:
            raise _Leak(f"{path} does not get a rank's channels of what it gets on one device")
        return full_output.narrow(-1, first, width)

    return replaced(module, "forward", forward)


class _Leak(Exception):
    """Something besides the consumers' outputs depends on how many channels a rank has."""


def _weights(model: nn.Module, group: Group, rank: int, n_ranks: int) -> dict[str, Tensor]:
    """A rank's rows and columns, by parameter name. Only rank 0 has the bias of a consumer: outputs are summed."""
    weights: dict[str, Tensor] = {}
    for path, sections in group.producers.items():
        module = model.get_submodule(path)
        channels = torch.tensor(channels_of(sections, rank, n_ranks))
        for name, parameter in module.named_parameters(recurse=False):
            # Output channels are the last dim of a Conv1D's weight, and the first of all others.
            dim = 1 if name == "weight" and is_transposed(module) else 0
            full = parameter.detach()
            weights[f"{path}.{name}"] = full.index_select(dim, channels)
    for path in group.consumers:
        module = model.get_submodule(path)
        input_width, _ = widths(module)
        width = input_width // n_ranks
        for name, parameter in module.named_parameters(recurse=False):
            full = parameter.detach()
            if name != "bias":
                # The dim of the input channels.
                dim = 0 if is_transposed(module) else 1
                own = full.narrow(dim, rank * width, width)
            elif rank == 0:
                own = full
            else:
                own = torch.zeros_like(full)
            weights[f"{path}.{name}"] = own
    for name, (dim, sections) in group.divided.items():
        channels = torch.tensor(channels_of(sections, rank, n_ranks))
        weights[name] = model.get_parameter(name).detach().index_select(dim, channels)
    return weights


def _integers(trace: Trace, group: Group, n_ranks: int) -> list[Fix]:
    """Attributes in the module around the group that may count heads or channels, the likelier ones first."""
    model = trace.model
    channel_counts = set()
    for path, sections in group.producers.items():
        _, outputs = widths(model.get_submodule(path))
        channel_counts.add(outputs)
        for width, _ in sections:
            channel_counts.add(width)
    for path in group.consumers:
        inputs, _ = widths(model.get_submodule(path))
        channel_counts.add(inputs)
    if all(is_convolution(model.get_submodule(path)) for path in group.members):
        # No forward reshapes by the number of channels: only groups of them are counted.
        channel_counts.clear()
    # Paths of modules whose parameters are divided among the ranks.
    divided = {name.rpartition(".")[0] for name in group.divided}
    # Likely by their name, or possible by their value.
    likely: list[Fix] = []
    possible: list[Fix] = []
    for path, module in model.get_submodule(group.around).named_modules(prefix=group.around):
        # A convolution of each channel by itself, or a norm of groups of channels.
        if path in divided:
            likely += [(path, name) for name in GROUPS if getattr(module, name, 1) > 1]
        is_leaf = not any(module.children())
        # Matrices are sharded themselves, and other leaves with parameters, such as norms, count their own.
        if path != group.around and (is_matrix(module) or (is_leaf and has_parameters(module))):
            continue
        for name, value in vars(module).items():
            # Not a boolean, which is an int to isinstance.
            if type(value) is not int or name.startswith("_") or name in GROUPS:
                continue
            if value <= 1 or value % n_ranks:
                continue
            if "head" in name and "dim" not in name and "size" not in name:
                likely.append((path, name))
            elif value in channel_counts:
                possible.append((path, name))
    return [*likely, *possible][:MOST_INTEGERS]


def _subsets(integers: list[Fix], known: Sequence[str]) -> Iterator[tuple[Fix, ...]]:
    """Yield the sets of attributes to try: none, those that earlier groups needed, then one, two, … of them."""
    yield ()
    in_earlier_groups = tuple(fix for fix in integers if fix[1] in known)
    if in_earlier_groups:
        yield in_earlier_groups
    for size in range(1, MOST_FIXED + 1):
        yield from itertools.combinations(integers, size)


def _place_of(error: BaseException) -> _Problem:
    """The line of the model's code where an error came up, and the error's message."""
    message = first_line(error)
    frame = own_frame(error, (TORCH, HERE))
    if frame is None:
        return _Problem(message)
    file_name = os.path.basename(frame.filename)
    text = f"{file_name}:{frame.lineno}: {frame.line}: {message}"
    return _Problem(text, frame.filename, frame.lineno or 0)
