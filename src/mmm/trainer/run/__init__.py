"""One run on one rank: `core`, and the hooks around it, a file each."""
