"""Random runs: a problem (model, data, batch, steps), and layouts that mostly fit it.

A problem is drawn with sizes that many layouts divide, and has several layouts drawn for it, so that its run on one
rank is made once. A part of the cases is then spoilt by a value that comes from anywhere.
"""

from __future__ import annotations

import random
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

from fuzz.flags import LAYOUT, PROGRAMS, Value, arguments, draw_layout, flags_of, names

LAYOUTS_A_PROBLEM = 4
SPOILT = 0.25
RESUMED = 0.15
# How often each program is drawn, of a hundred.
WEIGHTS = {"lm": 36, "vit": 24, "cnn": 16, "4d": 14, "fsdp_tp": 10}

# What a flag that is neither a choice nor a switch may be spoilt by. Of one that is not here, `draw` complains.
ANYTHING: dict[str, tuple[Value, ...]] = {
    "name": ("a", "b c", "a/b"),
    "flush_every": ("1", "3", "0"),
    "timeout": ("60", "0", "inf", "1e6"),
    "batch_size": ("1", "3", "5", "0", "4000"),
    "global_batch_size": ("1", "7", "10", "0", "100000"),
    "seed": ("3", "-1", str(2**63 - 1), str(2**63)),
    "max_iters": ("1", "2", "0"),
    "epochs": ("1", "0"),
    "lr": ("0", "1e-4", "-1", "nan"),
    "base_batch_size": ("1", "8", "0"),
    "log_every": ("2", "5", "0"),
    "checkpoint_every": ("1", "2", "0"),
    "keep": ("1", "3", "0"),
    "max_norm": ("0", "0.01", "1e9", "-1", "inf"),
    "warmup": ("0", "3", "100", "-1"),
    "eval_every": ("0", "1", "2", "-1"),
    "eval_batches": ("1", "3", "0", "1000"),
    "loss_chunks": ("1", "2", "3", "4", "0", "999"),
    "prompt": ("the", ""),
    "seq_length": ("1", "7", "12", "31", "0"),
    "n_layers": ("0", "1", "3", "5"),
    "dim": ("20", "48", "0", "7"),
    "n_heads": ("1", "3", "5", "0"),
    "n_kv_heads": ("1", "2", "3", "0"),
    "ffn_dim": ("1", "9", "30", "0"),
    "vocab_size": ("257", "300", "5", "0"),
    "decay": ("0", "2", "100", "-1"),
    "weight_decay": ("0", "0.1", "-1", "inf"),
    "betas": (("0.9", "0.99"), ("0", "0"), ("0.9", "1"), ("0.9",)),
    "min_lr": ("0", "1e-5", "-1", "1", "nan"),
    "dropout": ("0", "0.1", "0.5", "1"),
    "attention_dropout": ("0", "0.3", "-1"),
    "text_weights": (("0.7", "0.3"), ("3", "1"), ("1",), ("1", "0")),
    "tokenizer": ("bytes", "chars", "gone.json"),
    "init_from": ("gone", "."),
    "n_experts": ("1", "2", "3", "4", "-1"),
    "top_k": ("1", "2", "5", "0"),
    "expert_dim": ("1", "5", "0"),
    "balance_rate": ("0", "0.2", "-1", "inf"),
    "lora": ("0", "1", "3", "-1"),
    "lora_alpha": ("1", "16", "0", "nan"),
    "lora_targets": ("q_proj", ("k_proj", "up_proj"), "all-linear", "wq"),
    "dp_replicate": ("1", "2", "3", "-1"),
    "pp": ("1", "2", "3", "4", "0"),
    "dp_shard": ("-1", "1", "2", "3", "0"),
    "ep": ("1", "2", "3", "4", "0"),
    "cp": ("1", "2", "3", "0"),
    "ulysses": ("1", "2", "3", "0"),
    "tpsize": ("1", "2", "3", "4", "0"),
    "stages_per_rank": ("1", "2", "3", "0"),
    "microbatches": ("1", "2", "3", "5", "0"),
    "workers": ("0", "1", "2", "-1"),
    "gamma": ("0.5", "1", "0", "1.5"),
    "image_size": ("5", "9", "16", "0"),
    "patch_size": ("3", "5", "1", "0"),
    "window": ("1", "2", "3", "0"),
    "channels": ("1", "3", "2", "0"),
    "fingerprints": ("1", "2", "0", "x"),
    "exact": ("1", "2", "4", "3", "x"),
    "profile_steps": (("0", "1"), ("1", "2"), ("2", "1"), ("x", "1")),
    "classes": ("2", "10", "3", "0"),
}
# Paths, which the fuzzer sets itself; presets, which problems draw; a model that is the only one.
GIVEN = names("preset outdir data_dir text model resume")
# Machines, network, minutes.
NOT_SPOILT = names("device plots compile dataset model preset tracker profile")
STEERED = NOT_SPOILT | names(
    "dtype optimizer summary parallel schedule cp_style activation_checkpointing attention dropout "
    "decayed offload scale_lr overwrite checkpoint_mode pack document_mask token_dtype bias "
    "tie_word_embeddings"
)  # choices that the functions below make; others are drawn as they come


