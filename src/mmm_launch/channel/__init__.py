"""What the processes of a run say to each other: launch and its agents, launch and its fork server."""
