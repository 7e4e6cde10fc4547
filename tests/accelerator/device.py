"""A CUDA or XPU device that is not there, to run a program on with FakeTensorMode; and what the program does, counted.

What shows: tensors of two devices that meet (FakeTensor raises), operators, collectives, and where the host waits for
the device. What does not: numbers, compiled code, which kernel of attention runs, what a pipeline or DDP sends.

Only for a process of its own, which loads `library` before it imports torch: PyTorch's modules are changed for good.
"""

import contextlib
import functools
import os
from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

# The shapes of c10d's operators under FakeTensorMode.
import torch.distributed._tools.fake_collectives
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmm.nn import experts
from mmm.parallel.ep import expert_parallel
from mmm.torch_private.operators import wait_operator
from support import streams
from support.streams import Event, Stream

ATEN = torch.ops.aten
# Operators after which the host knows elements, or a shape that follows from them.
READS = {ATEN._local_scalar_dense, ATEN.equal, ATEN.masked_select, ATEN.nonzero, ATEN.repeat_interleave, ATEN._unique2}


class Counts:
    """What has been done since `clear`, by name."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self.in_optimizer = False

    def clear(self) -> None:
        self.of.clear()

    def add(self, name: str) -> None:
        self.of[name] += 1


COUNTS = Counts()
# libraries, whose kernels end with them
KEPT: list[object] = []


# Seconds of a kernel and of a collective. The host takes no time.
KERNEL = 1e-5
NETWORK = streams.start()
NETWORK.SECONDS = 1e-4


def install(kind: str) -> None:
    """Have this process see one device of that kind."""
    # device.cpp reads it
    os.environ["ABSENT_DEVICE"] = kind
    module = getattr(torch, kind)
    module.Stream, module.Event = Stream, Event
    Stream.synchronize = Event.synchronize = lambda *_: COUNTS.add("synchronizations")
    module.stream = lambda stream: stream
    module.current_stream = module.default_stream = lambda *_: Stream.current
    NETWORK.install()
    # In place of the kernel that all devices have, which timed waits call.
    kernels = torch.library.Library("_c10d_functional", "IMPL")
    kernels.impl("wait_tensor", _wait_tensor, "PrivateUse1")
    KEPT.append(kernels)
    module.synchronize = lambda *_: COUNTS.add("synchronizations")
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.set_device = module.set_rng_state = module.get_rng_state = lambda *_: None
    module.get_device_capability = lambda *_: (9, 0)
    module.get_device_properties = lambda *_: SimpleNamespace(major=9, has_fp64=True)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    torch.Tensor.is_pinned = lambda tensor, *_: True
    tolist = FakeTensor.tolist
    FakeTensor.tolist = lambda tensor: _zeros(tensor) if tensor.device.type == kind else tolist(tensor)
    # The copy to the host has been counted.
    FakeTensor.numpy = numpy_zeros
    if kind == "xpu":
        F.scaled_dot_product_attention = _math_attention
    # Which spares FakeTensors a read.
    for module in (experts, expert_parallel):
        module.to_host_list = _counted(module.to_host_list, kind)
    register_optimizer_step_pre_hook(lambda *_: setattr(COUNTS, "in_optimizer", True))
    register_optimizer_step_post_hook(lambda *_: setattr(COUNTS, "in_optimizer", False))
    for name in ("__init__", "__getitem__", "_flatten", "_create_sub_mesh", "from_group", "get_local_rank", "size"):
        outside_fake_mode(name)


def _wait_tensor(tensor):
    NETWORK.wait()
    return tensor


def _zeros(tensor):
    """What a read of all elements gives: they are all 0."""
    COUNTS.add("reads")
    with unset_fake_temporarily():
        return torch._C._TensorBase.tolist(torch.zeros(tensor.shape, dtype=tensor.dtype))


def numpy_zeros(tensor, **_):
    return np.zeros(tuple(tensor.shape))


def _counted(to_host_list, kind):
    def counted(counts, *args):
        if counts.device.type == kind:
            COUNTS.add("reads")
        return to_host_list(counts, *args)

    return counted


def _math_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """A CPU build of torch cannot even be asked which kernel an XPU would take."""
    named = {"scale": scale, "enable_gqa": enable_gqa}
    return ATEN._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, **named)[0]


def outside_fake_mode(name: str) -> None:
    """Meshes compute with tensors of ranks, which need elements."""
    method = DeviceMesh.__dict__.get(name)
    if method is None:
        return

    @functools.wraps(method)
    def outside(*args, **named):
        with unset_fake_temporarily():
            return method(*args, **named)

    setattr(DeviceMesh, name, staticmethod(outside) if isinstance(method, staticmethod) else outside)


class Count(TorchDispatchMode):
    """Counts reads by the host, copies that it waits for, and the optimizer's kernels; a scalar that is read is 1."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(cls, DTensor) for cls in types):
            # Its local tensors come here.
            return NotImplemented
        if (waits := self._waits(func, args, kwargs)) is not None:
            COUNTS.add(waits)
        if func.namespace == "torch_attn":
            COUNTS.add(func.overloadpacket.__name__)
        if COUNTS.in_optimizer and not func.is_view and func.namespace == "aten":
            COUNTS.add("optimizer kernels")
        if func.namespace == "_c10d_functional" and func is not wait_operator():
            NETWORK.collective(asynchronous=True)
        if func.namespace == "aten" and not func.is_view and self._there(args):
            Stream.current.work(KERNEL)
        if func is wait_operator() and args[0].device.type == self.kind:
            # FakeTensorMode would not call the device's kernel.
            key = getattr(torch._C.DispatchKey, self.kind.upper())
            arrived = torch.library.get_kernel(func, key).call_boxed(torch._C.DispatchKeySet(key), args[0])
            # If nobody has replaced the kernel.
            NETWORK.wait()
            return arrived
        if func.overloadpacket is ATEN._local_scalar_dense and isinstance(args[0], FakeTensor):
            if args[0].is_floating_point():
                return 1.0
            return args[0].dtype == torch.bool or 1
        return func(*args, **kwargs)

    def _there(self, args):
        """Whether an argument is on the device."""
        return any(isinstance(tensor, torch.Tensor) and tensor.device.type == self.kind for tensor in tree_leaves(args))

    def _waits(self, func, args, kwargs):
        """What the host waits for in an operator, if anything."""
        packet = func.overloadpacket
        on_device = [tensor.device.type == self.kind for tensor in args if isinstance(tensor, torch.Tensor)]
        if packet in (ATEN.copy_, ATEN._to_copy):
            if packet is ATEN._to_copy:
                on_device = [torch.device(kwargs.get("device") or args[0].device).type == self.kind, *on_device]
            blocking = not (kwargs.get("non_blocking") or (packet is ATEN.copy_ and args[2:3] == (True,)))
            to, source = on_device
            return None if to == source or not blocking else "reads" if source else "synchronizations"
        if packet is ATEN.repeat_interleave and kwargs.get("output_size") is not None:
            return None
        if any(on_device) and packet in READS:
            return "reads"
        return None


@contextlib.contextmanager
def process_group(world: int, rank: int = 0):
    """One rank of `world`, whose collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_tensors(kind: str):
    """Tensors without elements; what is done with them is counted."""
    with FakeTensorMode(allow_non_fake_inputs=True), Count(kind):
        yield
