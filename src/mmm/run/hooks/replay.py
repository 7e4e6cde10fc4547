"""Computes some steps twice from the same state, and compares the bits (``--replay``): silent data corruption.

A device, its memory or a link may compute a wrong number once in a while and report no error. The loss then only looks
a little worse. A second computation of the same step has equal bits if all is well, since the algorithms are
deterministic. Where the bits differ, the run ends before the optimizer takes the gradients.

Source: Dixit et al., "Silent data corruptions at scale", 2021.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mmm.errors import ConfigError, DivergedError
from mmm.nn.draw import canonical_name
from mmm.nn.experts import MixtureOfExperts
from mmm.parallel.fingerprint import as_integers
from mmm.parallel.local import to_local
from mmm.parallel.parallel_model import ParallelModel
from mmm.run.blocks import block_of, blocks_of, modules_of
from mmm.run.hook import Hook
from mmm.run.rows import RANKS_NAMED
from mmm.run.run import Run
from mmm.run.step import Step
from mmm.runtime.device import deterministic
from mmm.runtime.seed import generator_states, restore_generators
from mmm.torch_private.operators import tree_leaves
from mmm.units import counted

LOSS = "the loss"


class Replay(Hook):
    """Replays every so many steps of a program that has a `ParallelModel` as ``model``.

    Args:
        every: number of steps between two replays. None: no step is replayed.

    Attributes:
        replayed: number of steps that were computed twice, with equal bits.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.replayed = 0

    def before(self, run: Run) -> None:
        if self.every is not None and run.device.type == "mps":
            raise ConfigError(
                f"--replay {self.every} with --device mps, whose algorithms are not known to give the same bits each "
                "time: leave --replay out, or give --device cpu"
            )

    def start(self, run: Run) -> None:
        if self.every is not None and not run.options.deterministic:
            run.exits.enter_context(deterministic(True, run.device))
            run.note(f"--replay {self.every}: deterministic algorithms, as --deterministic asks for")

    def begin(self, run: Run, step: Step) -> None:
        if self.every is None or run.comm.dry:
            return
        # The last of every so many steps. So the first step, which includes warm-up, is not timed with its replay.
        steps_made = step.index + 1
        if steps_made % self.every == 0:
            step.second = Second(run, step)

    def finish(self, run: Run, step: Step) -> None:
        if step.second is None:
            return
        if not step.second.compared:
            raise ConfigError(
                f"--replay {self.every}: the body of the loop computed step {step.index} once; let it go over "
                "step.batches, or step.microbatches"
            )
        self.replayed += 1

    def end(self, run: Run, error: BaseException | None) -> None:
        if self.every is None or run.comm.dry:
            return
        run.describe(replayed=self.replayed)
        # The error says which step had other bits.
        if error is not None:
            return
        if self.replayed:
            steps = counted(self.replayed, "step")
            run.log.info("replayed %s: the same bits both times, on every rank", steps)
        else:
            run.note(f"--replay {self.every}: no step was replayed, since this start of the run made too few")


