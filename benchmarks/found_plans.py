"""Plans that `mmm verify` finds for 32 models of other libraries, none of them edited, and whether they are right.

    python3 benchmarks/found_plans.py                     # needs transformers and timm: pip install 'mmm[interop-test]'
    python3 benchmarks/found_plans.py --only llama t5     # some of them, with all that is said
    python3 benchmarks/found_plans.py --table docs/verify.md

Each model is small: two or three blocks, narrow. Each is found a plan, which is then proven on 2 data-parallel and on 2
tensor-parallel ranks, in float64 on this host's CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import re
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmm.data.images.torchvision_shim import import_torchvision
from mmm.errors import UserError
from mmm_verify.propose.code import load_code
from mmm_verify.propose.find import Proposal, find_plan
from mmm_verify.propose.models import SAMPLES, NamedModel, default_batch, load_model
from mmm_verify.propose.report import group_name, groups_by_pattern, modules_by_pattern
from mmm_verify.run import verify_subject
from mmm_verify.subject import make_subject

BEGIN, END = "<!-- found plans: python3 benchmarks/found_plans.py --table docs/verify.md -->", "<!-- end -->"
TIMEOUT = 300.0  # s, of one part of one model

DECODER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**DECODER, "num_key_value_heads": 2}
CONFIGS: dict[str, dict[str, Any]] = {  # of transformers, by model_type
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral": GROUPED,
    "gemma": {**GROUPED, "head_dim": 8, "num_key_value_heads": 1},
    "gemma2": {**GROUPED, "head_dim": 8},
    "olmo2": GROUPED,
    "phi": DECODER,
    "phi3": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "falcon": {**DECODER, "new_decoder_architecture": False, "multi_query": True},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "pad_token_id": 0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64, "bos_token_id": 1,
             "eos_token_id": 2},
    "gpt_neox": DECODER,
    "opt": {**DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "bert": DECODER,
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 64,
                   "max_position_embeddings": 64},
    "roberta": DECODER,
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64,
           "decoder_start_token_id": 0},
}  # fmt: skip


class Translation(nn.Transformer):
    """PyTorch's encoder and decoder, of one sequence that is both source and target."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x)


def torchvision_model(name: str, **sizes: Any) -> nn.Module:
    return getattr(import_torchvision("models"), name)(**sizes)


def convnext() -> nn.Module:
    """As convnext_tiny, with fewer and narrower blocks."""
    models = import_torchvision("models.convnext")
    setting = [models.CNBlockConfig(32, 64, 2), models.CNBlockConfig(64, None, 2)]
    return models.ConvNeXt(setting, num_classes=10)


def timm_model(name: str, **sizes: Any) -> nn.Module:
    import_torchvision("transforms")
    import timm

    return timm.create_model(name, pretrained=False, **sizes)


def mixer() -> nn.Module:
    import_torchvision("transforms")
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(img_size=64, patch_size=16, num_blocks=3, embed_dim=64)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3)


def translation() -> nn.Module:
    return Translation(32, 4, 2, 2, 64, batch_first=True)


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "torchvision resnet18": partial(torchvision_model, "resnet18"),
    "torchvision mobilenet_v3_small": partial(torchvision_model, "mobilenet_v3_small"),
    "torchvision efficientnet_b0": partial(torchvision_model, "efficientnet_b0"),
    "torchvision ConvNeXt": convnext,
    "torchvision VisionTransformer": partial(
        torchvision_model, "VisionTransformer", image_size=64, patch_size=16, num_layers=3, num_heads=4,
        hidden_dim=64, mlp_dim=128, num_classes=10,
    ),
    "torchvision SwinTransformer": partial(
        torchvision_model, "SwinTransformer", patch_size=[4, 4], embed_dim=32, depths=[2, 2], num_heads=[2, 4],
        window_size=[4, 4], num_classes=10,
    ),
    "timm vit_tiny_patch16_224": partial(timm_model, "vit_tiny_patch16_224", img_size=64, depth=3, num_heads=4),
    "timm deit_tiny_distilled_patch16_224": partial(
        timm_model, "deit_tiny_distilled_patch16_224", img_size=64, depth=3, num_heads=4
    ),
    "timm beit_base_patch16_224": partial(
        timm_model, "beit_base_patch16_224", img_size=64, depth=3, embed_dim=64, num_heads=4
    ),
    "timm MlpMixer": mixer,
    "timm swin_tiny_patch4_window7_224": partial(
        timm_model, "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=32, depths=(2, 2),
        num_heads=(2, 4),
    ),
    "torch TransformerEncoder": encoder,
    "torch Transformer": translation,
}  # fmt: skip


