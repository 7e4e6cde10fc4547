"""Each example's technique stands in its file, in PyTorch's own calls, and the file is short."""

import ast
from pathlib import Path

import pytest

import mmm.examples

FOLDER = Path(mmm.examples.__file__).parent
LONGEST = 150  # lines
LOOP = {"backward", "step", "zero_grad", "log"}
SUMMED = {"set_gradient_divide_factor", "set_force_sum_reduction_for_comms"}
TECHNIQUE = {
    "fsdp_tp": {
        *("init_device_mesh", "parallelize_module", "fully_shard", "loss_parallel", "text_steps"),
        *("ColwiseParallel", "RowwiseParallel", "SequenceParallel", "PrepareModuleInput"),
        *SUMMED,
    },
    "fsdp": {"init_device_mesh", "DDP", "fully_shard", "local_elements", "image_steps", *SUMMED},
    "hsdp": {"init_device_mesh", "fully_shard", "text_steps", *SUMMED},
    "zero": {"all_reduce", "reduce_scatter", "all_gather", "fully_shard", "text_steps", *SUMMED},
    "checkpoint": {"init_device_mesh", "fully_shard", "save", "load", "FileSystemReader", "text_steps", *SUMMED},
    "ddp": {"DDP", "all_reduce", "text_steps"},
    "tensor_parallel": {
        *("init_device_mesh", "all_reduce", "shard", "gather", "forward_backward", "gelu", "parallelize_module"),
        *("ColwiseParallel", "RowwiseParallel", "SequenceParallel", "loss_parallel", "cross_entropy"),
    },
    "pipeline": {
        *("make_stage", "PipelineStage", "apply", "kind", "loss_parallel", "text_steps"),
    },
    "context_parallel": {
        *("get_process_group_ranks", "P2POp", "batch_isend_irecv", "wait", "masked_fill", "logsumexp", "logaddexp"),
        *("positions_of", "attention", "loss_parallel", "text_steps"),
    },
    "moe": {
        *("sigmoid", "topk", "argsort", "bincount", "all_to_all_single", "all_to_all_single_autograd", "wait_tensor"),
        *("silu", "index_add", "moe_layer", "balance_experts", "loss_parallel", "text_steps"),
    },
    "parallel_4d": {
        *("init_device_mesh", "build", "parallelize_module", "ColwiseParallel", "prepare", "RowwiseParallel"),
        *("SequenceParallel", "fully_shard", "PipelineStage", "kind", "loss_parallel", "text_steps"),
        *SUMMED,
    },
}
NAMED = {  # taken by another name, or handed to a function
    "tensor_parallel": {"matmul"},
    "context_parallel": {"isend", "irecv", "ring_attention"},
    "parallel_4d": {"ring_attention", "PrepareModuleInput", "Schedule1F1B", "ScheduleGPipe"},
}
OTHER_LOOP = {"tensor_parallel": set(), "pipeline": LOOP - {"backward"}, "parallel_4d": LOOP - {"backward"}}
TAKEN = {"Layout", "cross_entropy", "draw_weights"}  # of mmm.parallel: the mesh's sizes, the loss, the weights
MEASURED = {"mmm.parallel.footprint", "mmm.parallel.memory.measure"}  # what a rank holds
ALSO_TAKEN = {  # what is not the example's own technique
    "fsdp": MEASURED,
    "hsdp": MEASURED,
    "pipeline": {"apply", "build_mesh", "materialize", "mmm.parallel.pp.schedules", "mmm.layout"},
    "moe": {"balance_experts", "imbalance"},
    "parallel_4d": {"clip_grad_norm"},
}


def tree_of(name):
    return ast.parse((FOLDER / f"{name}.py").read_text())


def called(tree):
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "") for function in functions
    }


def named(tree):
    """The attributes and names that a file uses."""
    return {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)}


def taken(tree):
    """What a file imports of mmm.parallel, and from deeper within it."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    whole = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not [name for name in whole if name.startswith("mmm")]
    names = {alias.name for node in imports if node.module == "mmm.parallel" for alias in node.names}
    return names | {node.module for node in imports if (node.module or "").startswith("mmm.parallel.")}


@pytest.mark.parametrize("name", TECHNIQUE)
def test_the_technique_is_in_the_file(name):
    tree = tree_of(name)
    assert TECHNIQUE[name] | OTHER_LOOP.get(name, LOOP) <= called(tree)
    assert NAMED.get(name, set()) <= named(tree)
    assert taken(tree) <= TAKEN | ALSO_TAKEN.get(name, set())


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_every_example_is_short(file):
    assert len(file.read_text().splitlines()) <= LONGEST


def test_a_technique_that_is_taken_is_noticed():
    text = "from mmm.parallel import apply\nfrom mmm.parallel.assemble import ParallelModel\nmodel = apply(model)\n"
    assert taken(ast.parse(text)) == {"apply", "mmm.parallel.assemble"}
    assert called(ast.parse(text)) == {"apply"}