class BlockBits:
    """Sums of the bits that blocks compute on this rank: of their outputs, and of the gradients of their outputs.

    A gradient of a weight is a sum over ranks. These are not: they tell which rank computed something else. One number
    that is wrong always changes its sum.

    Args:
        stages: this rank's modules.
        blocks: blocks of the full model.
    """

    def __init__(self, stages: Iterable[nn.Module], blocks: list[str]) -> None:
        # A sum for each call of the block.
        self._sums: dict[str, list[Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        for block, module in modules_of(stages, blocks):
            hook = partial(self._forward, block)
            handle = module.register_forward_hook(hook)
            self._handles.append(handle)

    def _forward(
        self,
        block: str,
        module: nn.Module,
        inputs: Any,
        output: Any,
    ) -> None:
        add_gradient = partial(self._add, gradient_of_output(block))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self._add(output_of(block), leaf)
                # Autograd calls it with the gradient of this output, in backward.
                if leaf.requires_grad:
                    leaf.register_hook(add_gradient)

    def _add(self, name: str, tensor: Tensor) -> None:
        local = to_local(tensor.detach())
        bits = as_integers(local)
        # An integer that overflows wraps around, so a sum of many has the same bits in any order.
        total = bits.sum(dtype=torch.int64)
        self._sums.setdefault(name, []).append(total)

    def take(self) -> dict[str, Tensor]:
        """Return the sums by name, (calls,) int64 each, and begin them anew."""
        sums = {}
        for name, of_calls in self._sums.items():
            sums[name] = torch.stack(of_calls)
        self._sums = {}
        return sums

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Second:
    """The second computation of a step, from the state that the first one began with.

    Attributes:
        compared: whether the step was computed twice, and the bits are equal.
    """

    def __init__(self, run: Run, step: Step) -> None:
        self.run = run
        self.step = step
        self.model: ParallelModel = run.objects["model"]
        self.compared = False

    def remember(self) -> None:
        """Keep what forward and backward change, besides the gradients.

        Raises:
            ConfigError: a gradient of the step before is left.
        """
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                raise ConfigError(
                    f"step {self.step.index} cannot be replayed: {name} has a gradient before the step; let the body "
                    "end with optimizer.zero_grad()"
                )
        stages = self.model.modules.values()
        watched = blocks_of(self.model.names)
        # A hook in a compiled block would have it compiled again.
        if self.model.techniques.compile:
            watched = []
        self._blocks = BlockBits(stages, watched)
        # Dropout draws the same numbers the second time.
        self._generators = generator_states(self.run.device)
        self._buffers = []
        self._loads = []
        for stage in stages:
            # Such as the running means of a BatchNorm.
            for buffer in stage.buffers():
                value = buffer.detach().clone()
                self._buffers.append((buffer, value))
            for module in stage.modules():
                if isinstance(module, MixtureOfExperts):
                    self._loads.append((module, module.tokens_per_expert))

    def rewind(self) -> None:
        """Keep loss and gradients, and go back to the state that `remember` has kept."""
        self._first_blocks = self._blocks.take()
        # On the host, since a device may not have memory for all gradients twice.
        self._first = {}
        for name, tensor in self._results():
            self._first[name] = tensor.to("cpu", copy=True)
        for parameter in self.model.parameters():
            parameter.grad = None
        restore_generators(self.run.device, self._generators)
        for buffer, value in self._buffers:
            buffer.detach().copy_(value)
        for layer, load in self._loads:
            layer.tokens_per_expert = load
        for hook in self.run.hooks:
            hook.rewind(self.run, self.step)

    def compare(self) -> None:
        """Compare the bits of both computations. A collective.

        Raises:
            DivergedError: they differ on some rank. It is raised on every rank.
        """
        # Name → how many elements differ, as an addition to the message.
        differing: dict[str, str] = {}
        for name, second in self._blocks.take().items():
            first = self._first_blocks.get(name, second[:0])
            # In its first step a pipeline calls a stage once more, before all others, to find out shapes.
            calls = min(len(first), len(second))
            if not torch.equal(first[-calls:], second[-calls:]):
                differing[name] = ""
        self._blocks.remove()
        for name, tensor in self._results():
            # An expert that gets other tokens may have had no gradient.
            first = self._first.pop(name, torch.empty(0))
            text = _difference(first, tensor)
            if text is not None:
                differing[name] = text
        # Gradients that only the first computation made.
        differing |= dict.fromkeys(self._first, " (the second time it has none)")
        # All ranks raise the error if one has found a difference.
        n_differing = float(len(differing))
        by_rank = self.run.comm.floats([n_differing], self.run.device)
        if by_rank.any():
            self._refuse(differing)
        self.compared = True

    def _refuse(self, differing: dict[str, str]) -> None:
        """Say where the bits differ. A collective.

        Raises:
            DivergedError: on every rank.
        """
        host = socket.gethostname()
        by_rank = self.run.comm.gather_everywhere((host, differing))
        names: set[str] = set()
        for _, of_rank in by_rank:
            names.update(of_rank)
        order = in_order(self.model.names)
        first = min(names, key=order.index)
        text = f"First {first}, on {_places(first, by_rank)}."
        # A wrong gradient of a weight may come from any rank of the sum. What blocks compute is a rank's own.
        own = [name for name in names if not is_weight_gradient(name)]
        if own and first not in own:
            first_own = min(own, key=order.index)
            text += f" Of what is not a sum over dp, first {first_own}, on {_places(first_own, by_rank)}."
        tensors = counted(len(names), "tensor")
        raise DivergedError(
            f"step {self.step.index} was computed twice from the same state, and the bits of "
            f"{tensors} differ. {text} No weight was updated. Silent data corruption does this: "
            "resume from the last checkpoint without that host (docs/replay.md)",
            on_every_rank=True,
        )

    def _results(self) -> Iterator[tuple[str, Tensor]]:
        """The names and local tensors of what the step has computed on this rank."""
        yield LOSS, self.step.local_loss
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                result = gradient_of(canonical_name(name))
                yield result, to_local(gradient.detach())


def _difference(first: Tensor, second: Tensor) -> str | None:
    """How many elements of a result differ, as an addition to a message. None if all bits are equal."""
    if first.shape != second.shape:
        return " (the first time it had none)"
    second = second.to(first.device)
    # As integers: NaN equals the same NaN, and 0.0 is not -0.0.
    differs = as_integers(first) != as_integers(second)
    n_differing = int(differs.sum())
    if n_differing == 0:
        return None
    # A scalar needs no count.
    if first.ndim == 0:
        return ""
    elements = counted(first.numel(), "element")
    return f" ({n_differing:,} of {elements})"


def _places(
    name: str,
    by_rank: Sequence[tuple[str, dict[str, str]]],
) -> str:
    """The ranks on which a result differs, with their hosts.

    Args:
        by_rank: of each rank its host, and which of its results differ.
    """
    places = []
    for rank, (host, of_rank) in enumerate(by_rank):
        if name in of_rank:
            places.append(f"rank {rank} on {host}{of_rank[name]}")
    text = ", ".join(places[:RANKS_NAMED])
    n_more = len(places) - RANKS_NAMED
    if n_more > 0:
        text += f" and {n_more} more"
    return text


def output_of(block: str) -> str:
    return f"the output of {block}"


def gradient_of_output(block: str) -> str:
    return f"the gradient of the output of {block}"


def gradient_of(name: str) -> str:
    return f"the gradient of {name}"


def is_weight_gradient(name: str) -> bool:
    # The name of an output's gradient begins with the same words, and continues.
    if name.startswith(gradient_of_output("")):
        return False
    return name.startswith(gradient_of(""))


def in_order(names: list[str]) -> list[str]:
    """The results of a step, in the order in which they are computed.

    Args:
        names: names of all parameters of the model, in its order.
    """
    blocks = blocks_of(names)
    order = [output_of(block) for block in blocks]
    order.append(LOSS)
    # Backward goes from the last block to the first. Parameters of the model itself belong to no block.
    for block in [*reversed(blocks), ""]:
        order.append(gradient_of_output(block))
        for name in reversed(names):
            if block_of(name) == block:
                order.append(gradient_of(name))
    return order
