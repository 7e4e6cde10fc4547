"""One idea a file, each a runnable module: ``python -m mmm.examples`` lists them."""

from mmm.runtime.startup import begin

begin(first=False)  # before a program's own imports, which are timed
