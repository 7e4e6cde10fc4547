"""Record a run: its folder, its rows, how it ended."""
