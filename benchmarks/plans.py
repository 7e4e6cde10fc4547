"""Plans that `mmm verify` finds for every architecture of transformers, and for models of timm and torchvision.

    pip install --target DIR --no-deps transformers timm regex typer einops
    PYTHONPATH=DIR python3 benchmarks/plans.py --json plans.json        # an hour on one core; goes on where it ended
    PYTHONPATH=DIR python3 benchmarks/plans.py --json plans.json --only llama,t5 --verbose
    python3 benchmarks/plans.py --json plans.json --table docs/plans-for-models.md

A config of each architecture is made small by rules: two layers, 32 channels, 4 heads, 128 tokens. Nobody edits the
model. A plan is found, and proven on 2 data-parallel and on 2 tensor-parallel ranks, in float64 on this host's CPU.
Each model has a process of its own, forked from one that has imported the libraries, and ended after `--limit` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import resource
import signal
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmm.data.images.torchvision_shim import import_torchvision
from mmm_verify.errors import ConfigError, is_for_user
from mmm_verify.propose.code import load_code
from mmm_verify.propose.find import find_plan
from mmm_verify.propose.models import NamedModel, default_batch, load_model, of_config
from mmm_verify.propose.report import attention_reason, attentions_by_pattern, group_name, groups_by_pattern
from mmm_verify.run import verify_subject
from mmm_verify.subject import make_subject
from mmm_verify.torch_private import import_dynamo
from mmm_verify.verdict import Verdict

SAMPLES = 4
# In seconds: for one model, and for one part of it.
LIMIT = 240
PART = 100.0
# The most parameters of a model: a larger one would take minutes.
MOST_PARAMETERS = 12_000_000
BEGIN, END = "<!-- plans: python3 benchmarks/plans.py --table docs/plans-for-models.md -->", "<!-- end -->"

# The name of a config's field (a pattern) → its small value. The first pattern that fits the whole name counts.
SIZES: list[tuple[str, int]] = [
    (r"num_feat_extract_layers", 99),
    (r"(moe|expert|shared_expert|moe_shared_expert)_(intermediate|hidden|ffn_hidden)_size", 32),
    (r"expert_ffn_hidden_size", 32),
    (r".*(vocab_size|n_words|num_tokens)", 128),
    (r"q_lora_rank|kv_lora_rank|qk_head_dim|index_head_dim|hidden_size_per_layer_input", 16),
    (r"qk_nope_head_dim|qk_rope_head_dim|v_head_dim|(linear_(key|value)_)?head_dim|d_kv|swa_head_dim", 8),
    (r"attention_head_dim|mamba_d_head|mamba_head_dim|mamba_d_state|state_size|ssm_state_size|index_topk", 8),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"n_groups|mamba_n_groups|mamba_num_groups|mamba_expand", 2),
    (r".*(num_)?(key_value|kv)_heads|num_query_groups|multi_query_group_num", 2),
    (r"(.*_)?(num_)?(attention_)?heads|n_heads?|index_n_heads|n_head_kv", 4),
    (r"(.*_)?n_layers?|(.*_)?layers|(.*_)?num_layers|(.*_)?depth|num_blocks|num_.*_layers", 2),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|mlp_dim|d_inner|ffn_hidden_size|linear_units)", 64),
    (r"(.*_)?(feed_forward_dim|mlp_hidden_size|dim_feedforward)", 64),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_moe_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts", 2),
    (r"n_group|topk_group|first_k_dense_replace|moe_layer_start_index", 1),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|emb_dim|projection_dim)", 32),
    (r"(.*_)?(word_embed_proj_dim|encoder_dim|decoder_dim|attention_dim|embedding_dim|model_dim)|width", 32),
    (r"image_size|img_size|input_size|pretrain_image_size|resolution", 32),
    (r"patch_size|sliding_window|sliding_window_size|local_attention|attention_chunk_size", 8),
    (r"chunk_size|mamba_chunk_size|num_queries|num_query_tokens|num_conv_pos_embeddings", 8),
    (r"window_size|num_conv_pos_embedding_groups", 4),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|context_length", 64),
    (r"max_source_positions|max_target_positions|max_length", 64),
    (r"num_mel_bins|input_feat_per_channel|n_mels", 16),
    (r"codebook_size|num_embeddings|num_groups", 32),
]
# Fields of numbers that only count something: they stay small where the widths of the class are taken.
COUNTS = re.compile(r".*(layer|vocab|expert|depth|image_size|max_pos|block).*")
# Lists by layer, which the config's class makes anew for fewer layers.
PER_LAYER = re.compile(r".*layer_types|layers_block_type|indexer_types|no_rope_layers|.*layer_rope_theta")
# Numbers that would make special tokens of the batch's.
TOKEN_ID = re.compile(r".*token_(id|index)|.*_token_ids?")
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Model type → fields that the rules do not make.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    # Their class has no default.
    "autoformer": {"prediction_length": 8},
    "informer": {"prediction_length": 8},
    "time_series_transformer": {"prediction_length": 8},
    # Channels are multiples of it.
    "bit": {"num_groups": 4},
    "xmod": {"default_language": "en_XX"},
}
# How a small config is made, in the order in which it is tried.
ALL, ALL_HEADS, NO_LISTS, COUNTS_ONLY = range(4)


# Small models of families that are not in `FACTORIES`.
TORCHVISION = ("squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "mobilenet_v2", "regnet_y_400mf")
TIMM = (
    "test_byobnet", "test_coatnet", "test_convnext", "test_convnext2", "test_convnext3", "test_efficientnet",
    "test_efficientnet_evos", "test_efficientnet_gn", "test_efficientnet_ln", "test_mambaout", "test_maxvit",
    "test_nfnet", "test_resnet", "test_vit", "test_vit2", "test_vit3", "test_vit4", "test_vit_relpos", "starnet_s050",
    "mobilevit_xxs", "dla46_c", "edgenext_xx_small", "mobilenetv3_small_050", "tinynet_e", "repghostnet_050",
    "efficientvit_m0", "ghostnet_050", "regnetx_002", "cspnext_tiny", "iformer_t", "xcit_nano_12_p8_224",
    "cs3darknet_focus_s", "efficientvit_b0", "swiftformer_xs", "efficientformerv2_s0", "pvt_v2_b0", "fasternet_t0",
    "fastvit_t8", "lcnetv2_small", "inception_next_atto", "rexnet_100", "pit_ti_224",
)  # fmt: skip


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


def small_size(name: str, value: int, level: int) -> int:
    if level == COUNTS_ONLY and not COUNTS.fullmatch(name):
        return value
    for pattern, size in SIZES:
        if not re.fullmatch(pattern, name):
            continue
        # Some classes take no fewer heads of keys than of queries.
        if (level >= ALL_HEADS and "kv" in name) or ("key_value" in name and level >= ALL_HEADS):
            return min(value, 4)
        if level >= NO_LISTS and "head_dim" in name:
            return value
        return min(value, size)
    return value


def small_list(name: str, values: Sequence[Any], level: int) -> list[Any]:
    """A list of depths, widths or sizes, made small element by element."""
    small: list[Any] = []
    for index, value in enumerate(values):
        if isinstance(value, list | tuple):
            small.append(small_list(name, value, level))
        elif type(value) is not int:
            small.append(value)
        elif re.search(r"depth|num_blocks|layers|blocks_per_stage", name):
            small.append(min(value, 2))
        elif "heads" in name and level == ALL:
            # As widths double from stage to stage.
            small.append(2 * 2**index)
        elif re.search(r"size|dim|channel", name) and level <= ALL_HEADS:
            side = small_size(name, value, level)
            is_wide = side == value and value >= 32 and value % 8 == 0
            small.append(value // 4 if is_wide else side)
        else:
            small.append(value)
    return small


def small_fields(config: Any, level: int) -> dict[str, Any]:
    """The fields of a small config that differ from those of `config`, which has its class's defaults."""
    fields: dict[str, Any] = {}
    n_special = len(SPECIAL_TOKENS)
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("transformers_version", "id2label", "label2id", "dtype"):
            continue
        small: Any = value
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            # Its class makes it anew from these.
            small = {"model_type": value.model_type, **small_fields(value, level)}
        elif TOKEN_ID.fullmatch(name) and type(value) is int:
            n_special += name not in SPECIAL_TOKENS
            small = SPECIAL_TOKENS.get(name, n_special)
        elif PER_LAYER.fullmatch(name):
            continue
        elif isinstance(value, dict) and "mrope_section" in value and level < COUNTS_ONLY:
            # Half of a head's dims, rotated by time, height and width.
            small = {**value, "mrope_section": [2, 1, 1] if level == ALL else [1, 1, 0]}
        elif type(value) is int:
            small = small_size(name, value, level)
        elif isinstance(value, list | tuple):
            small = type(value)(small_list(name, value, level))
        if small != value:
            fields[name] = small
    fields.update(EXCEPTIONS.get(config.model_type, {}))
    return fields


