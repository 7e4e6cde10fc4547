"""Plans what to start and where: the command, the hosts of a job or a list, how many ranks each gets, and why."""
