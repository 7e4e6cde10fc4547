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
    "ddp": {"DDP", "all_reduce", "text_steps"},
}
TAKEN = {"Layout", "cross_entropy", "materialize"}  # of mmm.parallel: the mesh's sizes, the loss, the weights


def tree_of(name):
    return ast.parse((FOLDER / f"{name}.py").read_text())


def called(tree):
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "") for function in functions
    }


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
    assert TECHNIQUE[name] | LOOP <= called(tree)
    assert taken(tree) <= TAKEN
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= LONGEST


def test_a_technique_that_is_taken_is_noticed():
    text = "from mmm.parallel import apply\nfrom mmm.parallel.assemble import ParallelModel\nmodel = apply(model)\n"
    assert taken(ast.parse(text)) == {"apply", "mmm.parallel.assemble"}
    assert called(ast.parse(text)) == {"apply"}
