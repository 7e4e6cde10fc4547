"""What happens around a run: a watch for hangs, profiles, … Each is one file in `mmm.run.hooks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

if TYPE_CHECKING:
    from mmm.run.rows import Row
    from mmm.run.run import Run
    from mmm.run.step import Step


class Loop(NamedTuple):
    """A loop of a program: its batches, as the program has given them, its steps, and the samples of a global batch."""

    batches: Any
    steps: int
    samples: int


class Hook:
    """One of the things that happen around a run.

    Every rank has the same hooks, in the same order, and calls all methods of each. So a hook may use collectives from
    `start` on. A hook reads the run, and knows no other hook. The last one is the run's folder (`mmm.run.folder`).
    """

    def before(self, run: Run) -> None:
        """Refuse what is wrong before the ranks meet. Each rank decides for itself."""

    def meet(self, run: Run, store: dist.Store) -> None:
        """The ranks share a store, and have no process group yet. What is raised here is raised on every rank."""

    def start(self, run: Run) -> None:
        """The process group is up, and the program's own code comes next."""

    def state(self, run: Run) -> None:
        """The program has named its state: `Run.objects`."""

    def loop(self, run: Run, loop: Loop) -> None:
        """A loop begins, at the step `Run.first`."""

    def begin(self, run: Run, step: Step) -> None:
        """A step begins. A hook may make its row due, have it saved, or make it the last one."""

    def gradients(self, run: Run, step: Step) -> None:
        """The gradients are complete, and not clipped yet. Called only if the program calls `Step.check`."""

    def row(self, run: Run, row: Row) -> None:
        """A row is due, and has not been logged yet."""

    def finish(self, run: Run, step: Step) -> None:
        """The step is over. Its row, if it has one, has been recorded."""

    def end(self, run: Run, error: BaseException | None) -> None:
        """The program's code is over, or has failed with `error`. An exception raised here takes its place."""
