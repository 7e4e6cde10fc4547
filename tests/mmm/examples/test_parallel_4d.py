"""Four axes at once, as a user runs them: the losses are those of one rank, and what is refused."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import mmm.history
from mmm.examples import parallel_4d
from mmm.examples._support import load_text, sizes_of
from mmm.examples.context_parallel import positions_of
from mmm.models.llama.model import Transformer
from mmm.models.llama.plan import transformer_plan
from mmm.parallel import Layout, build_mesh, cross_entropy, materialize, parallelize
from mmm.parallel.local import detached
from mmm.run.command_line import configure, parse, run_main
from mmm.runtime.device import Precision
from support.programs import run_program

SMALL = {"max_iters": 4, "global_batch_size": 8, "dtype": "fp64", "optimizer": "sgd", "lr": 0.3, "seq_length": 32}


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "flags", "layout"),
    [
        (4, "--pp 2 --tp 2", "pp2·tp2"),
        (2, "--pp 2 --schedule GPipe --microbatches 4", "pp2"),
        (4, "--cp 2 --tp 2", "cp2·tp2"),
        (8, "--pp 2 --cp 2 --tp 2", "pp2·cp2·tp2"),
    ],
)
def test_losses_of_one_rank(run_on_ranks, tmp_path, monkeypatch, ranks, flags, layout):
    arguments = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    arguments += ["--no-plots", "--outdir", tmp_path / "many", *flags.split()]
    done = run_program(run_on_ranks, ranks, "mmm.examples.parallel_4d", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    config = json.loads((tmp_path / "many/config.json").read_text())
    assert config["layout"] == layout
    assert "Warning" not in done.stderr
    monkeypatch.setattr("mmm.history.plot_summary", lambda *_: [])
    parallel_4d.train(configure(parallel_4d.Config, **SMALL, outdir=tmp_path / "one"))
    one, many = (mmm.history.load(tmp_path / name) for name in ("one", "many"))
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-9)
    parts = [many[column].values for column in ("dtd", "dtf", "dtb", "dto", *(["dtw"] if "pp" in layout else []))]
    np.testing.assert_allclose(sum(parts), many.dt, rtol=1e-12)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pp 4 --tp 2", "pp 4 · tp 2 needs a multiple of 8 ranks, and there are 4"),
        ("--pp 4 --n_layers 1", "pp 4 with 1 stages a rank is 4 stages, and the model has 3 parts"),
        ("--schedule DualPipe", "--schedule"),
    ],
)
def test_refused_in_one_line(monkeypatch, capsys, tmp_path, flags, message, no_process_group):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["parallel_4d", *flags.split()])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        run_main(lambda: parallel_4d.train(parse(parallel_4d.Config)))
    printed = capsys.readouterr()
    assert left.value.code == 2
    assert printed.out == ""
    if "DualPipe" in flags:
        assert message in printed.err
        # The parser's own message, in a frame.
        return
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert re.search(message, printed.err), printed.err
    assert list(tmp_path.iterdir()) == []


def build_by_hand_and_by_the_package(rank, layout):
    config = parallel_4d.Config()
    sizes, precision = sizes_of(config.model), Precision("fp64", torch.float64, torch.float64)
    with torch.device("meta"):
        package = Transformer(sizes)
    names = [name for name, _ in package.named_modules()]
    axes = ("pp", "dp", "cp", "tp")
    mesh = init_device_mesh("cpu", (1, layout.dp, layout.cp, layout.tp), mesh_dim_names=axes)
    parallelize(package, build_mesh(layout, "cpu"), transformer_plan(sizes), precision)
    coordinates = layout.coordinates(rank.rank)
    steps = []
    positions = positions_of(coordinates["cp"], layout.cp, 32)
    batch = load_text(config.data, 256, 0).train.batch(0, 2 * layout.dp, 2 * coordinates["dp_shard"], 2)
    # Two samples of a group, of which this rank has a part of 32 tokens.
    inputs = batch.inputs[:, :32][:, positions]
    targets = batch.targets[:, :32][:, positions]
    for model in (parallel_4d.build(sizes, names, mesh, precision), package):
        materialize(model, torch.device("cpu"), 0)
        with loss_parallel():
            loss = cross_entropy(model(inputs, positions), targets, 64)
            loss.backward()
        steps.append((detached(loss).item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}))
    return steps


@pytest.mark.parametrize(
    "layout", [pytest.param(Layout(dp_shard=2, tp=2), marks=pytest.mark.long), Layout(dp_shard=1, cp=2, tp=2)], ids=str
)
def test_a_rank_by_hand_is_the_packages(run_on_ranks, layout):
    for (loss, gradients), (expected, wanted) in run_on_ranks(build_by_hand_and_by_the_package, 4, layout):
        assert loss == pytest.approx(expected, rel=1e-9)
        assert set(gradients) == set(wanted)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12)
