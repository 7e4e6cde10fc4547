"""Before the run: layouts, memory, communication, dry run."""
