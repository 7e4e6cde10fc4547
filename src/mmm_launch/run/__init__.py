"""The process of `launch`: it starts the ranks, learns how each of them ends, and ends every process of the run."""
