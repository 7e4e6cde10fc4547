"""What runs on each host: the agent, the fork server, and the first code of a rank."""
