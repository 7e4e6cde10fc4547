"""Memory by formula, beside what a step on this device has had: activations, logits and gradients. The bytes of
tensors, when they are there, and what they are for."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from mmm.models.costs import Setting
from mmm.models.definition import of_config
from mmm.models.gpt.model import GPTConfig
from mmm.models.llama.model import Transformer, TransformerConfig
from mmm.models.llama.plan import transformer_plan
from mmm.models.qwen3.model import Qwen3Config
from mmm.models.swin.model import Swin, SwinConfig
from mmm.models.vit.model import ViTConfig
from mmm.nn.attention import Documents
from mmm.nn.dropout import sample_keys
from mmm.nn.rope import rotary_table
from mmm.parallel import Layout, Techniques
from mmm.parallel.memory.checkpointing import apply_checkpointing
from mmm.parallel.memory.chunked_loss import apply_chunked_loss, loss_of
from mmm.parallel.memory.measure import Peak
from mmm.parallel.pp.replay import action_lists
from mmm.parallel.pp.schedules import SCHEDULES, stages_of
from mmm.torch_private.faults import GROUPED
from mmm_lab.planner.memory import PARTS, MemoryModel, in_flight
from mmm_lab.planner.named_model import read_model
from mmm_lab.planner.tracker import MemoryTracker
from mmm_lab.planner.trial import Trial, full_model, stages_for
from support.faults import skipped_by

CPU = torch.device("cpu")
OF_GROUPS = skipped_by(GROUPED)
# Sizes of Llama: narrow, wide, with a large vocabulary, with experts.
NARROW = {"dim": 64, "n_layers": 4, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 192, "vocab_size": 256}
WIDE = {"dim": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 8, "ffn_dim": 704, "vocab_size": 512}
VOCABULARY = {**NARROW, "vocab_size": 8192}
ROUTED = {**NARROW, "n_experts": 8, "top_k": 2}


def kept_by(config, sequence, width):
    setting = Setting(layout=Layout(dp_shard=1), sequence=sequence, compute=width, residual=width)
    return of_config(config).costs.kept(config, setting)


def kept_bytes(work, weights):
    """What autograd keeps for backward, but for weights."""
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        # Views of one storage count once.
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = work()
    del output
    return sum(storage.nbytes() for storage in seen.values())


BATCH = 2
# One layer of each other model.
GPT = GPTConfig(dim=64, n_layers=1, n_heads=4, block_size=32)
QWEN3 = Qwen3Config(dim=64, n_layers=1, n_heads=8, n_kv_heads=4, head_dim=16, vocab_size=96)
VIT = ViTConfig(image_size=32, patch_size=4, classes=10, dim=64, n_layers=1, n_heads=4)


def first_block(config):
    return next(iter(of_config(config).build(config).layers.values()))


def arguments_of(config, sequence):
    """What the forward of a block of the model takes besides the residual stream."""
    positions = torch.arange(sequence)
    if isinstance(config, ViTConfig):
        return ()
    if isinstance(config, GPTConfig):
        return positions, None, sample_keys(0, 0, 0, BATCH)
    return rotary_table(positions, config.head_dim, config.rope_theta)


@OF_GROUPS
@pytest.mark.parametrize(
    ("config", "sequence", "dtype"),
    [
        *(
            (TransformerConfig(**sizes), 128, dtype)
            for sizes in (NARROW, WIDE, {**NARROW, "window": 7})
            for dtype in (torch.float32, torch.bfloat16, torch.float64)
        ),
        (QWEN3, 32, torch.float32),
        (QWEN3, 32, torch.bfloat16),
        (GPT, 32, torch.float32),
        (replace(GPT, dropout=0.2), 32, torch.float32),
        (replace(GPT, dropout=0.2, attention_dropout=0.2), 32, torch.float32),
        (VIT, VIT.patches, torch.float32),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "dim") else str(value),
)
def test_what_a_block_keeps(config, sequence, dtype):
    """The formula for a layer counts what autograd keeps of it."""
    block = first_block(config).to(dtype)
    x = torch.randn(BATCH, sequence, config.dim, dtype=dtype, requires_grad=True)
    others = arguments_of(config, sequence)
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    activations = kept_by(config, sequence, dtype.itemsize)
    expected = activations.none * BATCH * sequence + activations.a_position * sequence
    if dtype == torch.float64:
        # Its rotary angles are as wide as itself: shared, and not the block's own.
        expected -= 8.0 * config.head_dim * sequence
    assert kept_bytes(lambda: block(x, *others), weights) == pytest.approx(expected, rel=0.03)


def test_what_blocks_with_windows_keep():
    """A plain block and a shifted one, which also keeps its mask."""
    config = SwinConfig(image_size=16, dim=64, n_layers=2, n_heads=4, window=4)
    blocks = Swin(config).layers.values()
    x = torch.randn(BATCH, 16, 16, 64, requires_grad=True)
    expected = kept_by(config, 256, 4).none * BATCH * 256
    weights = {parameter.untyped_storage().data_ptr() for block in blocks for parameter in block.parameters()}
    sizes = [kept_bytes(partial(block, x), weights) for block in blocks]
    assert sum(sizes) / 2 == pytest.approx(expected, rel=0.002)


@OF_GROUPS
def test_what_a_block_keeps_of_documents():
    """On a CPU: no mask, and a second copy of attention's output, where the documents' outputs are joined."""
    config = TransformerConfig(**NARROW)
    sequence = 128
    block = first_block(config)
    x = torch.randn(BATCH, sequence, config.dim, requires_grad=True)
    documents = Documents.of(torch.tensor([[0] * 50 + [50] * 78, [0] * 128]))
    cos, sin = rotary_table(torch.arange(sequence) - documents.start_of_token, config.head_dim, config.rope_theta)
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    activations = kept_by(config, sequence, 4)
    second_output = 4 * config.dim
    expected = (activations.none + activations.a_position + second_output) * BATCH * sequence
    assert kept_bytes(lambda: block(x, cos, sin, documents), weights) == pytest.approx(expected, rel=0.02)


def at_peak(memory, layout, local_batch, **techniques):
    trial = Trial(layout, Techniques(**techniques), (full_model(memory.spec),), local_batch)
    return memory.of_stage(trial.stages[0], trial)


def predicted(sizes, batch, seq, **techniques):
    spec = read_model("debug", sizes, seq)
    memory = MemoryModel(spec, "cpu", "fp32", "sgd")
    # ZeRO-1 on one rank is the plain model.
    parts = at_peak(memory, Layout(dp_shard=1), batch, data_parallel="zero1", **techniques)
    assert set(parts) == set(PARTS)
    # As `Peak` measures: what comes on top of the parameters.
    return sum(parts.values()) - parts["parameters"]


MODES = ("none", "selective", "full")
# Sizes, and the techniques of a step.
CASES = [
    *((NARROW, {"checkpointing": mode}) for mode in MODES),
    (VOCABULARY, {"loss_chunks": 8}),
    *(
        pytest.param(sizes, {"checkpointing": mode}, marks=pytest.mark.long)
        for sizes in (WIDE, VOCABULARY)
        for mode in MODES
    ),
    pytest.param(ROUTED, {}, marks=pytest.mark.long),
]


@OF_GROUPS
@pytest.mark.parametrize(("sizes", "techniques"), CASES)
def test_peak_of_a_step(sizes, techniques):
    config = TransformerConfig(**sizes)
    batch = 4
    seq = 256
    model = Transformer(config)
    plan = transformer_plan(config)
    plan = apply_chunked_loss(model, plan, techniques.get("loss_chunks", 1), torch.float32)
    apply_checkpointing(model, plan, techniques.get("checkpointing", "none"))
    tokens = torch.randint(config.vocab_size, (batch, seq))
    loss = loss_of(model)
    with Peak(CPU, model) as peak:
        # Without an optimizer: its state comes later.
        loss(model(tokens), tokens, batch * seq).backward()
    assert predicted(sizes, batch, seq, **techniques) == pytest.approx(peak.bytes, rel=0.03)


@pytest.mark.parametrize(
    ("measured", "techniques"),
    [(145.1, {}), (52.3, {"loss_chunks": 8})],
    ids=str,
)
def test_figures_of_the_docs(measured, techniques):
    """docs/memory.md: FSDP over 4 ranks, 1,024 tokens each, MB beyond parameters on the rank that needs most."""
    spec = read_model("debug", {"ffn_dim": 1024, "vocab_size": 8192}, 128)
    memory = MemoryModel(spec, "cpu", "fp32")
    parts = at_peak(memory, Layout(dp_shard=4), 8, **techniques)
    beyond = sum(parts.values()) - parts["parameters"] - parts["optimizer"]
    assert beyond / 1e6 == pytest.approx(measured, rel=0.1)


def test_logits_are_sharded_over_tp():
    """Half of them on each of two ranks, and beside three tensors of their size a fourth."""
    memory = MemoryModel(read_model("debug", VOCABULARY, 128), "cpu", "fp32")
    alone, half = (memory.logits(Layout(dp_shard=1, tp=tp), Techniques(), 1)[0] for tp in (1, 2))
    assert half == pytest.approx(alone * 4 / 3 / 2)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_micro_batches_under_way(schedule, pp, microbatches):
    """PyTorch's own lists: a stage's activations go with B, or with W where backward is split."""
    own = SCHEDULES[schedule].min_stages
    stages = [stages_of(coordinate, pp, schedule, own) for coordinate in range(pp)]
    for coordinate, actions in enumerate(action_lists(schedule, pp, microbatches, stages)):
        now = most = 0
        for action in actions:
            # Activations come with F and go with B, or with W where backward is split.
            now += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, now)
        expected = in_flight(schedule, pp, coordinate, microbatches, own) * own
        if SCHEDULES[schedule].splits:
            assert most <= expected <= 2.2 * most
        else:
            assert expected == most


def test_parts_by_data_parallel_technique():
    """The table of `mmm.parallel.dp`: parameters, gradients and state of each technique."""
    spec = read_model("small", {}, 64)
    memory = MemoryModel(spec, "cuda", "fp32")
    sizes = spec.parameters * 4
    result = {
        name: at_peak(memory, Layout(dp_shard=4), 1, data_parallel=name) for name in ("ddp", "zero1", "zero2", "fsdp")
    }
    assert [round(result[name]["parameters"] / sizes, 2) for name in result] == [1, 1, 1, 0.25]
    assert [round(result[name]["optimizer"] / sizes, 2) for name in result] == [2, 0.5, 0.5, 0.5]
    assert result["fsdp"]["gradients"] < 0.26 * sizes
    # Gradients add up over two micro-batches.
    several = at_peak(memory, Layout(dp_shard=4), 2, microbatches=2)
    # unsharded, until the last micro-batch
    assert several["gradients"] >= sizes


def test_what_offload_puts_where():
    """Of AdamW, parameters, gradients and both moments on the host."""
    spec = read_model("small", {}, 64)
    memory = MemoryModel(spec, "cuda", "fp32")
    size = 4.0
    for offload, host in ((False, 0), (True, 4)):
        trial = Trial(Layout(dp_shard=1), Techniques(offload=offload), (full_model(spec),), 1)
        assert memory.on_host(trial) == host * spec.parameters * size


def test_stages_are_those_of_the_partition():
    spec = read_model("small", {"n_layers": 6}, 64)
    stages = stages_for(spec, [range(3), range(3, 5), range(5, 7), range(7, 8)], "ZBVZeroBubble", 2)
    assert [stage.kinds for stage in stages] == [((0, 1), (1, 2), (2, 1)), ((1, 4),)]
    assert [stage.has_head for stage in stages] == [True, False]


def test_a_step_of_one_layer():
    """By hand: 4 × 8 weights, 16 × 8 inputs, float32."""
    phase = ["start"]
    tracker = MemoryTracker("cpu", lambda: phase[0])
    with tracker.tracking():
        model = nn.Linear(8, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        for step in range(2):
            phase[0] = f"step {step}"
            inputs = torch.ones(16, 8)
            loss = model(inputs).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del inputs, loss
    peaks = tracker.peaks()
    # Bytes.
    weights = 4 * 4 * 8
    activations = 4 * 16 * 8
    assert peaks["step 0"].parts["parameters"] == weights
    last = peaks["step 1"]
    assert last.parts["optimizer state"] == last.parts["parameters"] == weights
    assert last.parts["activations"] >= activations
    assert sum(last.parts.values()) == last.bytes


def test_a_storage_counts_once_and_until_it_ends():
    tracker = MemoryTracker("cpu", lambda: "step 0")
    with tracker.tracking():
        x = torch.zeros(1000)
        views = x.view(10, 100), x[:5]
        del x, views
        torch.zeros(100)
    peak = tracker.peaks()["step 0"]
    assert peak.bytes == 4000
    assert sum(change.bytes for change in tracker.changes) == 0


def test_a_storage_that_is_freed_and_filled_in_place():
    tracker = MemoryTracker("cpu", lambda: "step 0")
    with tracker.tracking():
        x = torch.zeros(1000)
        storage = x.untyped_storage()
        # As FSDP frees a gathered parameter.
        storage.resize_(0)
        y = torch.zeros(500)
        storage.resize_(4000)
        assert tracker.peaks()["step 0"].bytes == 6000
        assert tracker.peaks()["step 0"].parts["gathered"] == 4000
        del x, y, storage


def test_logits_are_what_has_the_vocabulary():
    tracker = MemoryTracker("cpu", lambda: "step 0", widths={32})
    with tracker.tracking():
        logits = torch.zeros(4, 32)
        hidden = torch.zeros(4, 16)
    assert tracker.peaks()["step 0"].parts["logits"] == logits.nbytes
    assert tracker.peaks()["step 0"].parts["activations"] == hidden.nbytes
