"""Layouts that frameworks have and PyTorch's own styles have not: none that is right is accused, and none that is
wrong passes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.parallel import DistributedDataParallel

from mmm_verify import verify
from support.by_hand import average, averaged, copy, gather, nothing, reduce
from support.clock import long

SAME = "same"
NOT_SAME = "not the same"
NOT_COMPARABLE = "not comparable"


def fields():
    return torch.randn(8, 6), torch.randn(8, 3)


def tokens():
    return torch.randint(11, (4, 6)), torch.randint(11, (4, 6))


def rows():
    return torch.randn(4, 5, 8), torch.randn(4, 5, 8)


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def check(model, parallelize, batch, step, mesh, result, **options):
    verdict = verify(model, parallelize, batch, step, mesh, **options)
    assert verdict.result == result, f"{verdict}\n{verdict.details}"
    if result == NOT_COMPARABLE:
        assert verdict.reason
    return verdict


# Modules that are in evaluation mode.


class Block(nn.Sequential):
    def __init__(self):
        first = nn.Linear(6, 8)
        last = nn.Linear(8, 3)
        super().__init__(first, nn.BatchNorm1d(8), nn.Dropout(0.5), last)
        with torch.no_grad():
            self[1].running_mean.normal_()
            self[1].running_var.uniform_(0.5, 2)


class Frozen(Block):
    def __init__(self):
        super().__init__()
        self[1].eval()


class FrozenByTrain(Block):
    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def all_frozen():
    return Block().eval()


def thawed(model, mesh):
    model.train()
    averaged(model, mesh)


def frozen_by_the_ranks(model, mesh):
    model[1].eval()
    averaged(model, mesh)


@pytest.mark.parametrize(
    ("model", "parallelize", "result"),
    [
        (Frozen, averaged, SAME),
        long(FrozenByTrain, averaged, SAME),
        (all_frozen, averaged, SAME),
        long(Frozen, nothing, NOT_SAME),
        (Frozen, thawed, NOT_SAME),
        long(Block, averaged, NOT_SAME),
        long(Block, frozen_by_the_ranks, NOT_SAME),
    ],
)
def test_frozen_modules(model, parallelize, result):
    verdict = check(model, parallelize, fields, None, "dp2", result)
    assert any("evaluation mode" in note for note in verdict.notes) == (model is all_frozen)


# Names that are local to a rank.


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))
        self.group, self.first = None, 0

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        if self.group is not None:
            weights = copy(weights, self.group)
        # Every expert sees every sample.
        y = 0
        for i, expert in enumerate(self.experts):
            y = y + expert(x) * weights[:, self.first + i, None]
        if self.group is None:
            return y
        return reduce(y, self.group)


def with_experts(choose, first=None):
    """Keep some of the experts.

    Args:
        choose: rank → which. first: rank → the first column of the router's weights that it takes.
    """

    def parallelize(model, mesh):
        model.group = mesh["ep"].get_group()
        rank = mesh["ep"].get_local_rank()
        model.experts = nn.ModuleList(model.experts[index] for index in choose(rank))
        model.first = (first or (lambda rank: 2 * rank))(rank)

    return parallelize


def experts_and_dp(model, mesh):
    with_experts(lambda rank: (2 * rank, 2 * rank + 1))(model, mesh)
    average(model, mesh["dp"].get_group())


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x[:, :3]


def first_two_changed(model, mesh):
    """All layers are there, in another order."""
    model.layers = nn.ModuleList(model.layers[index] for index in (1, 0, 2, 3))
    averaged(model, mesh)


@pytest.mark.parametrize(
    ("model", "parallelize", "mesh", "result"),
    [
        (Experts, with_experts(lambda rank: (2 * rank, 2 * rank + 1)), "ep2", SAME),
        long(Experts, with_experts(lambda rank: (3,) if rank else (0, 1, 2), lambda rank: 3 * rank), "ep2", SAME),
        long(Experts, experts_and_dp, "dp2,ep2", SAME),
        (Experts, with_experts(lambda rank: (2 - 2 * rank, 3 - 2 * rank)), "ep2", NOT_SAME),
        long(Experts, with_experts(lambda rank: (2 * rank + 1, 2 * rank)), "ep2", NOT_SAME),
        long(Stack, first_two_changed, "dp2", NOT_SAME),
    ],
)
def test_names_that_are_local_to_a_rank(model, parallelize, mesh, result):
    verdict = check(model, parallelize, fields, None, mesh, result)
    if result == SAME:
        assert any("experts.0 of rank 1" in note for note in verdict.notes), verdict


# A vocabulary that is padded.


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.group, self.words = None, 11

    def forward(self, x):
        h = torch.tanh(self.word(x))
        if self.group is None:
            return self.head(h)[..., : self.words]
        return gather(self.head(copy(h, self.group)), self.group)[..., : self.words]


def padded(to, fill=0.0, outputs=11, spoil=None):
    """Pad the head's rows to a multiple, of which each rank has its part.

    Args:
        fill: what the padding is. outputs: what is kept of the outputs. spoil: changes the rank's rows.
    """

    def parallelize(model, mesh):
        tp = mesh["tp"]
        model.group = tp.get_group()
        model.words = outputs
        weight = model.head.weight.detach()
        full = torch.cat([weight, torch.full((to - len(weight), 8), fill, dtype=weight.dtype)])
        own = full.chunk(tp.size())[tp.get_local_rank()].clone()
        if spoil is not None:
            spoil(own, tp.get_local_rank())
        model.head.weight = nn.Parameter(own)

    return parallelize


def padded_on_each_rank(model, mesh):
    """Not sharded."""
    model.words = 11
    padding = torch.zeros(5, 8).double()
    model.head.weight = nn.Parameter(torch.cat([model.head.weight.detach(), padding]))
    averaged(model, mesh)


def padded_dtensor(model, mesh):
    padded(12)(model, mesh)
    local = model.head.weight.detach()
    sharded = DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False)
    model.head.weight = nn.Parameter(sharded)
    model.head.forward = lambda x: F.linear(x, model.head.weight.to_local())


def zero_the_last_but_one(rows, rank):
    if rank == 1:
        rows[-2] = 0.0


def embedding_in_parts(spoil):
    """Two replicas of shards of the embedding; rows that no sample looks up are spoilt in one of them."""

    def parallelize(model, mesh):
        tp = mesh["tp"]
        first = 6 * tp.get_local_rank()
        padded_rows = torch.cat([model.word.weight.detach(), torch.zeros(1, 8).double()])
        own = padded_rows.chunk(2)[tp.get_local_rank()].clone()
        if mesh["dp"].get_local_rank():
            spoil(own, tp.get_local_rank())
        weight = nn.Parameter(own)
        model.word.weight = weight
        group = tp.get_group()

        def look_up(x):
            inside = (x >= first) & (x < first + len(weight))
            h = F.embedding((x - first).clamp(0, len(weight) - 1), weight)
            return reduce(torch.where(inside[..., None], h, 0.0), group)

        model.word.forward = look_up
        average(model, mesh["dp"].get_group())

    return parallelize


def few_tokens():
    """Of the first half of the words the last is not among them, and of the second half none."""
    return torch.randint(5, (4, 6)), torch.randint(11, (4, 6))


def spoil_the_last(rows, rank):
    if rank == 0:
        rows[-1] = 1.0


def spoil_all(rows, rank):
    if rank == 1:
        rows.zero_()


@pytest.mark.parametrize(
    ("spoil", "result"),
    [(lambda rows, rank: None, SAME), (spoil_the_last, NOT_SAME), (spoil_all, NOT_SAME)],
)
def test_rows_that_are_spoilt_are_no_padding(spoil, result):
    check(Tagger, embedding_in_parts(spoil), few_tokens, None, "dp2,tp2", result)


def move_up(rows, rank):
    rows.copy_(rows.roll(1, 0))


@pytest.mark.parametrize(
    ("parallelize", "mesh", "result"),
    [
        (padded(12), "tp2", SAME),
        # The last rank has padding alone.
        long(padded(16), "tp4", SAME),
        long(padded(16, fill=0.3), "tp4", NOT_COMPARABLE),
        long(padded_on_each_rank, "dp2", SAME),
        long(padded_dtensor, "tp2", SAME),
        (padded(12, outputs=12), "tp2", NOT_SAME),
        (padded(12, spoil=zero_the_last_but_one), "tp2", NOT_SAME),
        long(padded(12, spoil=move_up), "tp2", NOT_SAME),
        long(padded(12, spoil=lambda rows, rank: rows.mul_(1 + 1e-6)), "tp2", NOT_SAME),
    ],
)
def test_a_vocabulary_that_is_padded(parallelize, mesh, result):
    verdict = check(Tagger, parallelize, tokens, None, mesh, result)
    if result == SAME:
        assert any("head.weight" in note and "padded" in note for note in verdict.notes), verdict


# A matrix that is sharded along two dims.


class Grid(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.mesh = None

    def forward(self, x):
        if self.mesh is None:
            return self.a(x)
        row = self.mesh["row"]
        col = self.mesh["col"]
        own = x.chunk(col.size(), -1)[col.get_local_rank()]
        return gather(reduce(own @ self.a.weight.T, col.get_group()), row.get_group())


def cut(choose):
    def parallelize(model, mesh):
        model.mesh = mesh
        weight = model.a.weight.detach()
        row, col = choose(mesh["row"].get_local_rank(), mesh["col"].get_local_rank())
        rows = weight.chunk(mesh["row"].size(), 0)[row]
        block = rows.chunk(mesh["col"].size(), 1)[col]
        model.a.weight = nn.Parameter(block.clone())

    return parallelize


def transposed(model, mesh):
    """The same numbers in another arrangement: nobody can say whether that is right."""
    weight = model.a.weight.detach()
    model.a.weight = nn.Parameter(weight.reshape(4, 16).clone())
    model.a.forward = lambda x: F.linear(x, model.a.weight.reshape(8, 8))


@pytest.mark.parametrize(
    ("parallelize", "mesh", "result"),
    [
        (cut(lambda row, col: (row, col)), "row2,col2", SAME),
        long(cut(lambda row, col: (row, col)), "row2,col1", SAME),
        (cut(lambda row, col: (col, row)), "row2,col2", NOT_SAME),
        long(cut(lambda row, col: (1 - row, col)), "row2,col2", NOT_SAME),
        (transposed, "row2,col1", NOT_COMPARABLE),
    ],
)
def test_a_matrix_in_blocks(parallelize, mesh, result):
    check(Grid, parallelize, rows, None, mesh, result, batch_axes=())


# A weight that is cut by hand over tp, and then sharded over dp by FSDP, whose DTensors know only of the part.


class CutMLP(nn.Module):
    """The second matrix has one row: cut by columns, a rank of dp has a part of it, and the other nothing."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 1, bias=False)
        self.group = None

    def forward(self, x):
        if self.group is None:
            return self.down(torch.tanh(self.up(x)))
        hidden = torch.tanh(self.up(copy(x, self.group)))
        return reduce(self.down(hidden), self.group)