class UnknownFlag(Exception):
    """A flag that the fuzzer has no values for."""


@dataclass(frozen=True)
class Case:
    """A run: ranks, and flags.

    Attributes:
        key: what it is drawn from, ``seed/number``. spoilt: flags whose value is anything.
        before: the run that this one goes on from, on another layout. ends_at: the step before which a run ends, once
            its checkpoint is complete; None: at its end.
    """

    key: str
    program: str
    ranks: int
    flags: dict[str, Value]
    spoilt: tuple[str, ...] = ()
    data: Path = field(default=Path("data"), compare=False)
    before: Case | None = None
    ends_at: int | None = None

    def command(self) -> str:
        """The line that runs it."""
        argv = [*arguments(self.program, self.flags), *(["--resume", "auto"] if self.before else [])]
        line = f"python3 -m {PROGRAMS[self.program].__name__} {shlex.join(argv)}"
        if self.ranks == 1:
            return line
        return f"launch -n {self.ranks} --device cpu {line}"

    @property
    def saved(self) -> int:
        """The step of the last checkpoint of a run that ends in the middle."""
        assert self.ends_at is not None
        every = int(str(self.flags["checkpoint_every"]))
        return self.ends_at // every * every

    def commands(self) -> str:
        """`command`, after the run before it."""
        if self.before is None:
            return self.command()
        return f"{self.before.command()}  # ends before step {self.before.ends_at}\n    {self.command()}"

    def without(self, *names: str) -> Case:
        flags = {name: value for name, value in self.flags.items() if name not in names}
        return replace(self, flags=flags, before=self.before and self.before.without(*names))


def draw(seed: int, index: int, data: Path) -> Case:
    """Case `number` of a seed; the same every time. data: the folder of `fuzz.data.make`.

    Raises:
        UnknownFlag: a program has a flag that is neither a choice nor in the tables above.
    """
    problems = random.Random(f"{seed}/{index // LAYOUTS_A_PROBLEM}")
    program = problems.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    check_known(program)
    flags = {"lm": _lm, "vit": _vit, "cnn": _cnn, "4d": _4d, "fsdp_tp": _fsdp_tp}[program](problems, data)
    # Choices that are nobody's in particular.
    for name, flag in flags_of(program).items():
        if flag.choices and name not in STEERED | LAYOUT | GIVEN | flags.keys() and problems.random() < 0.3:
            flags[name] = problems.choice(flag.choices)
    rng = random.Random(f"{seed}/{index}/layout")
    ranks, layout = draw_layout(rng, program, flags)
    problem = flags = {"device": "cpu", **flags}
    flags = {**flags, **layout}
    if "workers" in flags_of(program) and rng.random() < 0.1:
        flags["workers"] = rng.choice(("0", "1", "2"))
    for name in ("flush_every", "log_every"):
        if name in flags_of(program) and rng.random() < 0.1:
            flags[name] = rng.choice(ANYTHING[name][:2])
    spoilt = []
    if rng.random() < SPOILT:
        for _ in range(rng.choice((1, 1, 2))):
            name, value = _anything(rng, program)
            flags[name] = value
            spoilt.append(name)
    profiled = random.Random(f"{seed}/{index}/profile")
    if "profile" in flags_of(program) and not spoilt and profiled.random() < 0.1:
        flags |= {"profile": True, "profile_steps": profiled.choice(ANYTHING["profile_steps"][:2])}
    if "fingerprints" in flags_of(program) and not spoilt and profiled.random() < 0.1:
        flags["fingerprints"] = profiled.choice(ANYTHING["fingerprints"][:2])
    case = Case(f"{seed}/{index}", program, ranks, flags, tuple(spoilt), data)
    resumed = random.Random(f"{seed}/{index}/resume")
    if spoilt or resumed.random() > RESUMED:
        return case
    return _resumed(resumed, case, problem)


