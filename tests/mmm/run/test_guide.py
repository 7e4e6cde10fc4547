"""The scripts of docs/scripts/, each as it stands in its page, against a loop of plain PyTorch on the full batch."""

import importlib.util
import re
import sys
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import mmm.history

# Before `program_on` looks for it.
import mmm.run.standard
from mmm.models.llama.model import Transformer
from mmm.parallel import draw_weights, local_batches
from mmm.run.command_line import configure
from support.pool import program_on

DOCS = Path(__file__).parent.parent.parent.parent / "docs"
# Chapters whose program is run as it stands there.
NAMES = ["gan", "diffusion", "lora", "graphs", "fno", "lengths"]
BATCH, STEPS = 8, 4
FLAGS = {"dtype": "fp64", "global_batch_size": BATCH, "steps": STEPS, "device": "cpu"}
# Of the losses, and of each tensor of the weights beside its largest element.
BOUND = 1e-12
# ranks, tp
LAYOUTS = {"1 rank": (1, 1), "dp2": (2, 1), "dp2·tp2": (4, 2)}


def code_of(name):
    page = (DOCS / "scripts" / f"{name}.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return code


def load(name, folder):
    path = folder / f"{name}.py"
    path.write_text(code_of(name))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for it.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def steps_of(dataset, samples=512, **loader):
    """The global batches of the first steps."""
    batches = DataLoader(dataset, batch_sampler=local_batches(samples, BATCH, 0, BATCH, 0), **loader)
    return islice(batches, STEPS)


def trained(model, optimizer, losses):
    """Plain PyTorch's loop: the losses, and the weights after it.

    Args:
        losses: of each step, computed when asked for.
    """
    recorded = []
    for loss in losses:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorded.append(loss.item())
    return recorded, model.state_dict()


def plain_gan(script):
    torch.manual_seed(0)
    generator = script.Generator().double()
    critic = script.Critic().double()
    makes, tells = (torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (generator, critic))
    losses = []
    for real, noise in steps_of(script.Ring(), 4096):
        made = generator(noise)
        of_real = F.softplus(-critic(real)).sum()
        of_made = F.softplus(critic(made.detach())).sum()
        loss = (of_real + of_made) / BATCH
        losses.append(loss.item())
        tells.zero_grad()
        loss.backward()
        tells.step()
        makes.zero_grad()
        (F.softplus(-critic(made)).sum() / BATCH).backward()
        makes.step()
    return losses, generator.state_dict()


def plain_diffusion(script):
    """With an average of the weights, PyTorch's own."""
    torch.manual_seed(0)
    model = script.Denoiser().double()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    # The first takes the parameters.
    average.update_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step, clean in enumerate(steps_of(script.Curves())):
        loss = script.diffusion_loss(model, clean, *script.draw(step, clean, 0, BATCH)) / clean.numel()
        losses += trained(model, optimizer, [loss])[0]
        average.update_parameters(model)
    return losses, average.module.state_dict()


def plain_base(script):
    model = Transformer(script.SIZES).double().to("meta")
    draw_weights(model, torch.device("cpu"), 0)
    batches = steps_of(script.Counting((1, 2)), 480)
    losses = (F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in batches)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=1e-2), losses)


def plain_lora(script):
    _, base = plain_base(script)
    model = script.adapted_model().double()
    model.load_state_dict(script.adapted_weights(base))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batches = steps_of(script.Counting((3, 5)), 480)
    losses = (F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in batches)
    losses, weights = trained(model, optimizer, losses)
    frozen = {name: tensor for name, tensor in weights.items() if ".up." not in name and ".down." not in name}
    assert all(torch.equal(tensor, base[name.replace(".base", "")]) for name, tensor in frozen.items())
    return losses, weights


def plain_graphs(script):
    """Each molecule by itself."""
    torch.manual_seed(0)
    model = script.GraphNet().double()

    def loss_of(molecule):
        kind, source, target, length, energy = molecule
        return (model(kind, source, target, length, torch.zeros_like(kind), 1) - energy).square().sum()

    losses = (sum(map(loss_of, batch)) / BATCH for batch in steps_of(script.Molecules(), collate_fn=list))
    return trained(model, torch.optim.AdamW(model.parameters(), lr=3e-3), losses)


