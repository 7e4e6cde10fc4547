"""Ways in which people make models parallel, with PyTorch's means alone; each takes the name of a mistake to make."""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from support.by_hand import copy, reduce

# --- a Llama as torchtitan has it: sequence parallel, tensor parallel, FSDP -----------------------------------------


# Of each mistake, what stands in the plan in place of the right style; None: nothing.
TOP_MISTAKES = {
    "final_norm": {"norm": None},
    "embedding_replicated": {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
    },
    "local_logits": {"output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1))},
}
SAID_REPLICATED = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
# Changes of the plan, by the mistake that they make.
LAYER_MISTAKES = {
    "attention_norm": {"attention_norm": None},
    "ffn_norm": {"ffn_norm": None},
    "w2_replicated_output": {"feed_forward.w2": RowwiseParallel(output_layouts=Replicate())},
    "wo_columns": {"attention.wo": ColwiseParallel(output_layouts=Shard(1))},
    "no_gather": {"feed_forward": None},
    "input_said_replicated": {"feed_forward": SAID_REPLICATED},
}


def titan(model, mesh, mistake=None):
    names = mesh.mesh_dim_names
    if "tp" in names:
        replicate_attention = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        top = {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        layer = {
            "attention_norm": SequenceParallel(),
            "attention": replicate_attention,
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        for changes, plan in ((TOP_MISTAKES, top), (LAYER_MISTAKES, layer)):
            for name, style in changes.get(mistake, {}).items():
                plan[name] = style
        top, layer = ({name: style for name, style in plan.items() if style is not None} for plan in (top, layer))
        parallelize_module(model, mesh["tp"], top)
        for block in model.layers.values():
            parallelize_module(block, mesh["tp"], layer)
    if mistake == "not_causal":
        for block in model.layers.values():
            block.attention.causal = False
    if mistake == "eps":
        model.norm.eps = 1e-3
    if mistake == "last_layer_skipped":
        del model.layers["1"]
    if mistake == "layers_swapped":
        model.layers = nn.ModuleDict({"0": model.layers["1"], "1": model.layers["0"]})
    shard_with_fsdp(model, mesh, list(model.layers.values()), mistake)


def shard_with_fsdp(model, mesh, units, mistake=None):
    if "dp" not in mesh.mesh_dim_names:
        return
    over = mesh["tp"] if mistake == "fsdp_over_tp" else mesh["dp"]
    policy = of_root = MixedPrecisionPolicy()
    if mistake == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float64)
        # Up to PyTorch 2.10 the mean squared error of two dtypes has no backward.
        of_root = replace(policy, output_dtype=torch.float64)
    left_out = {units[0]} if mistake == "unit_not_wrapped_ignored" else set()
    for unit in units:
        if unit not in left_out:
            fully_shard(unit, mesh=over, mp_policy=policy)
    ignored = {p for unit in left_out for p in unit.parameters()}
    fully_shard(model, mesh=over, mp_policy=of_root, ignored_params=ignored or None)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if mistake == "summed":
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            if mistake == "halved_again":
                module.set_gradient_divide_factor(4.0)
                module.set_force_sum_reduction_for_comms(True)
            if mistake == "no_sync":
                module.set_requires_gradient_sync(False)


# --- a GPT as Megatron has it, by hand: two autograd functions and local linears --------------------------------------


def reduce_twice(x, group):
    """An all-reduce backward too: it sums what is the same already."""
    return reduce(copy(x, group), group)


class Columns(nn.Module):
    def __init__(self, linear, mesh, mistake=None):
        super().__init__()
        rank = mesh.get_local_rank()
        size = mesh.size()
        if mistake == "wrong_columns":
            rank = (rank + 1) % size
        if mistake == "same_columns":
            rank = 0
        self.group = mesh.get_group()
        self.mistake = mistake
        self.weight = nn.Parameter(linear.weight.detach().chunk(size)[rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().chunk(size)[rank].clone())

    def forward(self, x):
        if self.mistake != "no_f":
            x = copy(x, self.group)
        return F.linear(x, self.weight, self.bias)


class Rows(nn.Module):
    def __init__(self, linear, mesh, mistake=None):
        super().__init__()
        rank = mesh.get_local_rank()
        size = mesh.size()
        self.group = mesh.get_group()
        self.mistake = mistake
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, dim=1)[rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        bias = self.bias
        if self.mistake == "bias_on_each":
            return reduce(F.linear(x, self.weight, bias), self.group)
        y = F.linear(x, self.weight)
        if self.mistake == "no_g":
            return y + bias
        if self.mistake == "g_sums_twice":
            return reduce_twice(y, self.group) + bias
        return reduce(y, self.group) + bias


def megatron(model, mesh, mistake=None, position=0):
    """Along tp; a mistake is made in block `at` alone."""
    for index, block in enumerate(model.h):
        wrong = mistake if index == position else None
        for name in ("q", "k", "v", "fc"):
            of = wrong if name == "fc" else None
            setattr(block, name, Columns(getattr(block, name), mesh["tp"], of))
        for name in ("proj", "fc_out"):
            setattr(block, name, Rows(getattr(block, name), mesh["tp"], wrong if name == "fc_out" else None))
        block.heads //= mesh["tp"].size()
        if wrong == "all_heads":
            block.heads *= mesh["tp"].size()
    if mistake == "untied":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    if mistake == "tp_seeds":
        torch.manual_seed(mesh.get_rank())
    if mistake == "weight_drawn_anew":
        torch.manual_seed(dist.get_rank())
        nn.init.normal_(model.wpe.weight, std=0.02)
    if mistake == "positions_shifted":
        model.wpe.weight.data = model.wpe.weight.data.roll(1, 0)


def megatron_under_fsdp(model, mesh, mistake=None):
    """FSDP's DTensors know of the part that tensor parallelism has left, and not of the whole weight."""
    megatron(model, mesh, mistake)
    shard_with_fsdp(model, mesh, list(model.h))


def averaged_by_hand(step, model, batch, mesh, mistake=None):
    """A step that averages its gradients over dp itself."""
    loss = step(model, batch)
    if mesh is None or "dp" not in mesh.mesh_dim_names:
        return loss
    loss.backward()
    group = mesh["dp"].get_group()
    size = mesh["dp"].size()
    for index, parameter in enumerate(p for p in model.parameters() if p.grad is not None):
        if mistake == "first_forgotten" and index == 0:
            continue
        if mistake == "others_forgotten" and index % 3 == 2:
            continue
        dist.all_reduce(parameter.grad, group=dist.group.WORLD if mistake == "over_the_world" else group)
        if mistake != "not_divided":
            parameter.grad /= size
    return loss


# --- others -----------------------------------------------------------------------------------------------------------


def ddp(model, mesh, mistake=None):
    if mistake != "local_statistics":
        for norm in [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]:
            norm.forward = partial(_global_statistics, norm, mesh["dp"])
    if mistake == "one_rank_frozen" and mesh.get_rank() == 1:
        model.conv1.weight.register_hook(torch.zeros_like)
    if mistake == "not_wrapped":
        return model
    if mistake == "buffers_forgotten":
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        for norm in [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]:
            norm.running_mean += dist.get_rank()
        return wrapped
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def _global_statistics(norm, mesh, x):
    # (batch, channels, height, width)
    group = mesh.get_group()
    size = mesh.size()
    mean = reduce_twice(x.mean((0, 2, 3)), group) / size
    square = reduce_twice(x.square().mean((0, 2, 3)), group) / size
    var = square - mean.square()
    count = x.numel() / x.shape[1] * size
    with torch.no_grad():
        norm.num_batches_tracked += 1
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(var * count / (count - 1), norm.momentum)
    scale = norm.weight * torch.rsqrt(var + norm.eps)
    return x * scale[:, None, None] + (norm.bias - mean * scale)[:, None, None]


def mixer(model, mesh, mistake=None):
    if "tp" in mesh.mesh_dim_names:
        for index, block in enumerate(model.blocks):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            if mistake == "up_alone" and index == 1:
                plan = {"up": ColwiseParallel(output_layouts=Replicate())}
            if mistake == "down_partial" and index == 1:
                block.down.register_forward_hook(lambda module, args, out: out * 2)
            parallelize_module(block, mesh["tp"], plan)
    if mistake == "norm_in_place_of_other":
        model.blocks[1].norm2 = model.blocks[0].norm2
    if mistake == "hook_scales":
        model.blocks[0].up.register_forward_hook(lambda module, args, out: out * (1 + 1e-6))
    if mistake == "activation_detached":
        model.blocks[0].norm.register_forward_hook(lambda module, args, out: out.detach())
    shard_with_fsdp(model, mesh, list(model.blocks), mistake)


def fsdp(model, mesh, mistake=None):
    units = [module for module in model.children() if not isinstance(module, nn.ModuleList)]
    shard_with_fsdp(model, mesh, units, mistake)


class Half(nn.Module):
    def __init__(self, model, first):
        super().__init__()
        self.layers = model.layers
        if first:
            self.tok_embeddings = model.tok_embeddings
            del self.layers["1"]
        else:
            self.norm = model.norm
            self.output = model.output
            del self.layers["0"]

    def forward(self, x):
        h = self.tok_embeddings(x) if hasattr(self, "tok_embeddings") else x
        for layer in self.layers.values():
            h = layer(h)
        if hasattr(self, "output"):
            return self.output(self.norm(h))
        return h


def pipeline(model, mesh, mistake=None, microbatches=2):
    rank = mesh["pp"].get_local_rank()
    half = Half(model, rank == 0)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())

    def loss(output, target):
        value = F.cross_entropy(output.flatten(0, 1), target.flatten())
        return value * microbatches if mistake == "scaled" else value

    schedule = ScheduleGPipe(stage, microbatches, loss_fn=loss, scale_grads=mistake != "unscaled")
    return schedule, half


def pipeline_step(program, batch, mesh):
    tokens, targets = batch
    if mesh is None:
        return F.cross_entropy(program(tokens).flatten(0, 1), targets.flatten())
    losses = []
    schedule, _ = program
    if mesh["pp"].get_local_rank() == 0:
        schedule.step(tokens)
        return None
    schedule.step(target=targets, losses=losses)
    return torch.stack(losses).mean()


# --- mistakes that any of them can have ------------------------------------------------------------------------------


def also(parallelize, wrong):
    """`parallelize`, and something wrong afterwards."""

    def both(model, mesh):
        result = parallelize(model, mesh)
        wrong(model if result is None else result, mesh)
        return result

    return both


def scaled_gradient(name, factor):
    def wrong(model, mesh):
        dict(model.named_parameters())[name].register_hook(lambda grad: grad * factor)

    return wrong


def rank_one_off(name, by=1e-6):
    def wrong(model, mesh):
        if dist.get_rank() == 1:
            parameter = dict(model.named_parameters())[name]
            with torch.no_grad():
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).add_(by)

    return wrong


def wrong_output(name, change):
    def wrong(model, mesh):
        dict(model.named_modules())[name].register_forward_hook(lambda module, args, out: change(out))

    return wrong
