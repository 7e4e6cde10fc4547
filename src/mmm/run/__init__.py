"""A run: the one loop that every program has, what happens around it, and what it leaves."""
