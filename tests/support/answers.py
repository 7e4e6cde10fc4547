"""Answers to the exercises: the right ones are those of docs/answers.md; wrong ones, with what the check has to say of
each."""

import re

from support.pages import DOCS

PAGE = (DOCS / "answers.md").read_text(encoding="utf-8")
RIGHT = dict(re.findall(r"^## `(\w+)`$.*?^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
# What the check says, and a program; or what it says, a piece of the right answer, and what takes its place.
WRONG = {
    "all_reduce": [
        ("each rank of dp has its own|partial over dp|1/2", "def all_reduce(x, group):\n    return x"),
        (
            "send and receive alone",
            "import torch.distributed as dist\ndef all_reduce(x, group):\n    dist.all_reduce(x)\n    return x",
        ),
        (
            "on rank 1",
            """
import torch
import torch.distributed as dist
def all_reduce(x, group):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank:
        dist.send(x, group=group, group_dst=0)
        return x
    total = x.clone()
    for other in range(1, size):
        came = torch.empty_like(x)
        dist.recv(came, group=group, group_src=other)
        total = total + came
    return total
""",
        ),
    ],
    "column_row": [
        (r"the gradient of blocks\.1\.norm.*\n.*partial over tp", "enter(x, group)", "x"),
        (
            r"the output of blocks\.(0|1\.norm)",
            "leave(F.linear(hidden, w2), group) + b2",
            "leave(F.linear(hidden, w2, b2), group)",
        ),
        (r"the output of blocks\.(0|1\.norm)", "leave(F.linear(hidden, w2), group)", "F.linear(hidden, w2)"),
    ],
    "sequence_norms": [
        ("partial over tp", "def sync_gradients(model, group):\n    pass"),
        (
            "1/2",
            "dist.all_reduce(parameter.grad, group=group)",
            "dist.all_reduce(parameter.grad.div_(dist.get_world_size(group)), group=group)",
        ),
    ],
    "fsdp_sum": [
        (
            "they part at the loss|the loss on rank",
            "import torch.nn.functional as F\n"
            "def local_loss(logits, targets, group):\n    return F.cross_entropy(logits, targets)",
        ),
        (r"every gradient\n.*1/2", " * dist.get_world_size(group)", ""),
    ],
    "zero2": [
        ("they part at inlet.weight", "own /= size", "pass"),
        ("they part at the second step", "momentum.mul_(0.9).add_(own)", "momentum.copy_(own)"),
        (
            "inlet.weight on rank 1",
            "return all_gather(part, group)",
            "parameters.chunk(size)[rank].copy_(part)\n    return parameters",
        ),
    ],
    "microbatches": [
        ("the loss", ', reduction="sum") / count', ")"),
        (
            "12 samples at once: a micro-batch has 3",
            "import torch.nn.functional as F\ndef accumulate(model, inputs, targets, microbatches):\n"
            "    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())\n"
            "    loss.backward()\n    return loss.detach()",
        ),
        (
            "before the backward of the micro-batch before it",
            "def accumulate(model, inputs, targets, microbatches):\n"
            "    logits = [model(x) for x in inputs.chunk(microbatches)]\n    return logits[0].sum()",
        ),
    ],
    "ring_attention": [
        (
            "by itself|the output of",
            "import torch.nn.functional as F\ndef attention(q, k, v, group):\n"
            "    return F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        ),
        ("the output of", "theirs > mine", "theirs < 0"),
    ],
    "expert_all_to_all": [
        ("the output of|the loss", "torch.empty_like(back).index_copy(0, order, back)", "back"),
        ("the output of|the loss", "def route(tokens, expert_of, expert, group):\n    return expert(tokens)"),
    ],
    "two_d": [
        (
            "it should have",
            '        fully_shard(block, mesh=mesh["dp"])\n    fully_shard(model, mesh=mesh["dp"])\n',
            "",
        ),
        ("each rank of dp has its own", '    fully_shard(model, mesh=mesh["dp"])\n', ""),
    ],
    "resume": [
        (
            "step 3: .*the weights are not those of the checkpoint",
            "def load(model, optimizer, folder):\n    pass",
        ),
        (
            "step 4: .*what the optimizer has to remember",
            "import torch.distributed.checkpoint as dcp\ndef load(model, optimizer, folder):\n"
            "    state = model.state_dict()\n    dcp.load({'model': state}, checkpoint_id=folder)\n"
            "    model.load_state_dict(state)",
        ),
        (
            "load fails",
            "import torch\ndef load(model, optimizer, folder):\n    model.load_state_dict(torch.load(folder))",
        ),
        (
            "step 4: .*lr",
            'set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])',
            "",
        ),
    ],
}


def wrong_answer(name, number):
    """A wrong program, and what the check has to say of it."""
    says, *code = WRONG[name][number]
    if len(code) == 1:
        return code[0], says
    before, after = code
    assert RIGHT[name].count(before) == 1, before
    return RIGHT[name].replace(before, after), says