def cut_and_sharded(wrong=False):
    def parallelize(model, mesh):
        rank = mesh["tp"].get_local_rank()
        model.group = mesh["tp"].get_group()
        model.up.weight = nn.Parameter(model.up.weight.detach().chunk(2)[rank].clone())
        model.up.bias = nn.Parameter(model.up.bias.detach().chunk(2)[rank].clone())
        columns = 1 - rank if wrong else rank
        model.down.weight = nn.Parameter(model.down.weight.detach().chunk(2, 1)[columns].clone())
        fully_shard(model, mesh=mesh["dp"])

    return parallelize


@pytest.mark.parametrize(("wrong", "result"), [(False, SAME), (True, NOT_SAME)])
def test_cut_by_hand_and_then_sharded(wrong, result):
    def batch():
        return torch.randn(8, 6), torch.randn(8, 1)

    check(CutMLP, cut_and_sharded(wrong), batch, None, "dp2,tp2", result)


# Gradients that are sparse, are elsewhere, or are gone.


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(11, 8, sparse=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        return self.head(self.word(x))


def ddp(model, mesh):
    return DistributedDataParallel(model)


def averaged_but_the_sparse_one(model, mesh):
    average(model.head, mesh.get_group())


def main_grad_step(model, batch, mesh):
    loss = F.mse_loss(model(batch[0]), batch[1])
    if mesh is None:
        return loss
    loss.backward()
    for parameter in model.parameters():
        parameter.main_grad = parameter.grad
        parameter.grad = None
    return loss.detach()


def steps_in_backward(keeps=False):
    def parallelize(model, mesh):
        @torch.no_grad()
        def take(parameter):
            dist.all_reduce(parameter.grad.div_(mesh.size()))
            parameter -= 0.1 * parameter.grad
            if not keeps:
                parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(take)

    return parallelize


def forgets_a_gradient(model, mesh):
    averaged(model, mesh)

    def forget(parameter):
        parameter.grad = None

    model[0].weight.register_post_accumulate_grad_hook(forget)


@pytest.mark.parametrize(
    ("model", "parallelize", "batch", "step", "result"),
    [
        (Sparse, ddp, tokens, None, SAME),
        long(Sparse, nothing, tokens, None, NOT_SAME),
        (Sparse, averaged_but_the_sparse_one, tokens, None, NOT_SAME),
        (mlp, averaged, fields, main_grad_step, NOT_COMPARABLE),
        (mlp, steps_in_backward(), fields, None, NOT_COMPARABLE),
        long(mlp, steps_in_backward(keeps=True), fields, None, NOT_COMPARABLE),
        long(mlp, forgets_a_gradient, fields, None, NOT_SAME),
    ],
)
def test_gradients(model, parallelize, batch, step, result):
    check(model, parallelize, batch, step, "dp2", result)


# The older FSDP.


def fsdp1(**options):
    def parallelize(model, mesh):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)

    return parallelize