def _resumed(rng: random.Random, case: Case, problem: dict[str, Value]) -> Case:
    """The case, where it can, as the end of a run that began on another layout."""
    flags = case.flags
    # On any layout.
    alike = "global_batch_size" in flags and "compile" not in flags
    if "resume" not in flags_of(case.program) or not alike or flags.keys() & {"profile", "summary", "epochs"}:
        return case
    every = rng.choice(("1", "2"))
    saves = {name: flags[name] for name in ("log_every",) if name in flags}
    saves |= {"checkpoint_every": every, "checkpoint_mode": rng.choice(("async", "blocking"))}
    ranks, layout = draw_layout(rng, case.program, problem)
    layout.pop("compile", None)
    ends_at = rng.randint(int(every), int(str(flags["max_iters"])) - 1)
    before = replace(case, ranks=ranks, flags={**problem, **layout, **saves}, ends_at=ends_at)
    return replace(case, flags={**flags, **saves}, before=before)


def check_known(program: str) -> None:
    """Raises UnknownFlag where a flag of `program` would never be drawn."""
    drawn = GIVEN | ANYTHING.keys()
    unknown = [name for name, flag in flags_of(program).items() if not flag.choices and name not in drawn]
    if unknown:
        where = "add values to ANYTHING in tests/fuzz/draw.py, and to what draws problems or layouts"
        raise UnknownFlag(f"{program}: {', '.join(unknown)}: {where}")


def _anything(rng: random.Random, program: str) -> tuple[str, Value]:
    known = flags_of(program)
    name = rng.choice([name for name in known if name not in GIVEN | NOT_SPOILT])
    return name, rng.choice(known[name].choices or ANYTHING[name])


# --- problems ---------------------------------------------------------------------------------------------------------


def _common(rng: random.Random, program: str) -> dict[str, Value]:
    """Flags of every run: few steps, no pictures."""
    known = flags_of(program)
    optimizer = rng.choice(("adamw", *known["optimizer"].choices))
    # A CPU's convolutions in half precision take seconds.
    half = 1 if program == "cnn" else 4
    dtypes = {"fp64": 30, "fp32": 8, "bf16": half, "fp16": 2 * half, "auto": 1}
    flags: dict[str, Value] = {
        "plots": "off",
        "max_iters": rng.choice(("3", "3", "4", "5")),
        "optimizer": optimizer,
        "lr": rng.choice(("0.1", "0.3") if optimizer == "sgd" else ("1e-3", "1e-2")),
        "dtype": rng.choices(list(dtypes), list(dtypes.values()))[0],
        "seed": rng.choice(("0", "1", "2", "7", "-5", "123456789012")),
    }
    if "decayed" in known and optimizer != "sgd" and rng.random() < 0.3:
        flags["decayed"] = "matrices"
    if "scale_lr" in known and rng.random() < 0.15:
        flags |= {"scale_lr": rng.choice(("sqrt", "linear")), "base_batch_size": rng.choice(("4", "8", "16"))}
    if flags["dtype"] not in known["dtype"].choices:
        flags["dtype"] = "fp64"
    if flags["dtype"] == "fp16" and rng.random() < 0.5:
        flags.pop("decayed", None)
        # Gradients that overflow: steps are skipped.
        flags |= {"optimizer": "sgd", "lr": "10"}
    batch = rng.choice((8, 8, 12, 12, 16, 24, 10, 14))
    if rng.random() < 0.95:
        flags["global_batch_size"] = str(batch)
    if rng.random() < 0.1:
        flags["epochs"] = "1"
    if rng.random() < 0.02:
        flags["summary"] = "on"
    if "checkpoint_every" in known and rng.random() < 0.1:
        flags["checkpoint_every"] = rng.choice(("1", "2"))
        if rng.random() < 0.5:
            flags["checkpoint_mode"] = rng.choice(("async", "blocking"))
    for name, values in (
        ("max_norm", ("0", "0.05", "0.5", "1.0")),
        ("warmup", ("0", "1", "2", "10")),
        ("eval_every", ("0", "0", "1", "2", "3")),
        ("eval_batches", ("1", "2")),
    ):
        if name in known:
            flags[name] = rng.choice(values)
    return flags


