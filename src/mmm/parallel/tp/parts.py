"""Modules of any kind, sharded over tp: a rank's forward computes with its part of the parameters.

PyTorch's styles shard one matrix. These shard what is not an `nn.Linear`: a convolution, a norm of groups,
`nn.MultiheadAttention`. The module's own code runs, and finds smaller parameters::

    x                 full                      ShardedModule: all of it happens inside one module
      │ backward: the ranks' gradients are added up (all-reduce over tp)
      ▼
    forward           with this rank's part of each parameter, as that many heads or channels
      │
      ▼
    y₀ + y₁           partial sums, added up (all-reduce over tp)

A convolution is half of that: `ShardedModule` with ``output="own"`` for the one whose output channels are sharded,
``inputs="own"`` for the one that takes them, and both for what is between them.

The parameters are `DTensor`, so a checkpoint has them as one device has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mmm.errors import LayoutError
from mmm.parallel.tp.local import copied, summed
from mmm.parallel.tp.replicated import Owners, compute_with_local, replicate
from mmm.torch_private.module import own_parameters
from mmm.torch_private.operators import tree_map_only

# (channels, parts) of each section, as `SectionedColwise` takes them.
Sections = Sequence[tuple[int, int]]
FULL, OWN = "full", "own"


def own_channels(full: Tensor, dim: int, sections: Sections, rank: int, tp: int) -> Tensor:
    """Return this rank's part of each section of a tensor, one after the other along `dim`."""
    widths = [channels for channels, _ in sections]
    own = []
    for (channels, parts), section in zip(sections, full.split(widths, dim), strict=True):
        width = channels // parts
        # Where parts are fewer than ranks, neighbours share one.
        index = rank * parts // tp
        own.append(section.narrow(dim, index * width, width))
    return torch.cat(own, dim)