def alone(model, mesh):
    """Groups of one rank: nothing is synchronized."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return fsdp1(process_group=groups[dist.get_rank()], sharding_strategy=ShardingStrategy.NO_SHARD)(model, mesh)


def another_weight(model, mesh):
    with torch.no_grad():
        model[2].weight[0, 0] += 1e-6
    return fsdp1()(model, mesh)


# Every linear layer is a unit of FSDP.
EACH = ModuleWrapPolicy({nn.Linear})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("parallelize", "mesh", "result"),
    [
        (fsdp1(use_orig_params=True), "dp2", SAME),
        (fsdp1(), "dp2", SAME),
        long(fsdp1(auto_wrap_policy=EACH, use_orig_params=True), "dp4", SAME),
        long(fsdp1(sharding_strategy=ShardingStrategy.NO_SHARD), "dp2", SAME),
        (alone, "dp2", NOT_SAME),
        (another_weight, "dp2", NOT_SAME),
        long(fsdp1(), "tp2", SAME),
    ],
)
def test_the_older_fsdp(parallelize, mesh, result):
    check(mlp, parallelize, fields, None, mesh, result)


# Modules that the parallel program makes itself, with other names, or in float32.


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x):
        return self.out(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Fused(nn.Module):
    def __init__(self, model, dtype=None):
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False, dtype=dtype)
        self.out = model.out
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([model.q.weight, model.k.weight, model.v.weight]))

    def forward(self, x):
        return self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))


@pytest.mark.parametrize(("dtype", "says"), [(None, "qkv.weight"), (torch.float32, "float64")])
def test_modules_of_its_own(dtype, says):
    verdict = check(Attention, lambda model, mesh: ddp(Fused(model, dtype), mesh), rows, None, "dp2", NOT_COMPARABLE)
    assert says in verdict.reason


def compiled():
    return torch.compile(mlp(), backend="aot_eager")


def fsdp_compiled(model, mesh):
    fully_shard(model, mesh=mesh)
    model.compile(backend="aot_eager")


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "parallelize", "result"),
    [(compiled, ddp, SAME), (mlp, fsdp_compiled, SAME), (compiled, nothing, NOT_SAME)],
)
def test_compiled(model, parallelize, result):
    check(model, parallelize, fields, None, "dp2", result, timeout=300.0)


class Gated(nn.Module):
    """Gate and up are one matrix, of some dims before (experts), that lies along `dim`."""

    def __init__(self, hidden=8, packed=2, experts=0, last=False):
        super().__init__()
        self.before = nn.Linear(6, 6)
        shape = (6, packed * hidden) if last else (packed * hidden, 6)
        down = (6, hidden)
        self.packed = packed
        self.last = last
        self.group = None
        self.up = nn.Parameter(torch.randn(*([experts] if experts else []), *shape) / 3)
        self.down = nn.Parameter(torch.randn(*([experts] if experts else []), *down) / 3)

    def forward(self, x):
        x = self.before(x)
        up, down = [w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down)]
        if self.group is not None:
            x = copy(x, self.group)
        y = x @ (up if self.last else up.mT)
        first, *others = y.chunk(self.packed, -1)
        for other in others:
            first = F.silu(first) * other
        y = first @ down.mT
        y = y.sum(0) if y.ndim > 2 else y
        if self.group is None:
            return y
        return reduce(y, self.group)


def both_sides():
    return torch.randn(8, 6), torch.randn(8, 6)


def piece(tensor, dim, factor, count, index):
    """A rank's piece of each of `factor` pieces."""
    return torch.cat([one.tensor_split(count, dim)[index] for one in tensor.chunk(factor, dim)], dim)


