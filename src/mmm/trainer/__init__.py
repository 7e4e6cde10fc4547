"""What the examples and trainers share: options, one run's life, optimizers."""

from mmm.runtime.startup import begin

begin(first=False)  # before a program's own imports, which are timed
