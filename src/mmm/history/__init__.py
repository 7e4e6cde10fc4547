"""Record a step, keep it on disk, plot it.

>>> outdir = prepare(None, "fsdp_tp")                        # rank 0, before any process group
>>> with History(outdir, ranks=[{"rank": 0, "host": "x1"}]) as history:
...     line = history.update({"iter": 0, "loss": 10.78, "dt": 0.4})
>>> load(outdir).loss                                        # also while it runs, and after a kill

Importing this package imports neither torch, xarray, matplotlib nor plotext: `load` and the plots do when called.
"""

from mmm.history.history import History
from mmm.history.plots import plot_all, plot_timeline
from mmm.history.reader import finalize, load, state
from mmm.history.record import encode, prepare, versions, write_config, write_encoded
from mmm.history.terminal import terminal_plot

__all__ = [
    "History",
    "encode",
    "finalize",
    "load",
    "plot_all",
    "plot_timeline",
    "prepare",
    "state",
    "terminal_plot",
    "versions",
    "write_config",
    "write_encoded",
]
