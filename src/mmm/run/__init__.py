"""A run: the one loop that every program has, what goes on around it, and what it leaves."""
