"""`launch --stage`: every host gets a copy of an environment, and its ranks run from it. `mmm.launch.plan.stage` has
the options and what changes for the ranks.

    copy      one host's copy: made, used, removed
    host      a host's part: it gets the copy from one host, and passes it on to others
    spread    launch's part: which host gets it from which
"""