def make_config(transformers: Any, model_type: str, level: int) -> Any:
    kind = transformers.CONFIG_MAPPING[model_type]
    config = kind(**small_fields(kind(), level))
    config.architectures = None
    return config


def hugging_face(model_type: str) -> NamedModel:
    """The smallest model of this kind that can be made and takes a batch.

    Raises:
        ConfigError: none can.
    """
    import transformers

    problems = []
    for level in (ALL, ALL_HEADS, NO_LISTS, COUNTS_ONLY):
        try:
            config = make_config(transformers, model_type, level)
            model = of_config(transformers, config)
            with torch.device("meta"):
                n_parameters = sum(parameter.numel() for parameter in model.model_fn().parameters())
            if n_parameters > MOST_PARAMETERS:
                raise ConfigError(f"{n_parameters:,} parameters, and at most {MOST_PARAMETERS:,} are tried")
            # Chosen once: the choice runs forwards.
            return replace(model, batches=partial(_batches, default_batch(model, SAMPLES, PART)))
        # Whatever a library raises.
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            problems.append(text.removesuffix(": give --batch MODULE:NAME"))
    raise ConfigError(problems[0])


def _batches(batch_fn: Callable[[], Any], samples: int) -> tuple[Callable[[], Any], ...]:
    return (batch_fn,)


