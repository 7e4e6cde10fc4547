"""The messages between the processes of a run: launch and its agents, launch and its fork server."""
