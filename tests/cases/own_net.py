"""A program as docs/your-script.md has it, with one of three nets; or the same by plain PyTorch (--plain)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from mmm.parallel import Layout, Plan, batch_sizes, local_batches
from mmm.trainer import BatchOptions, build_model, evaluate, parse, run_main, start_run, train_steps, whoami

SAMPLES, HELD_OUT, STEPS = 64, 8, 5


class Known(nn.Module):
    """Begins with values that no generator makes: a parallel run has to keep them."""

    def begin(self):
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(0.05 * torch.sin(1.7 * torch.arange(parameter.numel()) + number).view_as(parameter))


class BatchStatistics(Known):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4 * 64, 3)
        self.begin()

    def forward(self, x):
        return self.head(F.relu(self.norm(self.first(x))).flatten(1))


class Branches(Known):
    """Each sample uses one of two parameters, and none uses the third."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right, self.never = (nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 3)
        self.begin()

    def forward(self, x):
        hidden = self.first(x.flatten(1))
        left = x[:, 0, 0, 0] > 0
        out = hidden.clone()
        for branch, chosen in ((self.left, left), (self.right, ~left)):
            if chosen.any():
                out[chosen] = out[chosen] + branch(hidden[chosen])
        return self.head(out)


class Centred(Known):
    """Float and complex buffers of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(64, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.full((64,), 0.1))
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)
        self.begin()

    def forward(self, x):
        hidden = self.first(x.flatten(1) - self.mean)
        pairs = torch.view_as_complex(hidden.float().reshape(-1, 4, 2)) * self.turn
        return self.head(torch.view_as_real(pairs).flatten(1).to(hidden.dtype))


NETS = {"batch_statistics": BatchStatistics, "branches": Branches, "centred": Centred}


class Data(Dataset):
    def __getitem__(self, number):
        drawn = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        return drawn * (1 + number % 5) + number % 3 - 1, number % 3


@dataclass(frozen=True, kw_only=True)
class Config(BatchOptions):
    net: str = "branches"
    technique: str = "fsdp"
    plain: bool = False


def train(config):
    layout = Layout().fit(whoami().world_size)
    batch, samples = batch_sizes(config.batch_size, config.global_batch_size, layout.dp, default=8)
    first = layout.dp_coordinate(whoami().rank) * batch
    net = NETS[config.net]
    with start_run("own_net", config, layout) as run:
        if config.plain:
            model = net().double()
        else:
            plan = Plan({}, fsdp_units=("first", "head"))
            model = build_model(run, net, plan, data_parallel=config.technique)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def loss_of(batch):
            return F.cross_entropy(model(batch[0]).double(), batch[1], reduction="sum") / samples

        sampler = local_batches(SAMPLES, samples, first, batch, config.seed)
        for step in train_steps(run, DataLoader(Data(), batch_sampler=sampler), optimizer, STEPS, samples=samples):
            loss = loss_of(step.batch)
            step.log(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        held_out = [range(SAMPLES + first, SAMPLES + first + batch)]
        run.describe(test_loss=float(evaluate(run, DataLoader(Data(), batch_sampler=held_out), loss_of)))


if __name__ == "__main__":
    run_main(lambda: train(parse(Config, __doc__)))