def run(name: str, verbose: bool) -> dict[str, Any]:
    """Find a plan for a model, and prove it."""
    row: dict[str, Any] = {"name": name}
    library, _, rest = name.partition(":")
    begin = time.monotonic()
    try:
        if name in FACTORIES:
            model = NamedModel(FACTORIES[name])
        elif library == "hf":
            model = hugging_face(rest)
        else:
            model = load_model(name, import_torchvision)
        batch_fn = default_batch(model, SAMPLES, PART)
    except Exception as error:
        if not is_for_user(error):
            raise
        return {**row, "stage": "model", "problem": str(error)}
    full = model.model_fn()
    row["class"] = type(full).__name__
    row["parameters"] = sum(parameter.numel() for parameter in full.parameters())
    batch = batch_fn()
    row["batch"] = {k: list(v.shape) for k, v in batch.items()} if isinstance(batch, dict) else list(batch.shape)
    row["made_s"] = time.monotonic() - begin
    dp, tp = (
        make_subject(model.model_fn, lambda model, mesh: None, batch_fn, model.step_fn, mesh) for mesh in ("dp2", "tp2")
    )
    try:
        proposal = find_plan([dp, tp], name, PART)
        parallelize_fn = load_code(proposal.code, None)
    except Exception as error:
        if not is_for_user(error):
            raise
        return {**row, "stage": "plan", "problem": str(error)}
    if verbose:
        print(proposal, proposal.code, sep="\n\n")
    plan = proposal.tensor
    assert plan is not None
    alike = groups_by_pattern(plan.groups)
    row["found_s"] = time.monotonic() - begin
    row["units"] = len(proposal.units.blocks)
    row["groups"] = [group_name(groups[0]) for groups in alike]
    row["n_groups"] = len(plan.groups)
    row["attentions"] = [attention_reason(alike) for alike in attentions_by_pattern(plan.attentions)]
    row["n_attentions"] = len(plan.attentions)
    row["refused"] = [f"{group_name(groups[0])}: {groups[0].refused}" for groups in groups_by_pattern(plan.refused)]
    row["replicated"] = plan.replicated
    meshes = {"fsdp": dp}
    if plan.shards:
        meshes["tensor"] = tp
    for key, subject in meshes.items():
        try:
            verdict = verify_subject(replace(subject, parallelize_fn=parallelize_fn), PART)
            row["notes"] = list(verdict.notes)
        except Exception as error:
            if not is_for_user(error):
                raise
            row[key] = f"not comparable: {error}"
            continue
        row[key] = outcome(verdict)
        if verbose:
            print(verdict, verdict.details)
    return row


