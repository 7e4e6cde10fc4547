"""One optimizer step, as the body of a program's loop sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmm.errors import ConfigError
from mmm.optim.grad_scaler import GradScaler, not_finite
from mmm.parallel.exact.trees import add_up
from mmm.parallel.local import detached

if TYPE_CHECKING:
    from mmm.run.run import Run


@dataclass
class Step:
    """One optimizer step. Everything about it but its losses is decided before the body of the loop begins.

    Attributes:
        run: the run that makes the step.
        index: index of the step in the run, from 0.
        batch: this rank's samples of the global batch, on the device.
        place: where the run is, as its row says it: ``{"iter": 3}`` or ``{"epoch": 1}``.
        count: what the sum of losses is divided by: the number of targets in the global batch, int or Tensor. None if
            batches do not say.
        last: whether the run ends with this step.
        ends_row: whether a row ends with this step.
        due: whether that row is logged. The host waits for the device only for due rows.
        evaluates: whether the body has to evaluate.
        saves: whether a checkpoint follows.
        row: further values of the row. The body adds to it.
        skip: 1.0 on every rank if the step must change nothing, else 0.0. None if steps are never skipped.
        norms, names: norms of this rank's gradients, (gradients,), and their parameters; None and () without `check`.
    """

    run: Run
    index: int
    batch: Any = None
    place: dict[str, int] = field(default_factory=dict)
    count: Any = None
    last: bool = False
    ends_row: bool = True
    due: bool = True
    evaluates: bool = False
    saves: bool = False
    row: dict[str, float | Tensor] = field(default_factory=dict)
    skip: Tensor | None = None
    norms: Tensor | None = None
    names: Sequence[str] = ()
    _losses: list[Tensor] = field(default_factory=list)

    def log(self, loss: Tensor, **values: float | Tensor) -> None:
        """Keep the loss, and end the forward time (``dtf``). A pipeline times its own parts.

        Args:
            loss: scalar loss of this rank's samples, divided by the global count. The losses of micro-batches add up.
            values: further values of `row`, by name.
        """
        self.row |= values
        if self.run.layout.pp == 1:
            self.run.clock.lap("dtf")
        # Without its graph, so that the activations can be freed.
        self._losses.append(detached(loss))

    @property
    def local_loss(self) -> Tensor:
        """This rank's loss of the step: a scalar on the device, without a graph.

        Raises:
            ConfigError: the body has not called `log`.
        """
        if not self._losses:
            raise ConfigError(
                f"step {self.index} ended without step.log(loss): the body of the loop calls it once the forward is "
                "over, with this rank's part of the loss"
            )
        return add_up(self._losses, self.run.exact)

    @property
    def updates(self) -> bool:
        """Whether the optimizer has to update. The host waits for the device if steps may be skipped."""
        return self.skip is None or not self.skip.item()

    def check(self, model: Any, scaler: GradScaler | None = None, skips: bool = False) -> list[Tensor] | None:
        """Keep on the device whether the loss and the gradients are finite. The next row reads it, and ends the run.

        Args:
            model: a `mmm.parallel.parallel_model.ParallelModel`.
            scaler: fp16's scaler, which skips a step that overflows by itself.
            skips: skip a step that is not finite, instead of ending the run. Sets `skip` by a collective.

        Returns:
            The norm of each gradient of this rank, for clipping. None with fp16, where the scaler checks for inf.
        """
        norms = None
        scaler_checks = scaler is not None and scaler.is_enabled()
        if skips or not scaler_checks:
            self.names, norms = model.gradient_norms()
            loss = self.local_loss
            # (gradients,); one zero on a rank without gradients.
            self.norms = torch.stack(norms) if norms else loss.new_zeros(1)
            if skips:
                self.skip = not_finite(loss, self.norms)
        for hook in self.run.hooks:
            hook.gradients(self.run, self)
        return norms
