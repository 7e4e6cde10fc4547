"""Where the time goes between the shell and the end of the first step, on each rank. Imports no torch.

Six marks, each the seconds since 1970 at which

    started      A: `launch` was started; or what MMM_STARTED_AT says; or, with neither, this process was
    began        B: the program begins in the rank, after the shared imports where ranks are forked
    ready        all that needs no other rank is done: imports, options, data, checks
    group        the process group is up, and every rank has answered
    model        the model is built: the first step begins
    first_step   C: the first step has ended, the device waited for

What lies between two is given a name in `table`. Imports are timed by package up to `ready`: shared ones, once, in the
process that ranks are forked from; the others in each rank.
"""

from mmm.runtime.startup.process import begin, keep_shared, time_imports
from mmm.runtime.startup.times import MARKS, Times, as_record, parts, ready, span, table

__all__ = ["MARKS", "Times", "as_record", "begin", "keep_shared", "parts", "ready", "span", "table", "time_imports"]
