"""Answers to the exercises: the right one, and wrong ones with what the check has to say of each."""

ANSWERS = {}


def answer(name, right, *wrong):
    ANSWERS[name] = (right, wrong)


answer(
    "all_reduce",
    """
import torch
import torch.distributed as dist

def all_reduce(x, group):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    total, passed = x.clone(), x.contiguous()
    for _ in range(size - 1):
        came = torch.empty_like(passed)
        works = [dist.isend(passed, group=group, group_dst=(rank + 1) % size),
                 dist.irecv(came, group=group, group_src=(rank - 1) % size)]
        for work in works:
            work.wait()
        total, passed = total + came, came
    return total
""",
    ("def all_reduce(x, group):\n    return x", "each rank of dp has its own|partial over dp|1/2"),
    (
        "import torch, torch.distributed as dist\ndef all_reduce(x, group):\n    dist.all_reduce(x)\n    return x",
        "send and receive alone",
    ),
    (
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
        "on rank 1",
    ),
)
answer(
    "column_row",
    """
import torch
import torch.nn.functional as F
from mmm_lab.exercises.tools import enter, leave

def mlp(x, w1, b1, w2, b2, group):
    hidden = torch.tanh(F.linear(enter(x, group), w1, b1))
    return leave(F.linear(hidden, w2), group) + b2
""",
    (
        """
import torch
import torch.nn.functional as F
from mmm_lab.exercises.tools import enter, leave
def mlp(x, w1, b1, w2, b2, group):
    return leave(F.linear(torch.tanh(F.linear(x, w1, b1)), w2), group) + b2
""",
        r"the gradient of blocks\.1\.norm.*\n.*partial over tp",
    ),
    (
        """
import torch
import torch.nn.functional as F
from mmm_lab.exercises.tools import enter, leave
def mlp(x, w1, b1, w2, b2, group):
    return leave(F.linear(torch.tanh(F.linear(enter(x, group), w1, b1)), w2, b2), group)
""",
        r"the output of blocks\.(0|1\.norm)",
    ),
    (
        """
import torch
import torch.nn.functional as F
from mmm_lab.exercises.tools import enter, leave
def mlp(x, w1, b1, w2, b2, group):
    return F.linear(torch.tanh(F.linear(enter(x, group), w1, b1)), w2) + b2
""",
        r"the output of blocks\.(0|1\.norm)",
    ),
)
SYNC = """
import torch.distributed as dist
from torch.distributed.tensor import DTensor

def sync_gradients(model, group):
    for parameter in model.parameters():
        {body}
"""
answer(
    "sequence_norms",
    SYNC.format(
        body="if not isinstance(parameter, DTensor):\n            dist.all_reduce(parameter.grad, group=group)"
    ),
    ("def sync_gradients(model, group):\n    pass", r"partial over tp"),
    (
        SYNC.format(
            body="if not isinstance(parameter, DTensor):\n"
            "            dist.all_reduce(parameter.grad, group=group)\n"
            "            parameter.grad /= dist.get_world_size(group)"
        ),
        r"1/2",
    ),
)
answer(
    "fsdp_sum",
    """
import torch
import torch.distributed as dist
import torch.nn.functional as F

def local_loss(logits, targets, group):
    count = (targets != -100).sum()
    dist.all_reduce(count, group=group)
    own = F.cross_entropy(logits, targets, reduction="sum")
    return own * dist.get_world_size(group) / count
""",
    (
        "import torch.nn.functional as F\n"
        "def local_loss(logits, targets, group):\n    return F.cross_entropy(logits, targets)",
        "they part at the loss|the loss on rank",
    ),
    (
        """
import torch
import torch.distributed as dist
import torch.nn.functional as F
def local_loss(logits, targets, group):
    count = (targets != -100).sum()
    dist.all_reduce(count, group=group)
    return F.cross_entropy(logits, targets, reduction="sum") / count
""",
        r"every gradient\n.*1/2",
    ),
)
UPDATE = """
import torch.distributed as dist
from mmm_lab.exercises.tools import all_gather, reduce_scatter

def update(parameters, gradients, momentum, lr, group):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    own = reduce_scatter(gradients, group)
    {mean}
    {momentum}
    part = parameters.chunk(size)[rank] - lr * momentum
    {gather}
"""
RIGHT = {
    "mean": "own /= size",
    "momentum": "momentum.mul_(0.9).add_(own)",
    "gather": "return all_gather(part, group)",
}
answer(
    "zero2",
    UPDATE.format(**RIGHT),
    (UPDATE.format(**{**RIGHT, "mean": "pass"}), "2 times too large"),
    (UPDATE.format(**{**RIGHT, "momentum": "momentum.copy_(own)"}), "the second is not"),
    (
        UPDATE.format(**{**RIGHT, "gather": "parameters.chunk(size)[rank].copy_(part); return parameters"}),
        "those of other ranks",
    ),
)
ACCUMULATE = """
import torch
import torch.nn.functional as F

def accumulate(model, inputs, targets, microbatches):
    count, total = (targets != -100).sum(), 0.0
    for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches)):
        {loss}
        loss.backward()
        total = total + loss.detach()
    return total
"""
answer(
    "microbatches",
    ACCUMULATE.format(loss='loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / count'),
    (ACCUMULATE.format(loss="loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())"), "the loss"),
    (
        "import torch.nn.functional as F\ndef accumulate(model, inputs, targets, microbatches):\n"
        "    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())\n"
        "    loss.backward()\n    return loss.detach()",
        "12 samples at once: a micro-batch has 3",
    ),
    (
        "import torch.nn.functional as F\ndef accumulate(model, inputs, targets, microbatches):\n"
        "    logits = [model(x) for x in inputs.chunk(microbatches)]\n    return logits[0].sum()",
        "before the backward of the micro-batch before it",
    ),
)
RING = """
import math
import torch
import torch.distributed as dist
from mmm_lab.exercises.tools import shift

def attention(q, k, v, group):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    tokens, scale = q.shape[2], 1 / math.sqrt(q.shape[3])
    mine = torch.arange(tokens)[:, None] + rank * tokens
    scores, values = [], []
    for turn in range({turns}):
        source = (rank - turn) % size
        theirs = torch.arange(tokens)[None] + source * tokens
        part = q @ k.transpose(2, 3) * scale
        scores.append(part.masked_fill({mask}, -math.inf))
        values.append(v)
        k, v = shift(k, group), shift(v, group)
    return {result}
"""
WHOLE = "torch.softmax(torch.cat(scores, -1), -1) @ torch.cat(values, 2)"
answer(
    "ring_attention",
    RING.format(turns="size", mask="theirs > mine", result=WHOLE),
    (
        "import torch.nn.functional as F\ndef attention(q, k, v, group):\n"
        "    return F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "by itself|the output of",
    ),
    (RING.format(turns="size", mask="theirs < 0", result=WHOLE), "the output of"),
)
ROUTE = """
import torch
import torch.distributed as dist
from mmm_lab.exercises.tools import all_to_all

def route(tokens, expert_of, expert, group):
    size = dist.get_world_size(group)
    order = torch.argsort(expert_of, stable=True)
    send = torch.bincount(expert_of, minlength=size)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)
    send, receive = send.tolist(), receive.tolist()
    come = all_to_all(tokens[order], send, receive, group)
    back = all_to_all(expert(come), receive, send, group)
    {result}
"""
answer(
    "expert_all_to_all",
    ROUTE.format(result="return torch.empty_like(back).index_copy(0, order, back)"),
    (ROUTE.format(result="return back"), "the output of|the loss"),
    ("def route(tokens, expert_of, expert, group):\n    return expert(tokens)", "the output of|the loss"),
)
SHARD = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def shard(model, mesh):
    plan = {{"up": {up}, "down": {down}}}
    for block in model.blocks:
        {block}
    {model}