def outcome(verdict: Verdict) -> str:
    """The verdict's result, and the reason if it is not "same"."""
    if verdict.same:
        return "same"
    why = verdict.reason
    if verdict.findings:
        why = str(verdict.findings[0])
    return f"{verdict.result}: {textwrap.shorten(why, 600)}"


def in_process(name: str, limit: float, verbose: bool) -> dict[str, Any]:
    """Run one model in a process of its own. It cannot hang or crash this one."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.close(read)
        try:
            row = run(name, verbose)
        except BaseException as error:
            row = {"name": name, "stage": "crash", "problem": repr(error), "trace": traceback.format_exc()[-3000:]}
        with os.fdopen(write, "w") as file:
            json.dump(row, file)
        os._exit(0)
    os.close(write)
    text = ""
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(pid, signal.SIGKILL))
    signal.alarm(int(limit))
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    signal.alarm(0)
    row = json.loads(text) if text else {"name": name, "stage": "time", "problem": f"not done in {limit:g} s"}
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    row["cpu_s"] = round(end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime, 1)
    row["s"] = round(time.monotonic() - began, 1)
    return row


def import_libraries() -> None:
    """Import here, once, what each model's process would import."""
    import_torchvision("models")
    import transformers
    from transformers import LlamaForCausalLM, T5ForConditionalGeneration, ViTForImageClassification  # noqa: F401

    import_dynamo()
    transformers.logging.set_verbosity_error()


def names_of_all() -> list[str]:
    """Every kind of model in transformers, and small models of the two libraries of images."""
    import transformers

    names = [f"hf:{name}" for name in transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES]
    names += [f"torchvision.models:{name}" for name in TORCHVISION]
    names += [f"timm.models:{name}" for name in TIMM]
    return names + list(FACTORIES)


def reason(row: dict[str, Any]) -> str:
    """Why a plan is not proven, or what of the model is not sharded over tp and why; empty if nothing is to say."""
    for mesh, key in (("dp2", "fsdp"), ("tp2", "tensor")):
        verdict = row.get(key) or "same"
        if verdict != "same":
            return textwrap.shorten(f"{mesh}: {verdict}", 220, placeholder=" …")
    # Such as experts: matrices that are no module of their own.
    own = [f"{pattern}: {why}" for pattern, why in row["replicated"].items() if why.startswith("a parameter")]
    refused = row["refused"] + own
    shards = row["groups"] or row["attentions"]
    if not refused and not shards:
        refused = [f"{pattern}: {why}" for pattern, why in row["replicated"].items()]
    if not refused and not shards:
        refused = ["it has no nn.Linear, and no convolution in which each output channel takes all input channels"]
    return "; ".join(textwrap.shorten(text, 150, placeholder=" …") for text in refused[:2])


def not_reached(row: dict[str, Any]) -> int:
    """The number of parameters that get no gradient from the batch, by the verdicts' notes."""
    for note in row.get("notes", ()):
        match = re.match(r"\S+(?: and (\d+) more)? get no gradient", note)
        if match:
            return 1 + int(match[1] or 0)
    return 0


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    names = [*row["groups"], *(text.partition(":")[0] for text in row["attentions"])]
    # Without the path of the module around.
    short = dict.fromkeys(
        name.rpartition(": ")[2].removesuffix(" times)").rpartition(" (")[0] or name for name in names
    )
    groups = textwrap.shorten("; ".join(name.rpartition(": ")[2] for name in short), 160, placeholder=" …")
    proven = {"same": "yes", None: "–"}
    unreached = not_reached(row)
    return [
        row["name"].removeprefix("hf:"),
        proven.get(row["fsdp"], "**no**"),
        groups or "none",
        proven.get(row.get("tensor"), "**no**"),
        f"{unreached} of its parameters" if unreached else "",
        f"{row['cpu_s']:.0f}",
        reason(row),
    ]


def as_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        escaped = [cell.replace("|", "\\|").replace("<", "&lt;").replace("*.", "\\*.") for cell in row]
        lines.append("| " + " | ".join(escaped) + " |")
    return lines


