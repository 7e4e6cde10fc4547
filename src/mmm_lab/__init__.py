"""Before and after a run: which layout, what it will cost, is it right, and what did it do? And the `mmm` command."""