"""
TWO = "parallelize_module(block, mesh['tp'], plan); fully_shard(block, mesh=mesh['dp'])"
LAYOUT = {"up": "ColwiseParallel()", "down": "RowwiseParallel()"}
answer(
    "two_d",
    SHARD.format(**LAYOUT, block=TWO, model="fully_shard(model, mesh=mesh['dp'])"),
    (SHARD.format(**LAYOUT, block="parallelize_module(block, mesh['tp'], plan)", model="pass"), "it should have"),
    (SHARD.format(**LAYOUT, block=TWO, model="pass"), "each rank of dp has its own"),
)
LOAD = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

def load(model, optimizer, folder):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {{"model": model_state, "optimizer": optimizer_state}}
    {body}
"""
answer(
    "resume",
    LOAD.format(
        body="dcp.load(state, checkpoint_id=folder)\n    set_state_dict(model, optimizer, "
        'model_state_dict=state["model"], optim_state_dict=state["optimizer"])'
    ),
    ("def load(model, optimizer, folder):\n    pass", "step 3: .*the weights are not those of the checkpoint"),
    (
        LOAD.format(body="dcp.load({'model': model_state}, checkpoint_id=folder); model.load_state_dict(model_state)"),
        "step 4: .*what the optimizer has to remember",
    ),
    ("import torch\ndef load(model, optimizer, folder):\n    model.load_state_dict(torch.load(folder))", "load fails"),
    (LOAD.format(body="dcp.load(state, checkpoint_id=folder)"), "step 4: .*lr"),
)
