"""The process of `launch`: it starts the ranks, learns how each ends, and ends every process of the run."""
