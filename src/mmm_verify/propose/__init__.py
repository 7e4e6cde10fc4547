"""Finds a plan for a model that nobody has parallelized, explains it, and writes it as code.

The findings come from one forward on one process: the modules that it calls, and autograd's graph of what they compute.
Whether the plan is right is not decided here: `mmm_verify` runs the code.
"""
