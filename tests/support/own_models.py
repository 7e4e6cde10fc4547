"""Models as people write them: of which modules, on which batches, with which loss, and how they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from mmm.parallel import PartialGradient, Plan, Replicated
from support.own_modules import (
    FNO,
    VAE,
    Centred,
    Codebook,
    Custom,
    Experts,
    Flow,
    Forecaster,
    FusedBlock,
    GraphNet,
    HeadNorm,
    Heads,
    Phases,
    ResNet,
    Scalar,
    TiedLoRA,
    Towers,
    UNet,
    mlp,
)

Batch = tuple[Any, ...]


def squared(model: nn.Module, batch: Batch, gather: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum") / y[0].numel()


def one_step(
    case: OwnModel, models: Sequence[nn.Module], optimizers: Sequence[Any], batch: Batch, gather: Any, count: int
) -> Tensor:
    """A step of plain PyTorch; the local loss."""
    loss = case.loss(*models, batch, gather) / count
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


@dataclass(frozen=True)
class OwnModel:
    """A model, or several, and a step of them.

    Attributes:
        makes: the constructor of each. plans: how each is sharded. batch: of samples of these numbers.
        loss: (models, batch, gather) → the sum over the samples of the batch. `gather` gives the tensor of all ranks'
            samples, and the number of the first of this rank.
        sgd: instead of AdamW, which takes gradients that are zero but for rounding to steps.
        step: (case, models, optimizers, batch, gather, samples of the global batch) → the local loss.
    """

    makes: tuple[Callable[[], nn.Module], ...]
    plans: tuple[Plan, ...]
    batch: Callable[[Sequence[int]], Batch]
    loss: Callable[..., Tensor] = squared
    sgd: bool = False
    step: Callable[..., Tensor] = one_step


def numbers_of(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def normal(*shape: int) -> Callable[[Sequence[int]], Batch]:
    """A batch of tensors of this shape, each a function of its sample's number, and one of targets."""

    def batch(samples: Sequence[int]) -> Batch:
        drawn = [torch.randn(2, *shape, generator=numbers_of(n), dtype=torch.float64) for n in samples]
        return torch.stack([pair[0] for pair in drawn]), torch.stack([pair[1] for pair in drawn])

    return batch


def plan(
    columns: str = "", rows: str = "", replicated: str = "", partial: str = "", units: Any = (), **more: Any
) -> Plan:
    """Names, separated by spaces, by style."""
    styles = ((columns, ColwiseParallel), (rows, RowwiseParallel), (replicated, Replicated), (partial, PartialGradient))
    return Plan({name: style() for names, style in styles for name in names.split()}, units, **more)


def images(samples):
    x = torch.stack([torch.randn(1, 6, 6, generator=numbers_of(n), dtype=torch.float64) for n in samples])
    return x, torch.tensor(samples) % 3


def classes(model, batch, gather):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum")


def elbo(model, batch, gather):
    x, noise = batch
    made, mean, log_std = model(x, noise[:, :2])
    return (made - x).square().sum() + (mean.square() + (2 * log_std).exp() - 1 - 2 * log_std).sum() / 2


def gan_step(case, models, optimizers, batch, gather, count):
    """The critic's loss and step, then the generator's."""
    (generator, critic), (of_generator, of_critic), (real, noise) = models, optimizers, batch
    loss = (F.softplus(-critic(real)).sum() + F.softplus(critic(generator(noise).detach())).sum()) / count
    loss.backward()
    of_critic.step()
    of_critic.zero_grad()
    critic.requires_grad_(False)
    (F.softplus(-critic(generator(noise))).sum() / count).backward()
    critic.requires_grad_(True)
    of_generator.step()
    of_generator.zero_grad()
    return loss.detach()


def graphs(samples):
    sizes = torch.tensor([2 + number % 4 for number in samples])
    kind = torch.cat([torch.randint(3, (2 + n % 4,), generator=numbers_of(n)) for n in samples])
    first = (sizes.cumsum(0) - sizes).tolist()
    edges = [(1 - torch.eye(size)).nonzero().T + start for size, start in zip(sizes.tolist(), first, strict=True)]
    source, target = torch.cat(edges, 1)
    graph = torch.arange(len(sizes)).repeat_interleave(sizes)
    return (kind, source, target, graph, len(sizes)), torch.tensor(samples, dtype=torch.float64).sin()


def energies(model, batch, gather):
    molecules, energy = batch
    return (model(*molecules) - energy).square().sum()


def second_derivative(model, batch, gather):
    """u'' = f."""
    x, f = batch
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return (curvature - f).square().sum()


