"""Tensors to disk and back: on another mesh, never in part, never by executing what is in a file. State dicts through
JSON and back: an object that has loaded one goes on as the one that had it."""

import json
import os
import pickle
import resource
import runpy
import shutil
from collections import Counter, OrderedDict
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import lr_scheduler as rates

from mmm.checkpoint.manifest import (
    MANIFEST,
    FileSum,
    Manifest,
    broken_file,
    file_sum,
    read_manifest,
    remove_partial,
    steps_of,
)
from mmm.checkpoint.objects import decode, encode, saved_tensors
from mmm.checkpoint.saver import Saver
from mmm.checkpoint.state import give_state, metadata_on_all, read_tensors, tensors_of
from mmm.checkpoint.storage import METADATA, read_metadata
from mmm.errors import CheckpointError
from support.disk import CAN_MOUNT, make_read_only, small_disk

# Over 2 or 4 ranks: uneven, and for 4 the last has none.
ROWS = 5


def values():
    torch.manual_seed(1)
    return {"a.weight": torch.randn(ROWS, 3, dtype=torch.float64), "b": torch.randn(2, 6000, dtype=torch.float64)}


def model(ranks, step=False):
    """Parameters sharded along other dims, and an optimizer that has made a step, or none."""
    mesh = init_device_mesh("cpu", (ranks,))
    full = values() if step else {name: torch.zeros_like(x) for name, x in values().items()}
    dims = {"a.weight": Shard(0), "b": Shard(1)}
    parameters = {n: torch.nn.Parameter(distribute_tensor(x, mesh, [dims[n]])) for n, x in full.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    if step:
        for parameter in parameters.values():
            parameter.grad = parameter.detach() * 0.5
        optimizer.step()
    return parameters, {"bias": torch.full((3,), 7.0 if step else 0.0)}, optimizer


def state_of(parameters, buffers, optimizer):
    return {"model": {**parameters, **buffers}, "optimizer": tensors_of(optimizer, parameters)}


def load_tensors(folder, files, parameters, buffers, optimizer):
    into = {"model": {**parameters, **buffers}}
    moments = read_tensors(folder, metadata_on_all(folder, files), into, {"optimizer": parameters})["optimizer"]
    give_state(optimizer, {id(parameter): moments.get(name) for name, parameter in parameters.items()})


def full(rank, parameters, buffers, optimizer):
    def whole(x):
        return x.full_tensor() if isinstance(x, DTensor) else x

    tensors = {n: whole(x.detach()) for n, x in {**parameters, **buffers}.items()}
    for n, p in parameters.items():
        tensors |= {f"{n} {key}": whole(x) for key, x in optimizer.state[p].items()}
    return tensors


def saver_of(folder, notes, keep=2):
    return Saver(folder, dist.new_group(backend="gloo"), keep, notes.append)


def save(rank, folder, steps=(1,), keep=2, break_rank=None, full_rank=None):
    parameters, buffers, optimizer = model(rank.world_size, step=True)
    notes = []
    saver = saver_of(folder, notes, keep)
    before = full(rank, parameters, buffers, optimizer)
    wrong = read_back if rank.rank == break_rank else file_sum
    broken = patch("mmm.checkpoint.storage.file_sum", wrong)
    broken.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank.rank == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    for step in steps:
        saver.save(state_of(parameters, buffers, optimizer), Manifest(step, {"dim": 3}, {}, {}, {}))
        # The loop goes on: what is saved is what was.
        for parameter in parameters.values():
            with torch.no_grad():
                parameter.add_(1.0)
        if step != steps[-1]:
            saver.wait()
            for parameter in parameters.values():
                with torch.no_grad():
                    parameter.sub_(1.0)
    done = saver.wait()
    assert saver.wait() is done, "whoever asks again gets the same answer"
    broken.stop()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return done, notes, before


def read_back(path):
    return FileSum(0, "")


def load(rank, folder):
    parameters, buffers, optimizer = model(rank.world_size)
    load_tensors(folder, read_manifest(folder).files, parameters, buffers, optimizer)
    return full(rank, parameters, buffers, optimizer)


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    from mmm_verify.testing.plugin import _pool

    folder = tmp_path_factory.mktemp("saved")
    results = _pool(request.config).run(save, 4, folder)
    assert [(done, notes) for done, notes, _ in results] == [(True, [])] * 4
    return folder / "step-1", results[0][2]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_back_on_any_number_of_ranks(run_on_ranks, saved, ranks):
    folder, before = saved
    for loaded in run_on_ranks(load, ranks, folder):
        assert loaded.keys() == before.keys()
        assert "a.weight exp_avg" in loaded
        for name, tensor in loaded.items():
            assert torch.equal(tensor, before[name]), name


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_pytorch_itself_reads_it(saved, tmp_path):
    """`python -m torch.distributed.checkpoint.format_utils dcp_to_torch`, without another process."""
    folder, before = saved
    with patch("sys.argv", ["format_utils", "dcp_to_torch", str(folder), str(tmp_path / "all.pt")]):
        runpy.run_module("torch.distributed.checkpoint.format_utils", run_name="__main__")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(state["model"]["a.weight"], before["a.weight"])
    assert torch.equal(state["optimizer"]["b"]["exp_avg_sq"], before["b exp_avg_sq"])


def test_the_newest_stay(run_on_ranks, tmp_path):
    (done, notes, _), *_ = run_on_ranks(save, 2, tmp_path, (1, 2, 3, 4, 5))
    assert (done, notes) == (True, [])
    assert sorted(os.listdir(tmp_path)) == ["step-4", "step-5"]


def save_apart(rank, folder):
    """Each rank to a folder of its own, as hosts that share no file system."""
    parameters, buffers, optimizer = model(rank.world_size, step=True)
    notes = []
    own = folder / f"of-rank-{rank.rank}"
    own.mkdir()
    saver = saver_of(own, notes)
    saver.save(state_of(parameters, buffers, optimizer), Manifest(1, {"dim": 3}, {}, {}, {}))
    return saver.wait(), notes


def test_hosts_that_share_no_folder_are_told(run_on_ranks, tmp_path):
    for done, notes in run_on_ranks(save_apart, 2, tmp_path):
        assert not done
        assert "hosts have to share --outdir" in notes[0]
    assert steps_of(tmp_path / "of-rank-0") == []


def test_a_save_that_fails_on_one_rank_is_said_on_all_and_leaves_nothing(run_on_ranks, tmp_path):
    run_on_ranks(save, 2, tmp_path)
    for done, notes, _ in run_on_ranks(save, 2, tmp_path, (2,), 2, 1):
        assert not done
        assert len(notes) == 1
        assert "step 2" in notes[0]
        assert "__1_0.distcp" in notes[0]
    assert os.listdir(tmp_path) == ["step-1"]


@CAN_MOUNT
def test_a_disk_that_turns_read_only_is_said_on_all(run_on_ranks, tmp_path):
    """Also where a save that failed has left a part, which rank 0 would remove."""
    with small_disk(tmp_path, "size=1m"):
        run_on_ranks(save, 2, tmp_path)
        (tmp_path / "step-2.partial").mkdir()
        (tmp_path / "step-2.partial/left").write_text("")
        make_read_only(tmp_path)
        for done, notes, _ in run_on_ranks(save, 2, tmp_path, (2,), timeout=60):
            assert not done
            assert len(notes) == 1
            assert "step 2" in notes[0]
            assert "Read-only file system" in notes[0]
        assert steps_of(tmp_path) == [tmp_path / "step-1"]


def test_a_file_that_does_not_fit(run_on_ranks, tmp_path):
    """The reason is the system's, also where PyTorch's writer says another."""
    for done, notes, _ in run_on_ranks(save, 2, tmp_path, (2,), 2, None, 1):
        assert not done
        (note,) = notes
        assert note.startswith(f"no checkpoint of step 2: [Errno 27] File too large; it was for {tmp_path}: ")
        assert note.endswith(" bytes are free there")
    assert os.listdir(tmp_path) == []


def test_what_a_kill_leaves_is_no_checkpoint(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "step-3")
    shutil.copytree(saved[0], tmp_path / "step-20")
    (tmp_path / "step-40.partial").mkdir()
    (tmp_path / "step-4.old.partial").mkdir()
    assert [path.name for path in steps_of(tmp_path)] == ["step-20", "step-3"]
    remove_partial(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["step-20", "step-3"]


# --- damaged ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "step-1")


def damage(path, damage_kind):
    content = path.read_bytes()
    if damage_kind == "truncated":
        path.write_bytes(content[:-1])
    elif damage_kind == "flipped":
        # One bit of the last tensor.
        flipped = bytes([content[-9] ^ 1])
        path.write_bytes(content[:-9] + flipped + content[-8:])
    else:
        path.unlink()


@pytest.mark.parametrize("name", [METADATA, "__2_0.distcp"])
@pytest.mark.parametrize(
    ("damage_kind", "message"),
    [("truncated", "is truncated: "), ("flipped", "is damaged: its checksum"), ("gone", "is missing")],
)
def test_damage_names_the_file(copy, name, damage_kind, message):
    files = read_manifest(copy).files
    assert broken_file(copy, files) is None
    # A rank that had nothing to write.
    if name not in files:
        name = next(file for file in files if file.endswith(".distcp"))
    damage(copy / name, damage_kind)
    assert broken_file(copy, files).startswith(f"{copy / name} {message}")


def test_damage_of_the_manifest(copy):
    path = copy / MANIFEST
    text = path.read_text()
    for changed in (text[:-5], text.replace('"dim": 3', '"dim": 4'), "[]", "{}"):
        path.write_text(changed)
        with pytest.raises(CheckpointError, match=r"checkpoint\.json (is damaged|cannot be read: it is not (a )?JSON)"):
            read_manifest(copy)
    path.write_text(json.dumps(json.loads(text) | {"mmm_checkpoint": 2}))
    with pytest.raises(CheckpointError, match=r"version 2"):
        read_manifest(copy)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
        read_manifest(copy)


def test_differences():
    manifest = Manifest(1, {"dim": 64, "data": "a", "heads": 4}, {}, {}, {})
    # An earlier mmm's.
    assert manifest.differences({**manifest.identity, "tied": False, "scaling": None}) == []
    assert manifest.differences({**manifest.identity, "tied": True}) == ["tied none there, True here"]
    assert manifest.differences({"dim": 128, "data": "a"}) == ["dim 64 there, 128 here", "heads 4 there, none here"]


# --- a pickle inside --------------------------------------------------------------------------------------------------


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def refused(run_on_ranks, folder, message, exploded):
    """With right checksums: an attacker who changes a file changes those too."""
    files = read_manifest(folder).files
    manifest = read_manifest(folder)
    Manifest(1, manifest.identity, {}, {}, {name: file_sum(folder / name) for name in files}).write(folder)
    assert broken_file(folder, read_manifest(folder).files) is None
    for text in run_on_ranks(try_load, 2, folder):
        assert message in text
        assert "\n" not in text
    assert not exploded.exists()


def try_load(rank, folder):
    try:
        load(rank, folder)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_a_pickle_in_the_metadata_is_not_executed(run_on_ranks, copy, tmp_path):
    (copy / METADATA).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    refused(run_on_ranks, copy, ".metadata is not read: it names", tmp_path / "exploded")


def test_names_that_are_not_the_tensors_own(run_on_ranks, copy, tmp_path):
    """Two weights of one shape would change places."""
    with open(copy / METADATA, "rb") as file:
        state = pickle.load(file)
    state.planner_data["model.bias"] = ("model", "weight")
    (copy / METADATA).write_bytes(pickle.dumps(state))
    refused(run_on_ranks, copy, "model.bias is called ('model', 'weight')", tmp_path / "exploded")


def test_a_pickle_in_place_of_a_tensor_is_not_executed(run_on_ranks, copy, tmp_path):
    """DCP itself loads what its metadata calls bytes without any limit."""
    with open(copy / METADATA, "rb") as file:
        state = pickle.load(file)
    state.state_dict_metadata["model.bias"] = dcp_metadata.BytesStorageMetadata()
    place = next(p for index, p in state.storage_data.items() if index.fqn == "model.bias")
    torch.save(Bomb(tmp_path / "exploded"), copy / place.relative_path)
    place.offset = 0
    place.length = (copy / place.relative_path).stat().st_size
    state.storage_data[dcp_metadata.MetadataIndex("model.bias")] = place
    (copy / METADATA).write_bytes(pickle.dumps(state))
    refused(run_on_ranks, copy, ".metadata is not read: model.bias is not a tensor", tmp_path / "exploded")


def test_a_pickle_among_the_tensors_is_not_executed(run_on_ranks, copy, tmp_path):
    with open(copy / METADATA, "rb") as file:
        state = pickle.load(file)
    index, place = next((i, p) for i, p in state.storage_data.items() if i.fqn == "model.bias")
    torch.save(Bomb(tmp_path / "exploded"), tmp_path / "bomb")
    bomb = (tmp_path / "bomb").read_bytes()
    size = (copy / place.relative_path).stat().st_size
    (copy / place.relative_path).write_bytes(bomb.ljust(size, b"\0"))
    state.storage_data[index].offset = 0
    state.storage_data[index].length = len(bomb)
    (copy / METADATA).write_bytes(pickle.dumps(state))
    refused(run_on_ranks, copy, f"{place.relative_path} is not read: ", tmp_path / "exploded")


def test_a_file_elsewhere_is_not_read(copy):
    with open(copy / METADATA, "rb") as file:
        state = pickle.load(file)
    next(iter(state.storage_data.values())).relative_path = "../secret"
    (copy / METADATA).write_bytes(pickle.dumps(state))
    with pytest.raises(CheckpointError, match=r"\.\./secret"):
        read_metadata(copy, read_manifest(copy).files)


# --- another model ----------------------------------------------------------------------------------------------------


def load_other(rank, folder):
    parameters, _, optimizer = model(rank.world_size)
    files = read_manifest(folder).files
    texts = []
    for buffers in ({"bias": torch.zeros(4)}, {"other": torch.zeros(3)}):
        with pytest.raises(CheckpointError) as raised:
            load_tensors(folder, files, parameters, buffers if rank.rank else {}, optimizer)
        texts.append(str(raised.value))
    return texts


def test_another_model_is_refused_on_every_rank(run_on_ranks, saved):
    for shape, name in run_on_ranks(load_other, 2, saved[0]):
        assert shape.startswith(f"{saved[0]} is not loaded: Size mismatch")
        assert shape.endswith("for model.bias")
        assert name == f"{saved[0]} is not loaded: Missing key in checkpoint state_dict: model.other."


def through_json(state):
    tensors = {}
    text = json.dumps(encode(state, "it", tensors))
    saved = json.loads(text)
    for path, shape, dtype, place in saved_tensors(saved):
        assert (tensors[path].shape, tensors[path].dtype, place) == (shape, dtype, "host")
    assert len(list(saved_tensors(saved))) == len(tensors)
    return decode(saved, tensors)


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert same(*pair)
    else:
        assert one is other if isinstance(one, torch.Tensor) else repr(one) == repr(other)
    return True


def test_what_comes_back_is_what_was():
    nested = {"a": [1, 2.5, (None, True, "text")], 3: OrderedDict(b=torch.ones(2)), "c": Counter({5: 2}), "d": {}}
    scalars = {"inf": float("inf"), "nan": float("nan"), "third": 1 / 3, "long": 2**70, "low": -0.0}
    assert same(through_json({"nested": nested, "numbers": scalars}), {"nested": nested, "numbers": scalars})


# Schedulers of PyTorch, whose states have to survive a checkpoint.
SCHEDULERS = {
    "LambdaLR": lambda opt: rates.LambdaLR(opt, lambda step: 1 / (step + 1)),
    "MultiStepLR": lambda opt: rates.MultiStepLR(opt, [2, 4, 4]),
    "ExponentialLR": lambda opt: rates.ExponentialLR(opt, 0.9),
    "CosineAnnealingLR": lambda opt: rates.CosineAnnealingLR(opt, 9),
    "CosineAnnealingWarmRestarts": lambda opt: rates.CosineAnnealingWarmRestarts(opt, 3),
    "OneCycleLR": lambda opt: rates.OneCycleLR(opt, 0.3, total_steps=20),
    "CyclicLR": lambda opt: rates.CyclicLR(opt, 0.01, 0.1, step_size_up=2),
    "SequentialLR": lambda opt: rates.SequentialLR(opt, [rates.ConstantLR(opt), rates.ExponentialLR(opt, 0.5)], [4]),
    "ChainedScheduler": lambda opt: rates.ChainedScheduler([rates.ExponentialLR(opt, 0.9), rates.StepLR(opt, 2)]),
    "ReduceLROnPlateau": lambda opt: rates.ReduceLROnPlateau(opt, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_every_scheduler_of_pytorch(name):
    def made():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def steps(optimizer, scheduler, count):
        results = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            results.append(optimizer.param_groups[0]["lr"])
        return results

    optimizer, scheduler = made()
    steps(optimizer, scheduler, 3)
    # By which a loop that lacks it is told.
    assert scheduler.optimizer is optimizer
    again, resumed = made()
    resumed.load_state_dict(through_json(scheduler.state_dict()))
    again.param_groups[0].update({key: x for key, x in optimizer.param_groups[0].items() if key != "params"})
    assert steps(again, resumed, 6) == steps(optimizer, scheduler, 6)


def test_a_scale_of_the_loss():
    scaler, again = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2))
    scaler.scale(torch.ones(()))
    scaler.update(4.0)
    again.load_state_dict(through_json(scaler.state_dict()))
    assert again.state_dict() == scaler.state_dict()
    assert again.get_scale() == 4.0


@pytest.mark.parametrize(
    "text",
    ['{"dict": 3}', '{"set": []}', '{"a": 1, "b": 2}', '{"tensor": ["x", [1], "int64", "host"]}', '{"tuple": 1}'],
)
def test_what_it_has_not_written(text):
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode(json.loads(text), {})


def test_a_dtype_that_is_none():
    with pytest.raises(TypeError, match="load is not a dtype"):
        list(saved_tensors({"tensor": ["x", [1], "load", "host"]}))