def _transformer(rng: random.Random, data: Path) -> dict[str, Value]:
    heads = rng.choice((2, 4, 4, 4, 6, 8, 8, 12))
    flags: dict[str, Value] = {
        "preset": rng.choice(("debug", "debug", "small", "reference", "llama2-7b", "llama-70b")),
        "n_layers": str(rng.choice((1, 2, 2, 4, 6))),
        "dim": str(heads * rng.choice((2, 4, 4, 6))),
        "n_heads": str(heads),
        "n_kv_heads": str(rng.choice([n for n in range(1, heads + 1) if heads % n == 0])),
        "ffn_dim": str(rng.choice((16, 24, 24, 48, 30))),
        "seq_length": str(rng.choice((8, 16, 16, 24, 48))),
        "dataset": rng.choice(("text", "text", "random")),
    }
    if flags["dataset"] == "random":
        flags["vocab_size"] = str(rng.choice((16, 24, 37, 64)))
    else:
        flags["vocab_size"] = str(rng.choice((256, 256, 256, 259, 264)))
        if rng.random() < 0.6:
            one = str(data / "words.txt")
            other = str(data / "more.txt")
            flags["text"] = (one,) if rng.random() < 0.7 else (one, other)
            if rng.random() < 0.2:
                flags["tokenizer"] = rng.choice(("bytes", "chars"))
    return flags


def _lm(rng: random.Random, data: Path) -> dict[str, Value]:
    flags = _common(rng, "lm") | _transformer(rng, data)
    # The characters of two texts are two tokenizers.
    if len(flags.get("text", ())) == 2 and flags.get("tokenizer") != "chars":
        flags["text_weights"] = ("0.7", "0.3")
    if flags["dataset"] == "text" and rng.random() < 0.25:
        flags.pop("tokenizer", None)
        flags.pop("text_weights", None)
        one = str(data / "words-documents")
        other = str(data / "more-documents")
        flags["text"] = (rng.choice((one, other)),)
        flags |= rng.choice(({"pack": "on"}, {"pack": "on", "document_mask": "on"}))
    # Of weights on disk, flags change no shape.
    if flags["dataset"] == "text" and rng.random() < 0.12:
        sizes = {"n_layers": "4", "dim": "32", "n_heads": "4", "n_kv_heads": "4", "ffn_dim": "48", "vocab_size": "264"}
        flags.pop("preset")
        flags |= {**sizes, "init_from": str(data / "llama")}
        return flags | _lora(flags)
    if rng.random() < 0.35:
        experts = rng.choice((1, 2, 3, 4, 4, 6, 8))
        flags |= {"n_experts": str(experts), "top_k": str(rng.randint(1, min(experts, 3)))}
        flags["balance_rate"] = rng.choice(("0", "0.01", "0.1"))
        if rng.random() < 0.5:
            flags["expert_dim"] = str(rng.choice((8, 12, 20)))
    elif (own := random.Random(str(flags))).random() < 0.25:
        flags = {name: value for name, value in flags.items() if name not in ("preset", "n_kv_heads", "ffn_dim")}
        flags |= {"model": "gpt", "dropout": own.choice(("0", "0.1", "0.3"))}
        flags |= own.choice(({}, {"attention_dropout": "0"}, {"attention_dropout": "0", "bias": "on"}))
        # A GPT's output matrix is always the embedding's.
        return flags
    if random.Random(f"tie {flags}").random() < 0.3:
        flags["tie_word_embeddings"] = "on"
    if "n_experts" not in flags:
        flags |= _lora(flags)
    return flags


