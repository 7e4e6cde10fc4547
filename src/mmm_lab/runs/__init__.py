"""Many runs, read from outside: a table of them, their curves in one plot, where two of them differ."""
