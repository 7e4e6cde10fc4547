"""A plan for a model that nobody has parallelized: found, said with reasons, and written as code.

What is found comes of one forward on one process: which modules it calls, and autograd's graph of what they compute.
Whether it is right is not decided here: `mmm_verify` runs the code.
"""