def _lora(flags: dict[str, Value]) -> dict[str, Value]:
    """Flags of LoRA for one problem of eight, or none."""
    own = random.Random(f"{flags} lora")
    if own.random() > 0.125 or flags.get("optimizer") == "muon":
        return {}
    targets = own.choice((("q_proj", "v_proj"), ("o_proj", "down_proj"), ("all-linear",)))
    return {"lora": own.choice(("1", "2", "5")), "lora_alpha": own.choice(("1", "16")), "lora_targets": targets}


def _fsdp_tp(rng: random.Random, data: Path) -> dict[str, Value]:
    return _common(rng, "fsdp_tp") | _plain_text(_transformer(rng, data))


def _plain_text(flags: dict[str, Value]) -> dict[str, Value]:
    """An example has text alone, byte by byte."""
    if flags.pop("dataset") == "random":
        flags["vocab_size"] = "256"
    flags.pop("tokenizer", None)
    return flags


def _vit(rng: random.Random, data: Path) -> dict[str, Value]:
    flags = _common(rng, "vit")
    heads = rng.choice((1, 2, 4, 4, 6, 8))
    patch = rng.choice((2, 3, 4))
    flags |= {
        "preset": rng.choice(("auto", "debug", "debug", "tiny", "large")),
        "patch_size": str(patch),
        "image_size": str(patch * rng.randint(2, 4)),
        "channels": rng.choice(("1", "1", "3")),
        "dim": str(heads * rng.choice((2, 3, 4))),
        "n_layers": str(rng.choice((1, 2, 3, 4, 6))),
        "n_heads": str(heads),
        "attention": rng.choice(("sdpa", "sdpa", "native")),
    }
    _images(rng, data, flags, ("mnist", "fashion_mnist", "cifar10", "digits", "digits", "fake", "folder"))
    if flags["dataset"] == "fake" and rng.random() < 0.4:
        flags["classes"] = rng.choice(("2", "5", "10"))
    flags["model"] = rng.choice(("vit", "vit", "swin"))
    if flags["model"] == "swin":
        # Two windows of two places, or three; a head has a multiple of four elements.
        flags |= {"preset": "debug", "window": "2", "image_size": str(2 * patch * rng.randint(2, 3))}
        flags |= {"dim": str(4 * heads), "attention": "sdpa"}
    return flags


def _cnn(rng: random.Random, data: Path) -> dict[str, Value]:
    flags = _common(rng, "cnn")
    flags["dropout"] = rng.choice(("on", "off"))
    # Files of 224 × 224 pixels would make it a net of 99 million parameters; 2,000 test images of fake take seconds.
    _images(rng, data, flags, ("mnist",) * 9 + ("fashion_mnist",) * 6 + ("cifar10", "digits") * 3 + ("fake",))
    if rng.random() < 0.3:
        flags["gamma"] = rng.choice(("0.5", "1"))
    return flags


def _images(rng: random.Random, data: Path, flags: dict[str, Value], names: tuple[str, ...]) -> None:
    """Which images: of what lies on disk the folder, so that nothing is ever downloaded."""
    name = rng.choice(names)
    flags["dataset"] = name
    if name in ("mnist", "fashion_mnist"):
        flags["data_dir"] = str(data / name)
    elif name == "cifar10":
        flags["data_dir"] = str(data)
    elif name == "folder":
        flags["data_dir"] = str(data / rng.choice(("split", "flat")))


def _4d(rng: random.Random, data: Path) -> dict[str, Value]:
    return _common(rng, "4d") | {"n_layers": rng.choice(("1", "2", "4")), "seq_length": rng.choice(("8", "16", "24"))}
