"""One run on one rank: `core`, the hooks around it, a file each, and what programs with a loop of their own share."""
