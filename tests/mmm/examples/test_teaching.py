"""The examples that teach one technique each: what they print is true, and what they claim they check."""

import json
import math

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import mmm.history
from mmm.comparison import worst
from mmm.errors import UserError
from mmm.examples import collectives, ddp, tensor_parallel, zero
from mmm.examples._support import zero_stages
from mmm.examples._support.by_hand import Case, replica_spread
from mmm.examples._support.text import resolve_own
from mmm.nn.init import parameter_count
from mmm.parallel import Layout, Techniques
from mmm.run.command_line import configure
from mmm.runtime.device import choose_precision
from support.programs import run_program
from support.runs import make_run

SIZES = {"seq_length": 16, "max_iters": 3, "global_batch_size": 8, "dtype": "fp64"}
CPU = torch.device("cpu")


def program(run_on_ranks, ranks, name, outdir, *flags, code=0):
    done = run_program(run_on_ranks, ranks, f"mmm.examples.{name}", "--outdir", outdir, *flags)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def flags(**options):
    arguments = []
    for name, value in options.items():
        arguments += [f"--{name}", str(value)]
    return arguments


def config_of(outdir):
    return json.loads((outdir / "config.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of DDP on one rank, without launch."""
    outdir = tmp_path_factory.mktemp("ddp")
    with pytest.MonkeyPatch.context() as patch:
        # Takes seconds.
        patch.setattr("mmm.history.plot_summary", lambda *_: [])
        ddp.train(configure(ddp.Config, **SIZES, outdir=outdir))
    return mmm.history.load(outdir).loss.values


@pytest.mark.long
def test_ddp(run_on_ranks, alone, tmp_path):
    out = program(run_on_ranks, 2, "ddp", tmp_path, "--no-plots", *flags(**SIZES, accumulate=2))
    np.testing.assert_allclose(mmm.history.load(tmp_path).loss, alone, rtol=1e-9)
    config = config_of(tmp_path)
    assert config["by_hand_difference"] < 1e-12
    assert config["parameter_spread"] == 0
    assert "all-reduce by hand and DDP: gradients differ by" in out


@pytest.mark.long
def test_hsdp(run_on_ranks, alone, tmp_path):
    program(run_on_ranks, 4, "hsdp", tmp_path, "--no-plots", *flags(**SIZES))
    np.testing.assert_allclose(mmm.history.load(tmp_path).loss, alone, rtol=1e-9)
    config = config_of(tmp_path)
    assert config["groups"] == {"dp_shard": [[0, 1], [2, 3]], "dp_replicate": [[0, 2], [1, 3]]}
    assert config["replicas_differ"] == 0
    assert config["local"]["parameters"] == pytest.approx(config["parameters"] / 2, rel=0.01)


def stages(rank):
    """Every stage of `zero.train`, without a folder: what is held, and the losses."""
    options = configure(zero.Config, **SIZES, preset="debug")
    layout = Layout().fit(rank.world_size)
    resolved = resolve_own(options, layout, Techniques(data_parallel="ddp"), batch_size=2, max_iters=5)
    run, _ = make_run(rank, options, layout, choose_precision("fp64", CPU))
    mesh = init_device_mesh("cpu", (layout.dp,), mesh_dim_names=("dp_shard",))
    results = [zero.train_stage(run, options, mesh, resolved, stage) for stage in range(4)]
    return results, parameter_count(resolved.model)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_zero(alone, run_on_ranks, ranks):
    """DDP on one rank has the same losses; what is held is what the theory says, and the table says both."""
    for results, parameters in run_on_ranks(stages, ranks):
        for stage, (held, losses) in enumerate(results):
            np.testing.assert_allclose(losses, alone, rtol=1e-9)
            # Adam has two copies. A stage of ZeRO shards one kind more than the stage before it.
            copies_by_kind = {"optimizer_state": 2, "gradients": 1, "parameters": 1}
            for last_unsharded, (kind, copies) in enumerate(copies_by_kind.items()):
                share = copies * parameters / (ranks if stage > last_unsharded else 1)
                assert held[kind] == pytest.approx(share, rel=0.002), (stage, kind)
                assert zero_stages.theory(stage, parameters, ranks)[kind] == share
        table = zero_stages.table([held for held, _ in results], parameters, ranks, 4)
        _, _, *lines = table.splitlines()
        for stage, (line, (held, _)) in enumerate(zip(lines, results, strict=True)):
            # Stage, technique, three times what is held and what theory says, and MB.
            columns = line.split()
            assert columns[:2] == [str(stage), zero_stages.TECHNIQUES[stage]]
            assert columns[2:8:2] == [f"{held[kind]:,}" for kind in zero_stages.KINDS]
            # Of 4 bytes each.
            megabytes = 4 * sum(held.values()) / 1e6
            assert float(columns[8]) == pytest.approx(megabytes, abs=0.006)


def test_zero_says_when_a_loss_is_nan(tmp_path, monkeypatch):
    curves = iter([[1.0, 2.0], [1.0, math.nan]])

    def stage_of(*_):
        held = dict.fromkeys(zero_stages.KINDS, 1)
        return held, next(curves)

    # Takes seconds.
    monkeypatch.setattr("mmm.history.plot_summary", lambda *_: [])
    # Two stages.
    monkeypatch.setattr(zero, "range", lambda _: (0, 1), raising=False)
    monkeypatch.setattr(zero, "train_stage", stage_of)
    config = configure(zero.Config, **SIZES, preset="debug", outdir=tmp_path, overwrite=True)
    assert not zero.train(config)


def spread(rank, place):
    """Of two elements, where the second is NaN on one rank; or differs by 1, if that is no rank."""
    own = 1.0
    if place is None:
        own = float(rank.rank)
    elif rank.rank == place:
        own = math.nan
    return replica_spread(torch.tensor([1.0, own]), None)


@pytest.mark.parametrize("place", [0, 1])
def test_replicas_of_which_one_has_a_nan_differ(run_on_ranks, place):
    assert run_on_ranks(spread, 2, place) == [math.inf] * 2
    assert run_on_ranks(spread, 2, None) == [1.0] * 2


def sharded(rank, mistake):
    mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("tp",))
    return tensor_parallel.compare(Case(mesh, CPU, torch.float64, 0), mistake)


WAYS = {"rows_by_hand", "columns_by_hand", "columns_then_rows", "sequence_sharded", "loss_sharded"}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_tensor_parallel(run_on_ranks, ranks):
    for differences in run_on_ranks(sharded, ranks, None):
        assert set(differences) == WAYS
        # Of each way two: of its output, and of its gradients.
        assert worst(value for two in differences.values() for value in two) < 1e-12


@pytest.mark.parametrize(("mistake", "where"), [("all_reduce", "rows_by_hand"), ("norms", "sequence_sharded")])
def test_tensor_parallel_with_a_mistake(run_on_ranks, mistake, where):
    for differences in run_on_ranks(sharded, 2, mistake):
        wrong = [name for name, two in differences.items() if not worst(two) <= 1e-12]
        assert wrong == [where]


def shown(rank):
    return {name: collectives.show(collective, CPU) for name, collective in collectives.COLLECTIVES.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives(run_on_ranks, ranks):
    got = run_on_ranks(shown, ranks)
    # Of rank 1 of two: 10 and 11.
    inputs = [[10 * rank + place for place in range(ranks)] for rank in range(ranks)]
    total = [sum(column) for column in zip(*inputs, strict=True)]
    for rank in range(ranks):
        first = rank == 0
        assert got[rank] == {
            "all_reduce": (inputs[rank], total),
            "reduce": (inputs[rank], total if first else []),
            "broadcast": (inputs[0] if first else [], inputs[0]),
            "all_gather": ([10 * rank], [10 * r for r in range(ranks)]),
            "scatter": (inputs[0] if first else [], [rank]),
            "reduce_scatter": (inputs[rank], [total[rank]]),
            "all_to_all": (inputs[rank], [inputs[r][rank] for r in range(ranks)]),
        }


@pytest.mark.parametrize(
    ("example", "options", "ranks", "message"),
    [
        (tensor_parallel, {}, 5, "5 ranks"),
        (collectives, {"break_": "absent"}, 1, "--break"),
    ],
    ids=lambda value: value.__name__.rpartition(".")[2] if hasattr(value, "__name__") else "",
)
def test_refused_before_any_process_group(monkeypatch, example, options, ranks, message, no_process_group):
    # Nothing listens at port 1.
    variables = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": 1}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=message):
        example.train(configure(example.Config, **options))
