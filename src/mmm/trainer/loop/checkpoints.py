"""The checkpoints of the training loop: what a step needs to be made again, and when it is saved."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmm.checkpoint import load_tensors, training_state
from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.nn.draw import accum_dtype
from mmm.optim.adamw import learning_rate
from mmm.optim.grad_scaler import GradScaler
from mmm.parallel.parallel_model import ParallelModel
from mmm.runtime.process_group import gather_floats
from mmm.trainer.config.training import TrainerCheckpoint
from mmm.trainer.loop.checkpointer import Checkpointer
from mmm.trainer.run.core import Run
from mmm.trainer.run.origin import Origin, damage


def without_checkpoints(options: TrainerCheckpoint) -> str:
    """What a run that saves no checkpoint leaves of its weights, and the flag for more; said before its first step."""
    flag = "--checkpoint_every N (of a large N: one, at the end)"
    if options.save_model:
        return (
            "this run will leave model.pt, which plain PyTorch loads, and no checkpoint, which --resume reads, and "
            f"of a language model mmm sample, mmm export and --init_from; {flag} leaves those"
        )
    return f"this run will leave no weights; {flag} leaves checkpoints, and --save_model what plain PyTorch loads"


class RowSoFar(NamedTuple):
    """The row under way.

    Attributes:
        steps: in it.
        counted: those that were not skipped, on the device where steps may be.
        loss: this rank's, summed over them; None before the first.
    """

    steps: int = 0
    counted: float | Tensor = 0
    loss: Tensor | None = None

    def with_step(self, loss: Tensor, skip: Tensor | None) -> RowSoFar:
        """With one step more.

        Args:
            skip: 1.0 where it was skipped, and then does not count; None: it counts.
        """
        if skip is not None:
            loss = loss.where(skip == 0, 0)
        return RowSoFar(
            self.steps + 1,
            self.counted + (1 if skip is None else 1 - skip),
            loss if self.loss is None else self.loss + loss,
        )

    def mean(self) -> Tensor:
        """This rank's loss, of a row with a step."""
        assert self.loss is not None
        return self.loss / self.counted


class Checkpoints(Checkpointer):
    """Of a run of the shared loop, on any layout.

    A step needs parameters, saved buffers, the optimizer's state, fp16's scale, and its number: batches, learning rate
    and random generators (`mmm.runtime.seed.seed_step`) are functions of seed and step. A row over many steps needs
    the losses so far as well.
    """

    def __init__(
        self,
        run: Run,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        scaler: GradScaler,
        metadata: ModelMetadata,
        options: TrainerCheckpoint,
    ) -> None:
        super().__init__(run, options, metadata)
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.parameters: dict[str, Tensor] = {}
        self.repeated: list[tuple[str, Tensor]] = []  # of a tied weight that this rank has in two stages
        for name, parameter in model.named_parameters():
            if self.parameters.setdefault(name, parameter) is not parameter:
                self.repeated.append((name, parameter))
        if self.every is None:
            run.log.info("%s", without_checkpoints(options))

    def load(self) -> tuple[int, RowSoFar]:
        """The step to begin with, and the row under way. A collective."""
        if (origin := self.record.origin) is None:
            return 0, RowSoFar()
        with damage(origin):
            return self._load(origin)

    def _load(self, origin: Origin) -> tuple[int, RowSoFar]:
        manifest, run = origin.manifest, self.run
        load_tensors(
            origin.path,
            manifest.files,
            self.parameters,
            self.model.saved_buffers(),
            self.optimizer,
            self.repeated,
        )
        self.model.gather_updated()
        state = manifest.state
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        moved, losses = self.note_origin(origin), state["losses"]
        if not losses:
            return manifest.step, RowSoFar()
        if not moved:
            local = losses[run.rank.rank]
        elif run.rank.rank == run.layout.loss_ranks()[0]:  # the losses that add up to the global loss
            local = sum(losses[rank] for rank in state["loss_ranks"])
        else:
            local = 0.0
        local_loss = torch.tensor(local, dtype=accum_dtype(run.device), device=run.device)
        return manifest.step, RowSoFar(state["since"], state["counted"], local_loss)

    def save(self, done: int, so_far: RowSoFar) -> None:
        """Begin to save. A collective; where a save is `due`.

        Args:
            done: steps.
            so_far: the row under way.
        """
        run = self.run
        losses: list[float] = []
        if so_far.loss is not None:
            losses = [loss for (loss,) in gather_floats(so_far.loss.view(1), run.device)]
        state = {
            "scaler": self.scaler.state_dict(),
            "lr": learning_rate(self.optimizer),
            "since": so_far.steps,
            "counted": float(so_far.counted),
            "losses": losses,
            "loss_ranks": run.layout.loss_ranks() if losses else [],
        }
        tensors = training_state(self.parameters, self.model.saved_buffers(), self.optimizer)
        self.write(done, state, tensors)