def plain_fno(script):
    torch.manual_seed(0)
    model = script.FNO().double()
    # Which `double` leaves.
    for block in model.blocks:
        block.spectral.weight.data = block.spectral.weight.data.to(torch.complex128)
    losses = (F.mse_loss(model(now), later) for now, later in steps_of(script.Curves()))
    return trained(model, torch.optim.AdamW(model.parameters(), lr=3e-3), losses)


def plain_lengths(script):
    """Each sequence by itself, without padding."""
    torch.manual_seed(0)
    model = script.Model().double()

    def loss_of(sequences):
        # Each token is the target of the one before it.
        inputs = torch.cat([sequence[:-1] for sequence in sequences])
        targets = torch.cat([sequence[1:] for sequence in sequences])
        logits = torch.cat([model(sequence[None, :-1])[0] for sequence in sequences])
        assert len(logits) == len(inputs)
        return F.cross_entropy(logits, targets)

    losses = map(loss_of, steps_of(script.Sequences(), collate_fn=list))
    return trained(model, torch.optim.AdamW(model.parameters(), lr=3e-3), losses)


def on_a_rank(rank, name, folder, flags):
    """The script's own `train`, on a rank of the pool, whose process group is there already."""
    script = load(name, folder / f"rank{rank.rank}")
    with program_on(rank), patch.object(script, "whoami", lambda: rank):
        script.train(configure(script.Config, **FLAGS, **flags))


def assert_same(outdir, expected, bound=BOUND):
    losses, weights = expected
    record = mmm.history.load(outdir)
    assert len(losses) == STEPS
    recorded = record.loss.values.tolist()
    off = max(abs(a / b - 1) for a, b in zip(recorded, losses, strict=True))
    assert off <= bound, f"losses are off by {off:.1e}"
    state = torch.load(outdir / "model.pt", weights_only=True)
    assert state.keys() == weights.keys()
    for name, tensor in weights.items():
        assert state[name].dtype == tensor.dtype
        off = ((state[name] - tensor).abs().max() / tensor.abs().max()).item()
        assert off <= bound, f"{name} is off by {off:.1e} of its largest element"


@pytest.fixture
def run_script(run_on_ranks, tmp_path):
    def run(name, ranks, tp, **flags):
        outdir = tmp_path / f"{ranks}"
        for rank in range(ranks):
            (tmp_path / f"rank{rank}").mkdir(exist_ok=True)
        run_on_ranks(on_a_rank, ranks, name, tmp_path, {"tp": tp, "outdir": outdir, "overwrite": True, **flags})
        return outdir

    return run


# For each chapter, the same training in plain PyTorch.
PLAIN = {
    "gan": plain_gan,
    "diffusion": plain_diffusion,
    "lora": plain_lora,
    "graphs": plain_graphs,
    "fno": plain_fno,
    "lengths": plain_lengths,
}


def held(run_script, name, folder, layouts, **flags):
    """One script on layouts, each against plain PyTorch."""
    script = load(name, folder)
    if name == "diffusion":
        flags["decay"] = 0.9
    if name == "lengths":
        flags["micro_batch_size"] = 2
    if name == "lora":
        flags["weights"] = folder / "base.pt"
        torch.save(plain_base(script)[1], flags["weights"])
    expected = PLAIN[name](script)
    for layout in layouts:
        assert_same(run_script(name, *LAYOUTS[layout], **flags), expected)


@pytest.mark.parametrize(
    "name", [name if name == "lora" else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
)
def test_a_script_on_a_mesh_is_plain_pytorch(run_script, tmp_path, name):
    held(run_script, name, tmp_path, ["dp2·tp2"])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_script_on_one_rank_and_on_two(run_script, tmp_path, name):
    held(run_script, name, tmp_path, ["1 rank", "dp2"])


@pytest.mark.long
def test_the_base_of_lora(run_script, tmp_path):
    assert_same(run_script("lora", 4, 2), plain_base(load("lora", tmp_path)))
