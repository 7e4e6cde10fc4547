"""Watches a script train, through PyTorch's hooks, and keeps what it sees of its first optimizer steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
)
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mmm_verify.difference import same_elements
from mmm_verify.noise import moved_by_rounding
from mmm_verify.observe import (
    LocalTensor,
    Observed,
    keep_changed_gradients,
    keep_gradients,
    local_tensor,
    named_parameters,
    names_in,
    tensors_of,
    watched_clipping,
    without_dropout,
)
from mmm_verify.program.samples import Sample, samples_in
from mmm_verify.shards import canonical_name, to_local
from mmm_verify.torch_private import BatchNorm, in_backward, replaced, tensors_in

STEPS = 2
# No process has this id.
NOBODY = 0


@dataclass
class Recording:
    """What was seen of a script on one rank.

    Attributes:
        steps: its optimizer steps, as many as were asked for if it took so many.
        samples: by step, the samples that its models were called with.
        has_dropout: whether dropout was switched off.
        batch_norms: names of batch norms, which compute over the samples of their own rank.
        dtype: the type with the fewest digits among the models' weights and what their modules return.
        imported: PyTorch's modules that it has imported, in the order in which their imports began.
    """

    steps: list[Observed] = field(default_factory=list)
    samples: list[list[Sample]] = field(default_factory=list)
    has_dropout: bool = False
    batch_norms: list[str] = field(default_factory=list)
    dtype: torch.dtype = torch.float64
    imported: list[str] = field(default_factory=list)


class _Other(nn.Module):
    """Models after the first one as ``model2``, …; and parameters of optimizers that are in no model."""


class Recorder:
    """Keeps what a script does, and calls `done` at the end of its last step. What follows is not watched.

    A step ends when each optimizer that steps at all has called ``step()`` once: the two optimizers of a GAN take one
    step together. If the script changes weights after ``step()``, such as by averaging them, it ends where they are
    next used. What a model is called with, and what goes backward, belongs to the next call of ``step()``.

    Args:
        done: receives the recording.
        seed: of the random numbers that a model draws in its forward. Outside of forward, the script's generators are
            as if it drew none. None leaves random numbers, and dropout, as the script has them.
        nudge: the type of whose roundings each initial weight is moved by one, in a random direction; None for none.
        wanted: how many steps to keep, 2 or more.
        known: digests of the samples of which no input is kept; None keeps no input.
    """

    def __init__(
        self,
        done: Callable[[Recording], None],
        seed: int | None,
        nudge: torch.dtype | None,
        wanted: int = STEPS,
        known: Container[str] | None = None,
    ) -> None:
        self.recording = Recording()
        self.wanted = wanted
        self._done = done
        self._known = known
        self._seed = seed
        self._nudge = nudge
        self._nudged: set[nn.Parameter] = set()
        # Hooks also run in processes that the script forks, such as a DataLoader's workers.
        self._process = os.getpid()
        # Module → the module that it was last registered in.
        self._parents: dict[nn.Module, nn.Module] = {}
        # Modules in the order of their first calls in training.
        self._called: dict[nn.Module, None] = {}
        # Modules that the script calls itself, outside of other modules.
        self._roots: list[nn.Module] = []
        self._other = _Other()
        # The step under way, its losses and samples, and the optimizers that have stepped in it.
        self._step = Observed()
        self._step_losses: list[LocalTensor] = []
        self._step_samples: list[Sample] = []
        self._stepped: list[Optimizer] = []
        # How many optimizers the first step had.
        self._optimizers = 0
        # Whether an optimizer has stepped, and nothing has used the weights since.
        self._is_fresh = False
        # Whether the script has changed weights between an optimizer's step and their next use.
        self.changes_later = False
        # What came since the last call of step(): norms, gradients before clipping, losses, samples and their tensors.
        self._clipped = Observed()
        self._unclipped: dict[int, Tensor] = {}
        self._losses: list[LocalTensor] = []
        self._samples: list[Sample] = []
        self._inputs: list[Tensor] = []
        # How many forwards, and calls of step(), are inside each other.
        self._forward_depth = 0
        self._step_depth = 0
        # The script's random numbers, while a forward draws others.
        self._generator_state: Tensor | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, all modules, backwards, clipping and optimizers are watched."""
        backward = torch.autograd.backward

        def watched_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._before_backward(tensors)
            backward(tensors, *args, **kwargs)

        # Otherwise torch.compile would compile the hooks into the program.
        before_forward = torch.compiler.disable(self._before_forward)
        after_forward = torch.compiler.disable(self._after_forward)
        handles = [
            register_module_module_registration_hook(self._register),
            register_module_forward_pre_hook(before_forward),
            register_module_forward_hook(after_forward, with_kwargs=True, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        with replaced(torch.autograd, "backward", watched_backward), watched_clipping(self._clipped, self._unclipped):
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    @property
    def steps(self) -> int:
        """How many steps have ended, or begun, so far."""
        return len(self.recording.steps) + bool(self._stepped)

    @property
    def is_done(self) -> bool:
        """Whether the recording is complete."""
        return self._process == NOBODY

    @property
    def runs_on(self) -> bool:
        """Whether the script has to run on after its last step: other ranks may need it to average their weights."""
        return self.changes_later

    def _register(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        """Note which module another is made a part of."""
        if module is not None and parent is not self._other:
            self._parents[module] = parent

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """Note a module that is called in training. One that the script itself calls draws the recorder's numbers."""
        if os.getpid() != self._process:
            return
        self._forward_depth += 1
        # Neither an evaluation, nor a forward that is recomputed in backward.
        trains = module.training and torch.is_grad_enabled() and not in_backward()
        if trains:
            self._called.setdefault(module)
        # A loss, for example, is a module that the script calls too.
        if self._forward_depth > 1 or not any(p.requires_grad for p in module.parameters()):
            return
        # What is evaluated may still be averaged: a step ends where its weights are trained on.
        if not trains:
            return
        self.settle()
        is_known = False
        for root in self._roots:
            is_known = is_known or any(module is inner for inner in root.modules())
        if not is_known:
            self._add_root(module)
        self._generator_state = torch.get_rng_state()
        if self._seed is not None:
            torch.default_generator.manual_seed(self._seed)

    def _after_forward(self, module: nn.Module, args: Any, *kwargs_and_output: Any) -> None:
        """Keep the samples that a model of the script was called with, and give the script its random numbers back."""
        if os.getpid() != self._process:
            return
        self._forward_depth -= 1
        # Only in a forward of training.
        if self._generator_state is None:
            return
        self._note_dtypes(kwargs_and_output[-1])
        if self._forward_depth:
            return
        if self._seed is not None:
            torch.set_rng_state(self._generator_state)
        self._generator_state = None
        inputs = tensors_in((args, kwargs_and_output[:-1]))
        # A batch may be given to several modules. A scalar, as a step's number of labels, may go with several batches.
        if not any(tensor.ndim and tensor is known for tensor in inputs for known in self._inputs):
            self._samples += samples_in(inputs, self._known)
        self._inputs += inputs

    def _add_root(self, module: nn.Module) -> None:
        """Make a module one of the script's models, before its first forward."""
        for index, root in enumerate(self._roots):
            # Two parts of one model, such as a LightningModule's, which is not called itself.
            common = self._common_parent(root, module)
            if common is not None:
                self._roots[index] = module = common
                # Its parts had other names.
                self._step.weights.clear()
                self._step.parameters.clear()
                break
        else:
            self._roots.append(module)
        for index, root in enumerate(self._roots[1:]):
            self._other.add_module(f"model{index + 2}", root)
        if self._seed is not None and without_dropout(module):
            self.recording.has_dropout = True
        self._note_dtypes(list(module.parameters()))
        if self._nudge is not None:
            self._nudge_weights(module, torch.finfo(self._nudge).eps)
        for name, inner in module.named_modules():
            if isinstance(inner, BatchNorm) and not isinstance(inner, nn.SyncBatchNorm):
                self.recording.batch_norms.append(canonical_name(name))
        if not self.recording.steps:
            self._keep_weights()

    def _common_parent(self, one: nn.Module, other: nn.Module) -> nn.Module | None:
        """The nearest module that both are in; None if there is none."""
        seen: list[nn.Module] = []
        parent = self._parents.get(one)
        while parent is not None and not any(parent is known for known in seen):
            if any(other is inner for inner in parent.modules()):
                return parent
            seen.append(parent)
            parent = self._parents.get(parent)
        return None

    def _keep_weights(self) -> None:
        """Keep the weights before the first step. An optimizer may have stepped already, but not for what is new."""
        tensors, self._step.ties = tensors_of(self._modules())
        self._step.weights = tensors | self._step.weights
        for module in self._modules():
            for name, parameter in named_parameters(module):
                self._step.parameters |= dict.fromkeys(names_in(name, parameter), 0)

    def _modules(self) -> list[nn.Module]:
        """The first model, whose names need no prefix, and a module with all others."""
        return [*self._roots[:1], self._other]

    def _note_dtypes(self, tensors: Any) -> None:
        """Keep the type with the fewest digits, whose eps is the largest."""
        for tensor in tensors_in(tensors):
            if not tensor.is_floating_point():
                continue
            if torch.finfo(tensor.dtype).eps > torch.finfo(self.recording.dtype).eps:
                self.recording.dtype = tensor.dtype

    @torch.no_grad()
    def _nudge_weights(self, module: nn.Module, eps: float) -> None:
        """Move each weight to the next number, if numbers are `eps` apart at 1."""
        generator = torch.Generator().manual_seed(self._seed or 0)
        for parameter in module.parameters():
            if parameter in self._nudged or not parameter.is_floating_point():
                continue
            self._nudged.add(parameter)
            # On one rank, a DTensor has all of its elements here.
            local = to_local(parameter)
            # Twice the distance: half of it would leave a 1, such as a norm's weight, where it is.
            local.copy_(moved_by_rounding(local, 2 * eps, generator))

    def _before_backward(self, tensors: Any) -> None:
        """Keep the losses that go backward: numbers, of which a step may have several."""
        # Checkpointing goes backward inside of backward.
        if os.getpid() != self._process or in_backward():
            return
        for tensor in tensors_in(tensors):
            if tensor.numel() == 1:
                self._losses.append(local_tensor(tensor))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Keep the gradients, now or after the first call of the optimizer's closure.

        Returns:
            Other arguments for ``step``, with a closure that is watched; None if there is no closure.
        """
        if os.getpid() != self._process:
            return None
        self._step_depth += 1
        # ZeRO's optimizer has another one inside.
        if self._step_depth > 1:
            return None
        # args: (optimizer, closure)
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None:
            self._keep_gradients(optimizer)
            return None
        calls = 0

        def watched_closure() -> Any:
            nonlocal calls
            loss = closure()
            calls += 1
            # LBFGS calls it several times: the first gradients are those of the weights before the step.
            if calls == 1:
                self._keep_gradients(optimizer)
            return loss

        return (args[0], watched_closure), {}

    def _keep_gradients(self, optimizer: Optimizer) -> None:
        """Keep the gradients that an optimizer is about to step by, and what led to them."""
        self.settle()
        if any(optimizer is known for known in self._stepped):
            self._close_step()
        self._stepped.append(optimizer)
        # By identity: to compare tensors would compare their elements.
        own = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                own[id(parameter)] = parameter
        if not self.recording.steps:
            in_models: set[int] = set()
            for module in self._modules():
                in_models.update(map(id, module.parameters()))
            for key, parameter in own.items():
                if key not in in_models and isinstance(parameter, nn.Parameter):
                    count = len(list(self._other.parameters(recurse=False)))
                    self._other.register_parameter(f"parameter{count + 1} of the optimizer", parameter)
            self._keep_weights()
        step = self._step
        keep_gradients(self._modules(), step, {}, self._unclipped, own)
        # No outputs, but the order of modules, which is that of backward, reversed.
        names: dict[nn.Module, str] = {}
        for module in self._modules():
            for full_name, inner in module.named_modules():
                names[inner] = canonical_name(full_name)
        for called in self._called:
            if called in names:
                step.outputs.setdefault(names[called], [])
        step.norms += self._clipped.norms
        self._step_samples += self._samples
        self._step_losses += self._losses
        if self._step_losses:
            total = sum(loss.local for loss in self._step_losses)
            step.loss = replace(self._step_losses[0], local=torch.as_tensor(total))
        # All of this belonged to the step under way: the next one begins with nothing.
        self._clipped.norms.clear()
        self._unclipped.clear()
        self._samples.clear()
        self._losses.clear()
        self._inputs.clear()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Keep the weights, and end the recording if the last step is over."""
        if os.getpid() != self._process:
            return
        self._step_depth -= 1
        if self._step_depth:
            return
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        keep_changed_gradients(self._modules(), self._step, own)
        self._step.after, _ = tensors_of(self._modules())
        self._is_fresh = True
        if not self.changes_later:
            self._end_last_step()

    def settle(self) -> None:
        """Keep the weights that are used after an optimizer's step: the script may have averaged them since."""
        if not self._is_fresh:
            return
        self._is_fresh = False
        after, _ = tensors_of(self._modules())
        for name, tensor in self._step.after.items():
            if name in after and not same_elements(tensor.local, after[name].local):
                self.changes_later = True
        self._step.after = after
        self._end_last_step()

    def _end_last_step(self) -> None:
        """End the recording if the last step is over."""
        # The last step is over when as many optimizers have stepped as in the first one.
        if len(self.recording.steps) == self.wanted - 1 and len(self._stepped) == self._optimizers:
            self._close_step()
            self._process = NOBODY
            self._done(self.recording)

    def _close_step(self) -> None:
        """Add the step under way to the recording, and begin another."""
        self.recording.steps.append(self._step)
        self.recording.samples.append(self._step_samples)
        self._optimizers = len(self._stepped)
        self._step = Observed()
        self._step_samples = []
        self._step_losses = []
        self._stepped = []