def contrastive(model, batch, gather):
    """Each image beside the texts of the global batch, and the other way round."""
    image, text = model(*batch)
    (images, first), (texts, _) = gather(image), gather(text)
    own = torch.arange(first, first + len(image))
    by_image = F.cross_entropy(image @ texts.T, own, reduction="sum")
    return by_image + F.cross_entropy(text @ images.T, own, reduction="sum")


def sentences(samples):
    tokens = torch.stack([torch.randint(12, (7,), generator=numbers_of(n)) for n in samples])
    return tokens[:, :-1], tokens[:, 1:]


def next_token(model, batch, gather):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / targets.shape[1]


def by_hand(case, models, optimizers, batch, gather, count):
    """Gradient descent without an optimizer."""
    loss = case.loss(*models, batch, gather) / count
    loss.backward()
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return loss.detach()


def of(make: Callable[[], nn.Module], shards: Plan, batch: Any, loss: Any = squared, **more: Any) -> OwnModel:
    return OwnModel((make,), (shards,), batch, loss, **more)


CASES: dict[str, OwnModel] = {
    "U-Net": of(UNet, plan("mix.0", "mix.2", "fine coarse norm up out", units=("mix", "up")), normal(1, 6, 6)),
    "ResNet, BatchNorm": of(
        ResNet,
        plan("head.0", "head.2", "enter blocks.*.conv blocks.*.norm", units=("blocks.*", "head")),
        images,
        classes,
    ),
    "LSTM": of(lambda: Forecaster(nn.LSTM), plan("head.0", "head.2", "cells", units=("cells",)), normal(6, 3)),
    "GRU": of(lambda: Forecaster(nn.GRU), plan("head.0", "head.2", "cells", units=("cells",)), normal(6, 3)),
    "Transformer, fused qkv": of(
        lambda: nn.Sequential(FusedBlock(), FusedBlock()),
        plan("*.qkv *.mix.0", "*.out *.mix.2", "*.before *.between", units=("*",)),
        normal(6, 16),
        sgd=True,
    ),
    "TransformerEncoderLayer": of(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        plan("linear1", "linear2", "self_attn norm1 norm2"),
        normal(6, 8),
        sgd=True,
    ),
    "VAE": of(VAE, plan("*.0", "*.2", units=("encode", "decode")), normal(6), elbo),
    "GAN": OwnModel(
        (lambda: mlp(5, 16, 5), lambda: mlp(5, 16, 1)), (plan("0", "2"), plan("0", "2")), normal(5), step=gan_step
    ),
    "graph net": of(GraphNet, plan("message.0", "message.2", "kinds read", units=("message",)), graphs, energies),
    "FNO, complex weights": of(FNO, plan("mix.0", "mix.2", "enter spectral leave", units=("mix",)), normal(8)),
    "PINN, u''": of(lambda: mlp(1, 16, 1), plan("0", "2"), normal(1), second_derivative),
    "neural ODE": of(Flow, plan("field.0", "field.2", "enter leave", units=("field",)), normal(5)),
    "routed experts": of(Experts, plan("experts.*.0", "experts.*.2", "router", units=("experts.*",)), normal(5)),
    "two towers, contrastive": of(
        Towers, plan("image.0 text.0", "image.2 text.2", "scale", units=("image", "text")), normal(5), contrastive
    ),
    "LoRA, tied head": of(
        TiedLoRA,
        plan("mix.0.base mix.0.up", "mix.2.base mix.2.down", "tokens norm head mix.0.down mix.2.up", units=("mix",)),
        sentences,
        next_token,
    ),
    "norm of each head": of(HeadNorm, plan("q k v", "out", "", "q_norm k_norm"), normal(6, 16), sgd=True),
    "norm over all heads": of(
        lambda: HeadNorm(each=False), plan("q k v", "out", "", "q_norm k_norm"), normal(6, 16), sgd=True
    ),
    "own parameters and buffers": of(Custom, plan(), normal(5)),
    "own scalar": of(Scalar, plan("net.0", "net.2"), normal(5)),
    "own mean in a buffer": of(Centred, plan("net.0", "net.2"), normal(5)),
    "frozen parameter that forward writes": of(Codebook, plan("net.0", "net.2"), normal(5)),
    "Embedding with max_norm": of(
        lambda: nn.Sequential(nn.Embedding(12, 8, max_norm=0.5), nn.Linear(8, 12)),
        plan(replicated="0 1"),
        sentences,
        next_token,
    ),
    "update by hand": of(lambda: mlp(5, 16, 5), plan("0", "2"), normal(5), step=by_hand),
    "ModuleDict as a unit": of(Heads, plan(replicated="heads.*", units=("heads",)), normal(5)),
    "complex beside real": of(Phases, plan(), normal(5)),
    "lazy shapes": of(lambda: nn.Sequential(nn.LazyLinear(5)), plan("0"), normal(5)),
}