def summary(title: str, rows: Sequence[dict[str, Any]], n_unmade: int, n_left: int) -> str:
    """What came of the models of one library, in a sentence or two."""
    n_fsdp = sum(row["fsdp"] == "same" for row in rows)
    n_planned = sum("tensor" in row for row in rows)
    n_tensor = sum(row.get("tensor") == "same" for row in rows)
    minutes = sum(row["cpu_s"] for row in rows) / 60
    slowest = max(rows, key=lambda row: row["cpu_s"])
    text = (
        f"{title}: {len(rows)} models. FSDP is proven for {n_fsdp} of them. Something is sharded over tp in "
        f"{n_planned}, and proven for {n_tensor}. {minutes:.0f} minutes of one core; the slowest is "
        f"{slowest['name']} with {slowest['cpu_s']:.0f} s."
    )
    if n_unmade:
        text += f" Of {n_unmade} more the rules make no small model, or no batch for it."
    if n_left:
        text += f" Not run: {n_left}."
    return text


def write_tables(page: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the results into a page, between its markers."""
    proven = [row for row in rows if "fsdp" in row]
    unmade = [row for row in rows if row.get("stage") == "model"]
    others = [row for row in rows if "fsdp" not in row and row.get("stage") != "model"]
    header = ("model", "FSDP on dp2", "sharded over tp", "on tp2", "not reached", "s", "why not, or not more")
    names = {row["name"] for row in rows}
    left = [name for name in names_of_all() if name not in names]
    lines: list[str] = []
    for title, prefixes in (("transformers", ("hf:",)), ("timm, torchvision and PyTorch", ("timm", "torch"))):
        own = sorted((row for row in proven if row["name"].startswith(prefixes)), key=lambda row: row["name"])
        if not own:
            continue
        n_unmade = sum(row["name"].startswith(prefixes) for row in unmade)
        n_left = sum(name.startswith(prefixes) for name in left)
        lines += ["", f"### {title}", "", summary(title, own, n_unmade, n_left), ""]
        lines += as_table(header, [cells(row) for row in own])
    if others:
        lines += ["", "### No plan", ""]
        problems = [[row["name"].removeprefix("hf:"), textwrap.shorten(row["problem"], 200)] for row in others]
        lines += as_table(("model", "why"), problems)
    lines += ["", "### No small model", ""]
    made = sorted(unmade, key=lambda row: row["name"])
    problems = [
        [row["name"].removeprefix("hf:"), textwrap.shorten(row["problem"], 160, placeholder=" …")] for row in made
    ]
    lines += as_table(("model", "why"), problems)
    libraries = ", ".join(f"{name} {version(name)}" for name in ("transformers", "timm", "torchvision"))
    versions = f"PyTorch {torch.__version__}, {libraries}, Python {platform.python_version()}"
    text = page.read_text(encoding="utf-8")
    inner = "\n".join([BEGIN, *lines, "", f"Made with {versions}.", END])
    page.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: inner, text, flags=re.DOTALL))


def read_rows(file: Path) -> dict[str, dict[str, Any]]:
    """The results so far, by name. Of a model that was run again, the last one."""
    rows = {}
    if file.exists():
        for line in file.read_text().splitlines():
            row = json.loads(line)
            rows[row["name"]] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", type=Path, required=True, help="the results, a line for each model; what it has is not run again"
    )
    parser.add_argument("--only", help="names, with commas")
    parser.add_argument("--sample", type=int, help="this many models at random")
    parser.add_argument("--again", action="store_true", help="run models again that have a result")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that one model may take")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument(
        "--table", type=Path, help="write the results into this page, between its markers, and run nothing"
    )
    args = parser.parse_args()
    if args.table:
        write_tables(args.table, list(read_rows(args.json).values()))
        return
    warnings.simplefilter("ignore")
    import_libraries()
    names = names_of_all()
    if args.only:
        known = set(names)
        names = [name if name in known else f"hf:{name}" for name in args.only.split(",")]
    elif args.sample:
        names = random.Random(args.sample).sample(names, args.sample)
    done = read_rows(args.json)
    for name in names:
        if name in done and not args.again:
            continue
        row = in_process(name, args.limit, args.verbose)
        with args.json.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if "stage" in row:
            text = f"{row['stage']}: {row['problem']}"
        else:
            cuts = [*row["groups"], *row["attentions"]]
            text = f"{row['fsdp']} | {row.get('tensor')} | {cuts} | {row['refused']}"
        print(f"{name}: {row['cpu_s']} s | {text[:700]}", flush=True)


if __name__ == "__main__":
    main()
