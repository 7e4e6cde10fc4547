"""Ten exercises: each is a file with one function to write, and a check that says where the answer is wrong.

An exercise is a module here. Its docstring is what it asks for. `TEMPLATE` is the file that a reader begins with.
`check` compares the reader's answer with one device, mostly by `mmm_verify`. The answers are in docs/answers.md.
"""

NAMES = (
    "all_reduce",
    "column_row",
    "sequence_norms",
    "fsdp_sum",
    "zero2",
    "microbatches",
    "ring_attention",
    "expert_all_to_all",
    "two_d",
    "resume",
)