def cut_each(model, mesh, *, label=None, factor=None, index=None):
    """As it should be cut_each; or labelled, or cut_each, in another way.

    Args:
        label: the placement that the DTensor says. factor: of how many pieces the rank has one each. index: which.
    """
    tp = mesh["tp"]
    model.group = tp.get_group()
    rank = tp.get_local_rank()
    size = tp.size()
    dim = model.up.ndim - (1 if model.last else 2)
    index = rank if index is None else index(rank)
    up = piece(model.up.detach(), dim, factor or model.packed, size, index)
    down = piece(model.down.detach(), model.down.ndim - 1, 1, size, index)
    label = label or StridedShard(dim, split_factor=model.packed)
    for name, local, placement in (("up", up, label), ("down", down, Shard(model.down.ndim - 1))):
        full = getattr(model, name)
        sharded = DTensor.from_local(local, tp, [placement], run_check=False, shape=full.shape, stride=full.stride())
        setattr(model, name, nn.Parameter(sharded))


def cut_and_averaged(model, mesh):
    cut_each(model, mesh)
    average(model, mesh["dp"].get_group())


def not_added_up_backward(model, mesh):
    cut_each(model, mesh)
    model.before.register_forward_hook(lambda module, args, y: y.detach() / 2 + y / 2)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def fsdp_of_tp(model, mesh):
    """What FSDP calls strided: it shards what tp has left."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])


@pytest.mark.parametrize(
    ("model", "parallelize", "mesh"),
    [
        (Gated, cut_each, "tp2"),
        (lambda: Gated(experts=2), cut_each, "tp2"),
        long(lambda: Gated(last=True), cut_each, "tp2"),
        (lambda: Gated(hidden=5), cut_each, "tp2"),
        long(Gated, cut_and_averaged, "dp2,tp2"),
        long(Two, fsdp_of_tp, "dp4,tp2"),
    ],
)
def test_packed_matrices_that_are_right(model, parallelize, mesh):
    verdict = verify(model, parallelize, both_sides, mesh=mesh)
    assert verdict.same, f"{verdict}\n{verdict.details}"


@pytest.mark.parametrize(
    ("parallelize", "mesh"),
    [
        (partial(cut_each, label=Shard(0)), "tp2"),
        (partial(cut_each, factor=1), "tp2"),
        long(partial(cut_each, index=lambda rank: 1 - rank), "tp2"),
        long(not_added_up_backward, "tp2"),
    ],
)
def test_packed_matrices_that_are_wrong(parallelize, mesh):
    verdict = verify(Gated, parallelize, both_sides, mesh=mesh)
    assert verdict.result == "not the same", f"{verdict}\n{verdict.details}"
