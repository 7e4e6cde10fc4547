"""A real accelerator: numbers, memory, speed, and what the host waits for. `make test-gpu`; docs/install.md.

Without one nothing is checked: a skip that can be seen, or a failure where MMM_GPU_TESTS=required is set.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmm.data import Batch
from mmm.history import load
from mmm.layout import Layout, Techniques
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.nn import weights
from mmm.nn.attention import Documents, has_varlen
from mmm.nn.dropout import Dropout, sample_keys
from mmm.nn.meta import meta_parameters
from mmm.optim.adamw import STATE, make_optimizer
from mmm.parallel.mesh import build_mesh
from mmm.parallel.parallel_model import ParallelModel
from mmm.parallel.partition import partition_model
from mmm.run import options as groups
from mmm.run.comm import TorchComm
from mmm.run.folder import Folder
from mmm.run.run import Run
from mmm.runtime.clock import OWN, StepClock
from mmm.runtime.device import Precision, choose_device, choose_precision
from mmm.runtime.log import ignore_views
from mmm.runtime.process_group import process_group
from mmm.runtime.ranks import Rank
from mmm.runtime.waits import timed_waits
from mmm_lab.cli.history_ranks import slowest_text

pytestmark = pytest.mark.gpu
# Where a site asks for it, a missing GPU is a failure.
STRICT = os.environ.get("MMM_GPU_TESTS") == "required"
ALONE = Rank(0, 1, 0, 1, "alone")
FP32 = Precision("fp32", torch.float32, torch.float32)


@pytest.fixture(scope="module")
def kind():
    """cuda (also ROCm's) or xpu."""
    kinds = [kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()]
    if not kinds:
        (pytest.fail if STRICT else pytest.skip)("no accelerator: nothing was checked")
    return kinds[0]


class Training:
    """A Transformer, its optimizer and a run without a record, on one device."""

    def __init__(self, kind, config, tokens, precision=None):
        self.device = choose_device(kind, ALONE)
        precision = precision or choose_precision("auto", self.device)
        layout = Layout().fit(1)
        plan = transformer_plan()
        techniques = Techniques()
        with meta_parameters():
            model = Transformer(config)
        partition = partition_model(model, plan, layout, techniques, torch.zeros(tokens, dtype=torch.int64).to("meta"))
        (count,) = partition.parameters(model, 1, techniques.schedule)
        # Parameters, gradients and the optimizer's state.
        self.least = count * (2 + STATE["adamw"])
        clock = StepClock(self.device)
        comm = TorchComm()
        comm.rank = ALONE
        options = groups.RunFlags()
        folder = Folder()
        self.run = Run("test", options, options, None, ALONE, layout, self.device, precision, comm, clock, [], folder)
        mesh = build_mesh(layout, kind)
        self.model = ParallelModel(
            model, plan, mesh, precision, techniques, partition, device=self.device, seed=0, lap=clock.model_lap
        )
        self.optimizer = make_optimizer("adamw", self.model.parameters(), 1e-3)
        self.tokens = torch.randint(config.vocab_size, tokens, generator=torch.Generator().manual_seed(0)).to(
            self.device
        )

    def step(self, due=False):
        """Returns the loss where a row is due. Gradients are left."""
        self.optimizer.zero_grad()
        self.run.clock.start()
        self.run.clock.lap("dtd")
        loss = self.model.forward_backward(Batch(self.tokens, self.tokens, self.tokens.numel()))
        self.model.clip(1.0)
        self.optimizer.step()
        self.run.clock.lap("dto")
        if not due:
            return None
        return self.run.row({"iter": 0}, {"loss": loss}, samples=len(self.tokens))


@pytest.fixture
def training(kind):
    with process_group(ALONE, choose_device(kind, ALONE), 60.0), ignore_views():
        yield lambda *args, **named: Training(kind, *args, **named)


@pytest.mark.timeout(3600)
def test_every_layout_of_as_many_ranks_as_there_are_devices(kind):
    command = [sys.executable, "-m", "mmm_lab.parity", "--device", kind]
    assert subprocess.run(command, check=False).returncode == 0


def test_memory_is_what_was_predicted(training, kind, capfd):
    """Parameters, gradients and optimizer state; with 64 tokens, activations and gathered layers add little."""
    memory = getattr(torch, kind)
    before = memory.memory_allocated()
    # Matrices of 4 and 12 MiB: CUDA's allocator rounds what is larger than 10 MiB up to whole 2 MiB.
    config = TransformerConfig(dim=1024, n_layers=24, n_heads=16, n_kv_heads=16, vocab_size=256, ffn_dim=3072)
    trained = training(config, (1, 64), FP32)
    trained.step()
    memory.reset_peak_memory_stats()
    trained.step()
    memory.synchronize()
    predicted = 4 * trained.least
    held = memory.memory_allocated() - before
    peak = memory.max_memory_allocated() - before
    with capfd.disabled():
        print(
            f"\nmemory: predicted {predicted / 1e9:.3f} GB, after a step {held / 1e9:.3f} GB ({held / predicted:.3f}), "
            f"peak {peak / 1e9:.3f} GB ({peak / predicted:.3f})"
        )
    assert 0.99 < held / predicted < 1.05
    assert 1.0 < peak / predicted < 1.3


def test_speed(training, kind, capfd):
    config = TransformerConfig(dim=1024, n_layers=8, n_heads=16, n_kv_heads=16, vocab_size=8192, ffn_dim=2816)
    trained = training(config, (8, 1024))
    synchronize = getattr(torch, kind).synchronize
    first, *_ = losses = [trained.step(due=True).loss for _ in range(5)]
    synchronize()
    began, steps = time.perf_counter(), 20
    for _ in range(steps):
        trained.step()
    synchronize()
    seconds = (time.perf_counter() - began) / steps
    name = getattr(torch, kind).get_device_name()
    with capfd.disabled():
        print(
            f"\nspeed: {trained.tokens.numel() / seconds:,.0f} tokens/s on {name}, {trained.run.precision.name}, "
            f"torch {torch.__version__}: {sum(p.numel() for p in trained.model.parameters()) / 1e6:.0f} M parameters, "
            f"8 sequences of 1,024 tokens"
        )
    assert losses[-1] < first


@pytest.mark.timeout(600)
def test_a_step_takes_what_was_predicted(tmp_path, monkeypatch, capfd):
    """By the rates that are measured of this device, of a model of which the host does not decide."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    subprocess.run([sys.executable, "-m", "mmm_lab.cli.main", "machine", "--measure"], check=True)
    sizes = "--preset llama-1b --n_layers 8 --dataset random --vocab_size 32000 --seq_length 2048 --global_batch_size 4"
    where = "--eval_every 0 --eval_batches 1 --max_iters 31 --log_every 10 --no-plots --outdir"
    argv = ["-m", "mmm.trainer.lm", *sizes.split(), *where.split(), str(tmp_path / "run")]
    subprocess.run([sys.executable, *argv], check=True)
    config = json.loads((tmp_path / "run/config.json").read_text())
    ratio = {of: config["measured"][of] / config["predicted"][of] for of in ("step_seconds", "peak_bytes")}
    with capfd.disabled():
        print(f"\nmeasured over predicted: step {ratio['step_seconds']:.3f}, memory {ratio['peak_bytes']:.3f}")
    assert 0.75 < ratio["step_seconds"] < 1.33
    assert 0.9 < ratio["peak_bytes"] < 1.1


def test_the_host_waits_for_rows_alone(training, kind, capfd, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "accelerator")
    device = pytest.importorskip("device")
    config = TransformerConfig(dim=256, n_layers=4, n_heads=8, n_kv_heads=8, vocab_size=256, ffn_dim=512)
    trained = training(config, (4, 128))
    module = getattr(torch, kind)
    trained.step(due=True)
    synchronize = module.synchronize
    monkeypatch.setattr(module, "synchronize", lambda *args: (device.COUNTS.add("synchronizations"), synchronize()))
    counted = {}
    for due in (False, True):
        device.COUNTS.clear()
        with device.Count(kind):
            trained.step(due)
        counted[due] = {name: device.COUNTS.of[name] for name in ("synchronizations", "reads")}
    with capfd.disabled():
        print(f"\nthe host waits for: {counted[False]} in a step without a row, {counted[True]} in one with")
    assert counted[False] == {"synchronizations": 0, "reads": 0}
    assert counted[True]["reads"] == 1
    assert counted[True]["synchronizations"] <= 1


def busy(kind, seconds):
    """A function that keeps the current stream busy for about as long."""
    matrix = torch.randn(2048, 2048, device=kind)
    events = getattr(torch, kind).Event
    products = 0
    # The first ones warm up.
    for products in (20, 100):
        begin = events(enable_timing=True)
        end = events(enable_timing=True)
        begin.record()
        for _ in range(products):
            matrix @ matrix
        end.record()
        end.synchronize()
    seconds_per_product = begin.elapsed_time(end) / 1000 / products

    def work():
        for _ in range(round(seconds / seconds_per_product)):
            matrix @ matrix

    return work


def test_waiting_for_another_stream_is_no_own_work(kind):
    """As FSDP waits: for an event of a stream of its own."""
    module = getattr(torch, kind)
    seconds = 0.2
    clock = StepClock(torch.device(kind), ("dtf", "dto"))
    other = module.Stream()
    work = busy(kind, seconds)
    rows = {}
    with timed_waits(clock):
        for late in ("nobody", "other", "own"):
            clock.start()
            other.wait_stream(module.current_stream())
            if late == "own":
                work()
            with module.stream(other):
                if late == "other":
                    work()
                event = other.record_event()
            module.current_stream().wait_event(event)
            clock.lap("dtf")
            clock.lap("dto")
            rows[late] = clock.read()
    assert rows["other"]["dt"] > 0.7 * seconds
    assert rows["other"][OWN] < 0.3 * seconds
    assert rows["own"][OWN] > 0.7 * seconds
    assert rows["nobody"]["dt"] < 0.3 * seconds


SLOW = """
import os, runpy, torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

def late(*_):
    # Some tenths of a second on the device. The host goes on at once.
    matrix = torch.randn(4096, 4096, device=KIND)
    for _ in range(100):
        matrix @ matrix

if os.environ["RANK"] == "1":
    register_optimizer_step_pre_hook(late)
runpy.run_module("mmm.trainer.lm", run_name="__main__", alter_sys=True)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", ["", "--tp 2", "--pp 2", "--compile"])
def test_the_slow_rank_is_named(kind, tmp_path, flags):
    """Its device is busy for longer; no host waits for it."""
    ranks = min(getattr(torch, kind).device_count(), 4)
    if ranks < 2:
        pytest.skip("one device: there is no other rank to wait for")
    (tmp_path / "slow.py").write_text(SLOW.replace("KIND", repr(kind)))
    launch = [sys.executable, "-m", "mmm_launch", "-n", str(ranks // 2 * 2), "--device", kind, "python3", "slow.py"]
    sizes = "--preset debug --dataset random --max_iters 12 --eval_every 0 --eval_batches 1 --no-plots --outdir run"
    subprocess.run([*launch, *sizes.split(), "--own_work", *flags.split()], cwd=tmp_path, check=True)
    record = load(tmp_path / "run")
    assert record["dt_own"].dims == ("draw", "rank")
    assert slowest_text(record).startswith("rank 1 ("), slowest_text(record)


@pytest.mark.parametrize("window", [None, 300])
def test_documents_without_a_mask(kind, capfd, monkeypatch, window):
    """bf16 at 8,192 tokens: varlen_attn is as near to float32 as the mask is, and takes less memory."""
    if kind != "cuda" or not has_varlen(torch.empty(1, 64, dtype=torch.bfloat16, device=kind)):
        pytest.skip("this device has no varlen_attn: nothing was checked")
    config = TransformerConfig(dim=512, n_layers=2, n_heads=8, n_kv_heads=2, vocab_size=256, window=window)
    model = Transformer(config)
    weights.initialize(model, 0)
    model.to(kind)
    rng = torch.Generator().manual_seed(0)
    is_start = torch.rand(2, 8192, generator=rng) < torch.tensor([[1 / 500], [1 / 2000]])
    documents = Documents.of(torch.where(is_start, torch.arange(8192), 0).cummax(1).values)
    documents = Documents(*(tensor.to(kind) for tensor in documents))
    tokens = torch.randint(256, (2, 8192), generator=rng).to(kind)

    def trained(half, masked):
        """Loss, all gradients in one tensor, and the peak of memory."""
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with monkeypatch.context() as patched, torch.autocast(kind, torch.bfloat16, enabled=half):
            if masked:
                patched.setattr("mmm.nn.attention.has_varlen", lambda q: False)
            logits = model(tokens, documents=documents)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()]), peak

    loss, gradient, _ = trained(half=False, masked=True)
    masked_loss, masked_gradient, masked_peak = trained(half=True, masked=True)
    our_loss, our_gradient, our_peak = trained(half=True, masked=False)
    masked_error = float((masked_gradient - gradient).norm() / gradient.norm())
    our_error = float((our_gradient - gradient).norm() / gradient.norm())
    with capfd.disabled():
        print(
            f"\ndocuments, window {window}: gradients off by {our_error:.1e}, with the mask {masked_error:.1e}; "
            f"memory {our_peak / 2**20:,.0f} MiB, with the mask {masked_peak / 2**20:,.0f} MiB"
        )
    assert abs(our_loss - loss) <= 2 * abs(masked_loss - loss) + 1e-3 * loss
    assert our_error <= 2 * masked_error
    assert our_peak < 0.8 * masked_peak


@pytest.mark.parametrize(
    ("program", "flags"), [("lm", ""), ("vit", "--dataset fake"), ("cnn", "--dataset fake")], ids=["lm", "vit", "cnn"]
)
def test_deterministic_runs_have_the_same_bits(kind, tmp_path, program, flags):
    """Two runs in processes of their own. `mmm diverge` compares hashes."""
    trainer = [sys.executable, "-m", f"mmm.trainer.{program}", "--device", kind, "--max_iters", "8", "--no_plots"]
    trainer += flags.split()
    for name in ("a", "b"):
        argv = [*trainer, "--deterministic", "--fingerprints", "1", "--outdir", tmp_path / name]
        subprocess.run(argv, check=True)
    compared = subprocess.run(
        [sys.executable, "-m", "mmm_lab.cli.main", "diverge", tmp_path / "a", tmp_path / "b", "--tolerance", "0"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert compared.stdout.startswith("the same bits: 8 steps"), compared.stdout + compared.stderr


def test_compiled_dropout_drops_what_it_drops_on_a_cpu(kind):
    """Its numbers are integers of 64 bits, which torch.compile counts in 32 where it can."""
    dropout = Dropout(0.3, layer=3).train()
    keys = sample_keys(0, 0, 0, 4)
    x = torch.ones(4, 8, 64)
    compiled = torch.compile(dropout, dynamic=False)(x.to(kind), keys.to(kind))
    assert torch.equal(compiled.cpu(), dropout(x, keys))
    assert 0.2 < float((compiled == 0).float().mean()) < 0.4
