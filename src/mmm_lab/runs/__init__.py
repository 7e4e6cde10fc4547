"""Many runs, read from outside: a table of them, their start-up times in one picture, where two of them differ."""