@dataclass
class Row:
    """What came of one model; the verdicts are None where there was nothing to verify."""

    name: str
    proposal: Proposal | None = None
    fsdp: bool | None = None
    tensor: bool | None = None
    problem: str = ""
    seconds: float = 0.0


def named_model(name: str, folder: Path) -> NamedModel:
    if name in FACTORIES:
        return NamedModel(FACTORIES[name])
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"model_type": name, **CONFIGS[name]}))
    return load_model(f"hf:{file}")


def run(name: str, folder: Path, verbose: bool) -> Row:
    """Find a plan for a model, and prove it."""
    begin, row = time.monotonic(), Row(name)
    try:
        model = named_model(name, folder)
        batch_fn = default_batch(model, SAMPLES, TIMEOUT)
        dp, tp = (
            make_subject(model.model_fn, lambda model, mesh: None, batch_fn, model.step_fn, mesh)
            for mesh in ("dp2", "tp2")
        )
        row.proposal = find_plan([dp, tp], name, TIMEOUT)
        parallelize_fn = load_code(row.proposal.code, None)
        if verbose:
            print(row.proposal, row.proposal.code, sep="\n\n")
        verdict = verify_subject(replace(dp, parallelize_fn=parallelize_fn), TIMEOUT)
        row.fsdp, row.problem = verdict.same, "" if verdict.same else str(verdict)
        if row.proposal.tensor is not None and row.proposal.tensor.shards:
            verdict = verify_subject(replace(tp, parallelize_fn=parallelize_fn), TIMEOUT)
            row.tensor = verdict.same
            row.problem += "" if verdict.same else str(verdict)
    except UserError as error:
        row.problem = str(error)
    row.seconds = time.monotonic() - begin
    return row


def columns(row: Row) -> list[str]:
    """A row of the table."""
    if row.proposal is None or row.proposal.tensor is None:
        return [row.name, "", "", "", row.problem.splitlines()[0]]
    plan, cuts = row.proposal.tensor, row.proposal.cuts
    alike = groups_by_pattern(plan.groups)
    names = [group_name(groups[0]).rpartition(": ")[2] for groups in alike]
    names += [modules[0].path.rpartition(".")[2] for modules in modules_by_pattern(plan.modules)]
    found = "; ".join(dict.fromkeys(names)) or "none"
    proven = {True: "yes", False: "**no**", None: "–"}
    refused = [f"{group_name(groups[0])}: {groups[0].refused}" for groups in groups_by_pattern(plan.refused)]
    functions = ("it is not called", "a parameter of")
    refused += [f"{n}: {why}" for n, why in plan.replicated.items() if not plan.groups or why.startswith(functions)]
    splits = f"{len(cuts.after)} of {len(cuts.after) + len(cuts.refused)}"
    why = refused or list(dict.fromkeys(cuts.refused.values()))
    whys = "; ".join(textwrap.shorten(text, 200, placeholder=" …") for text in why[:2])
    count = len(plan.groups) + len(plan.modules)
    return [row.name, proven[row.fsdp], f"{count}: {found}", proven[row.tensor], splits, whys]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="models with one of these in their names")
    parser.add_argument("--table", type=Path, help="write the table into this page, between its markers")
    args = parser.parse_args()
    names = [*CONFIGS, *FACTORIES]
    if args.only:
        names = [name for name in names if any(word in name for word in args.only)]
    torchvision_model("resnet18")  # imported here once, and not in each process that is forked
    timm_model("vit_tiny_patch16_224")
    rows = []
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        for name in names:
            rows.append(run(name, Path(folder), bool(args.only)))
            print(" | ".join(columns(rows[-1])), f"{rows[-1].seconds:.0f} s", flush=True)
            if rows[-1].problem:
                print(rows[-1].problem, flush=True)
    print(f"{sum(bool(row.fsdp) for row in rows)} proven with FSDP, {sum(bool(row.tensor) for row in rows)} on tp2, of "
          f"{len(rows)}; {max(row.seconds for row in rows):.0f} s at most")  # fmt: skip
    if args.table:
        lines = ["| model | FSDP on dp2 | tensor groups | on tp2 | splits | not sharded, or not split |",
                 "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
        lines += ["| " + " | ".join(text.replace("|", "\\|") for text in columns(row)) + " |" for row in rows]
        libraries = ", ".join(f"{name} {version(name)}" for name in ("transformers", "timm", "torchvision"))
        versions = f"PyTorch {torch.__version__}, {libraries}, Python {platform.python_version()}"
        page = args.table.read_text(encoding="utf-8")
        inner = "\n".join([BEGIN, "", *lines, "", f"Made with {versions}.", END])
        args.table.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: inner, page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
