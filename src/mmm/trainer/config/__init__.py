"""Everything that a program takes: its flags in groups, and what is decided from them before the ranks meet."""
