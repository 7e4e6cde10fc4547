"""What runs on each host beside the ranks: the agent, the fork server, and what a rank begins with."""
