"""Forks processes of this host as ranks for a piece of work, with time-outs and tracebacks. All of them end with it.

`fork_ranks` calls a function on new ranks. It suits a process that has imported everything and computed nothing: a rank
then costs about 0.1 s. `pool` keeps ranks that stay, inside a process group. `children` forks any process.
"""

from mmm_verify.ranks.ranks import RanksFailed, fork_ranks, free_port

__all__ = ["RanksFailed", "fork_ranks", "free_port"]