class ShardedModule(ParallelStyle):
    """Shard parameters of one module over tp. Its forward computes with this rank's parts.

    Args:
        dims: maps a parameter's name in the module to the dim that is sharded, in equal pieces. A tuple (dim, sections)
            takes the rank's part of each section, (channels, parts): the weight is then gathered for each forward. All
            other parameters are replicated, and their gradients added up over tp.
        once: parameters that every rank would add to the sum of the outputs, such as the bias of the last matrix.
        inputs: ``full`` if all ranks take the same, ``own`` if each takes its channels.
        output: ``full`` if the ranks' outputs are partial sums, ``own`` if each gives its channels. Of several tensors,
            the first is summed; the others are the same on all ranks.
    """

    def __init__(
        self,
        dims: Mapping[str, int | tuple[int, Sections]],
        once: Sequence[str] = (),
        inputs: str = FULL,
        output: str = FULL,
    ) -> None:
        self.dims = dict(dims)
        self.once = tuple(once)
        self.inputs = inputs
        self.output = output

    def problem(self, module: nn.Module, tp: int) -> str:
        """Why a module cannot be sharded like this by `tp` ranks, and what to do; empty where it can."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name in (*self.dims, *self.once):
            if name not in parameters:
                return f"names {name}, which is no parameter of it: name one of {', '.join(parameters)}"
        for name, entry in self.dims.items():
            dim, sections = _dim_and_sections(entry)
            channels = parameters[name].shape[dim]
            # Without sections, the whole dim is one, in a piece for each rank.
            for width, parts in sections or [(channels, tp)]:
                if width % parts or tp % parts:
                    return f"shards {width} of {name} in {parts} parts over {tp} ranks: use a tp that divides both"
            total = sum(width for width, _ in sections)
            if sections and total != channels:
                return f"is given sections of {total}, and {name} has {channels}"
        return ""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp = device_mesh.size()
        problem = self.problem(module, tp)
        if problem:
            raise LayoutError(f"tp {tp}: ShardedModule {problem}")
        rank = device_mesh.get_local_rank()
        owners = self._shard(module, device_mesh)
        # The others, for a computation of which each rank has a part.
        owners |= replicate(module, None, device_mesh)

        def to_local(name: str, parameter: DTensor) -> Tensor:
            if name not in self.dims:
                full = parameter.to_local(grad_placements=[Partial()])
                if name in self.once:
                    # All ranks add it to the sum of their outputs.
                    return full / tp
                return full
            dim, sections = _dim_and_sections(self.dims[name])
            if not sections:
                return parameter.to_local()
            # An all-gather over tp; in backward, a reduce-scatter of gradients that are zero outside a rank's part.
            gathered = parameter.redistribute(placements=[Replicate()])
            full = gathered.to_local(grad_placements=[Partial()])
            return own_channels(full, dim, sections, rank, tp)

        def copy_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # All ranks have the same inputs, and each has a part of their gradient.
            group = device_mesh.get_group()
            return tree_map_only(Tensor, lambda x: copied(x, group), (args, kwargs))

        compute_with_local(module, owners, to_local)
        if self.inputs == FULL:
            module.register_forward_pre_hook(copy_inputs, with_kwargs=True)
        if self.output == FULL:
            module.register_forward_hook(lambda module, args, output: _with_first_summed(output, device_mesh))
        return module

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> Owners:
        """Make the parameters in `dims` DTensors in equal pieces."""
        owners: Owners = {}
        for name, entry in self.dims.items():
            dim, _ = _dim_and_sections(entry)
            path, _, own_name = name.rpartition(".")
            owner = module.get_submodule(path)
            parameter = own_parameters(owner)[own_name]
            assert parameter is not None
            sharded = distribute_tensor(parameter.detach(), mesh, [Shard(dim)])
            own_parameters(owner)[own_name] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
            owners[name] = (owner, own_name)
        return owners

    def __repr__(self) -> str:
        arguments = [repr(self.dims)]
        defaults = {"once": (), "inputs": FULL, "output": FULL}
        for name, default in defaults.items():
            value = getattr(self, name)
            if value != default:
                arguments.append(f"{name}={value!r}")
        return f"ShardedModule({', '.join(arguments)})"


def _dim_and_sections(entry: int | tuple[int, Sections]) -> tuple[int, Sections]:
    if isinstance(entry, int):
        return entry, ()
    return entry


def _with_first_summed(output: Any, mesh: DeviceMesh) -> Any:
    """What a module returned, with the sum over tp in place of its first tensor of floats."""
    is_first = True

    def sum_first(x: Tensor) -> Tensor:
        nonlocal is_first
        if not is_first or not x.is_floating_point():
            return x
        is_first = False
        return summed(x, mesh.get_group())

    return tree_map_only(Tensor, sum_first, output)


class GatheredChannels(ParallelStyle):
    """Gather the channels that a module computes with, and leave each rank its own of the result.

    It is for a norm over all heads between sharded matrices, which needs the other ranks' channels. The price is an
    all-gather of the activations. Input and output are (…, channels / tp) on each rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        owners = replicate(module, None, device_mesh)
        # A rank's gradient comes from its channels of the output only: a partial sum.
        compute_with_local(module, owners, lambda name, full: full.to_local(grad_placements=[Partial()]))

        def gather(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            own, *others = args
            sharded = DTensor.from_local(own, device_mesh, [Shard(-1)], run_check=False)
            gathered = sharded.redistribute(placements=[Replicate()])
            full = gathered.to_local(grad_placements=[Partial()])
            return full, *others

        def take_own(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            # (…, channels) → (…, channels / tp)
            width = output.shape[-1] // device_mesh.size()
            first = device_mesh.get_local_rank() * width
            return output.narrow(-1, first, width)

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(take_own)
        return module

    def __repr__(self) -> str:
        return "GatheredChannels()"


class ShardedAttention(ParallelStyle):
    """Shard `nn.MultiheadAttention` by heads over tp.

    Its own forward compares the shapes of its weights with its width, so this one replaces it: the same computation
    with this rank's heads. Without ``bias_k``, ``add_zero_attn``, or other widths of keys and values.
    """

    def problem(self, module: nn.Module, tp: int) -> str:
        """Why a module cannot be sharded by heads over `tp` ranks, and what to do; empty where it can."""
        if not isinstance(module, nn.MultiheadAttention):
            return "shards an nn.MultiheadAttention: give this module ShardedModule"
        if module.num_heads % tp:
            return f"shards {module.num_heads} heads, which {tp} ranks do not divide: use a tp that does"
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            return "takes one width for queries, keys and values, and no bias_k or add_zero_attn: name it Replicated()"
        return ""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        tp = device_mesh.size()
        problem = self.problem(module, tp)
        if problem:
            raise LayoutError(f"tp {tp}: ShardedAttention {problem}")
        assert isinstance(module, nn.MultiheadAttention)
        dim = module.embed_dim
        # One matrix has the rows of queries, keys and values: (3 · dim, dim). Each rank has its heads of all three.
        sections = ((dim, tp),) * 3
        dims: dict[str, int | tuple[int, Sections]] = {"in_proj_weight": (0, sections), "out_proj.weight": 1}
        once = []
        if module.in_proj_bias is not None:
            dims["in_proj_bias"] = (0, sections)
            once.append("out_proj.bias")

        def forward(*args: Any, **kwargs: Any) -> Any:
            return _attend(module, tp, device_mesh, *args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]
        return ShardedModule(dims, once)._apply(module, device_mesh)

    def __repr__(self) -> str:
        return "ShardedAttention()"


def _attend(
    module: nn.MultiheadAttention,
    tp: int,
    mesh: DeviceMesh,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward of `nn.MultiheadAttention` with one rank's heads; its output is a partial sum."""
    if need_weights and not average_attn_weights:
        raise LayoutError(f"tp {tp}: ShardedAttention returns attention weights as the mean over heads: leave them out")
    has_batch = query.ndim == 3
    if not has_batch:
        query = query.unsqueeze(0)
        key = key.unsqueeze(0)
        value = value.unsqueeze(0)
    elif not module.batch_first:
        query = query.transpose(0, 1)
        key = key.transpose(0, 1)
        value = value.transpose(0, 1)
    # (batch, seq, dim) each. This rank's rows for queries, for keys and for values: (dim / tp, dim) each.
    weights = module.in_proj_weight.chunk(3)
    biases: Sequence[Tensor | None] = (None,) * 3
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.chunk(3)
    heads = []
    for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
        # (batch, seq, dim / tp) → (batch, seq, heads / tp, head_dim) → (batch, heads / tp, seq, head_dim)
        own = F.linear(x, weight, bias)
        by_head = own.unflatten(-1, (-1, module.head_dim))
        heads.append(by_head.transpose(1, 2))
    q, k, v = heads
    scores_bias = _mask(module, tp, mesh, q, attn_mask, key_padding_mask)
    # (batch, heads / tp, queries, keys)
    scores = q @ k.transpose(-2, -1)
    scores = scores / module.head_dim**0.5
    if scores_bias is not None:
        scores = scores + scores_bias
    probabilities = scores.softmax(-1)
    probabilities = F.dropout(probabilities, module.dropout, module.training)
    # (batch, heads / tp, queries, head_dim) → (batch, queries, dim / tp)
    mixed = (probabilities @ v).transpose(1, 2)
    mixed = mixed.flatten(2)
    output = F.linear(mixed, module.out_proj.weight, module.out_proj.bias)
    mean = None
    if need_weights:
        # The mean over the heads of all ranks.
        own_mean = probabilities.mean(1)
        mean = summed(own_mean / tp, mesh.get_group())
        if not has_batch:
            mean = mean[0]
    if not has_batch:
        return output[0], mean
    if not module.batch_first:
        output = output.transpose(0, 1)
    return output, mean


def _mask(
    module: nn.MultiheadAttention,
    tp: int,
    mesh: DeviceMesh,
    q: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
) -> Tensor | None:
    """Both masks as what is added to the scores of this rank's heads; None without masks.

    Args:
        attn_mask: (queries, keys), or (batch · heads, queries, keys).
        key_padding_mask: (batch, keys).
    """
    total = None
    if attn_mask is not None:
        if attn_mask.ndim == 3:
            # (batch, heads / tp, queries, keys)
            own_heads = attn_mask.unflatten(0, (-1, module.num_heads)).chunk(tp, 1)
            attn_mask = own_heads[mesh.get_local_rank()]
        total = _as_bias(attn_mask, q)
    if key_padding_mask is not None:
        padding = _as_bias(key_padding_mask, q)
        # (batch, 1, 1, keys): for all heads and queries.
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
        if total is None:
            return padding
        total = total + padding
    return total


def _as_bias(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers: True, which hides a key, becomes minus infinity."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    zeros = torch.zeros_like(mask, dtype=like.dtype)
    return zeros.masked_fill(mask, float("-inf"))
