"""State dicts through JSON and back: an object that has loaded one goes on as the one that had it."""

import json
from collections import Counter, OrderedDict

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

from mmm.checkpoint.objects import decode, encode, saved_tensors


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
        assert all(same(one[key], other[key]) for key in one)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        assert all(same(*pair) for pair in zip(one, other, strict=True))
    else:
        assert one is other if isinstance(one, torch.Tensor) else repr(one) == repr(other)
    return True


def test_what_comes_back_is_what_was():
    nested = {"a": [1, 2.5, (None, True, "text")], 3: OrderedDict(b=torch.ones(2)), "c": Counter({5: 2}), "d": {}}
    numbers = {"inf": float("inf"), "nan": float("nan"), "third": 1 / 3, "long": 2**70, "low": -0.0}
    assert same(through_json({"nested": nested, "numbers": numbers}), {"nested": nested, "numbers": numbers})


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
        found = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = made()
    steps(optimizer, scheduler, 3)
    assert scheduler.optimizer is optimizer  # by which a loop that lacks it is told
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
    with pytest.raises(TypeError, match="load is no dtype"):
        list(saved_tensors({"tensor": ["x", [1], "load", "host"]}))
