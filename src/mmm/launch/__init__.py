"""From a shell to running ranks. Imports no torch.

`main` reads the command line, `local` turns it into a `LaunchPlan`, `supervise` runs the plan and ends everything.
A scheduler is one more file that builds such a plan.
"""
