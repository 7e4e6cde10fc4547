"""Every flag of the trainers `lm`, `vit` and `cnn`, in groups. No group derives from another.

A trainer's ``Config`` lists the groups that it has, with its own defaults. `mmm.run.options` has the groups `RunFlags`,
`Duration` and `CheckpointFlags`, which scripts and examples have as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn

from mmm.errors import ConfigError
from mmm.layout import Layout, ScheduleName, Techniques, check_data_parallel, check_lanes
from mmm.optim.adamw import make_optimizer
from mmm.run.options import FLAGS, check_counts, check_effect
from mmm.units import counted

# The trainers take fp16 as well, because their loops scale its loss.
DTYPES = ("auto", "fp32", "bf16", "fp16", "fp64")
# Muon is missing: it needs the plan of a language model.
OPTIMIZERS = ("adamw", "sgd")
# Flags that few need: the command line and --config FILE take them, and --help does not list them.
UNLISTED = frozenset(
    (
        # model
        "bias",
        "dropout",
        "attention_dropout",
        "tie_word_embeddings",
        "expert_dim",
        "balance_rate",
        # adapter
        "lora_alpha",
        "lora_targets",
        # text
        "token_dtype",
        "text_weights",
        "document_mask",
        # mesh
        "dp_shard",
        "reshard_after_forward",
        # optimizer
        "scale_lr",
        "base_batch_size",
        "on_nan",
        "lr_schedule",
        "min_lr",
        "decay",
        "betas",
        "weight_decay",
        "decayed",
        # evaluation
        "eval_train",
        "profile_steps",
        # checkpoint
        "keep",
        "checkpoint_mode",
        # run
        "flush_every",
        "log_all_ranks",
    )
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The language model: a preset, and what differs from it."""

    model: str | None = None
    """llama: a Llama. gpt: as GPT-2 and nanoGPT have it, with learned positions for --seq_length tokens, and presets
    gpt2, shakespeare, shakespeare-cpu of its own. qwen3: a Qwen3, with presets debug, 0.6b, 4b, 8b, and 30b-a3b, which
    has experts, as any has with --n_experts. Default: llama, or that of --init_from."""
    preset: str | None = None
    """Sizes to start from; the flags below change single ones. Default, of mmm.trainer.lm: small, of a GPT
    shakespeare-cpu, or those of --init_from."""
    n_layers: int | None = None
    """Blocks. Default, as of the flags below: the preset's."""
    dim: int | None = None
    """Width of the residual stream."""
    n_heads: int | None = None
    """Heads of attention."""
    n_kv_heads: int | None = None
    """Heads of keys and values, which groups of the others share."""
    ffn_dim: int | None = None
    """Width of the feed-forward layer. Default: the preset's, or of another --dim in proportion."""
    vocab_size: int | None = None
    """Number of different tokens. Default: those of the text's tokenizer."""
    dropout: float | None = None
    """For a GPT: the fraction of the embeddings, and of what blocks add to the residual stream, that training drops.
    Default: the preset's."""
    attention_dropout: float | None = None
    """For a GPT: the fraction of attention's weights that training drops. Default: as --dropout."""
    bias: bool = False
    """For a GPT: linear layers and norms have a bias."""
    tie_word_embeddings: bool = False
    """The output matrix is the embedding's, also where the preset has two."""
    n_experts: int = 0
    """Routed experts in each layer; 0: one feed-forward network instead."""
    top_k: int | None = None
    """Experts that each token goes through. Default: 2, or the only one."""
    expert_dim: int | None = None
    """Width of one expert. Default: that of the preset's feed-forward layer."""
    balance_rate: float | None = None
    """How far a step moves the bias of an expert that had more, or less, than the mean load; 0: never. Default: 0.01;
    runs of many thousand steps take less: 0.001."""
    init_from: Path | None = None
    """Start from these weights, instead of drawn ones: a folder of safetensors and config.json, a checkpoint
    of `mmm import`, or a run's folder. Sizes are theirs, and so is the tokenizer unless another flag says which."""
    save_model: bool = False
    """Leave one unsharded state dict, model.pt, in the run's folder; plain PyTorch loads it."""
    summary: bool = False
    """Print the model's summary and leave."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself, has no effect, or contradicts another."""
        if self.init_from is not None and self.preset is not None:
            raise ConfigError(
                f"--preset {self.preset} and --init_from {self.init_from} contradict each other: sizes are those of "
                "the weights; leave one out"
            )
        check_experts(self)

    def balance(self, softmax_router: bool = False) -> float:
        """How far a step moves the bias of an expert that had more, or less, than the mean load.

        Args:
            softmax_router: whether the scores of experts are a softmax, which has no bias.

        Raises:
            ConfigError: a rate is given for a softmax.
        """
        if self.balance_rate is not None and softmax_router:
            raise ConfigError(
                f"--balance_rate {self.balance_rate}: the experts' scores are a softmax, as those of a Qwen3-MoE and a "
                "Mixtral, which no bias balances; leave it out"
            )
        return 0.01 if self.balance_rate is None else self.balance_rate

    def sizes(self) -> dict[str, Any]:
        """The sizes that were given, by the field of a model's: those that differ from the preset."""
        # The names of the models' own fields. False is the default of `bias`, so it says nothing.
        sizes: dict[str, Any] = {
            "n_layers": self.n_layers,
            "dim": self.dim,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "ffn_dim": self.ffn_dim,
            "vocab_size": self.vocab_size,
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "bias": self.bias or None,
            "tie_word_embeddings": self.tie_word_embeddings or None,
        }
        if self.n_experts:
            sizes["n_experts"] = self.n_experts
            sizes["top_k"] = self.top_k
            sizes["expert_dim"] = self.expert_dim
        return {name: value for name, value in sizes.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """LoRA: small matrices that are trained in place of a model's own."""

    lora: int = 0
    """LoRA: freeze the model, and train two matrices of this rank next to some of its own; 0: train the model itself.
    For weights that --init_from names (docs/fine-tune.md)."""
    lora_alpha: float | None = None
    """The product of the two is multiplied by this, and divided by the rank. Default: 8, as PEFT has it."""
    lora_targets: tuple[str, ...] = ()
    """The matrices, in Hugging Face's words, or all-linear for every one of a layer. Default: q_proj v_proj, as PEFT
    has it."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself, or has no effect."""
        check_counts(0, lora=self.lora)
        targets = " ".join(self.lora_targets) or None
        why = "no matrix is adapted"
        check_effect(self.lora > 0, "--lora", why, "--lora 8", lora_alpha=self.lora_alpha, lora_targets=targets)
        if self.lora_alpha is not None and not 0 < self.lora_alpha < math.inf:
            raise ConfigError(f"--lora_alpha {self.lora_alpha}: it must be above 0, and finite")


def check_experts(model: Any) -> None:
    """Check the flags of experts.

    Args:
        model: a group of flags with `n_experts`, `top_k`, `expert_dim` and `balance_rate`.

    Raises:
        ConfigError: a number of experts, or a rate, is below 0; a flag has no effect without experts.
    """
    check_counts(0, n_experts=model.n_experts)
    rate = model.balance_rate
    if rate is not None and not 0 <= rate < math.inf:
        raise ConfigError(f"--balance_rate {rate}: it must be at least 0, and finite")
    check_effect(
        model.n_experts > 0,
        "--n_experts",
        "the experts of a preset, and of weights, keep theirs",
        "--n_experts 8",
        top_k=model.top_k,
        expert_dim=model.expert_dim,
        balance_rate=rate,
    )


@dataclass(frozen=True, kw_only=True)
class ImageModel:
    """The model of images: a preset, and what differs from it."""

    model: Literal["vit", "swin"] = "vit"
    """vit: every patch attends to every patch. swin: a field of places, each attends within its shifted windows."""
    preset: str = "auto"
    """auto: large where there is an accelerator, else debug. The flags below change single sizes."""
    image_size: int | None = None
    patch_size: int | None = None
    channels: int | None = None
    classes: int | None = None
    dim: int | None = None
    n_layers: int | None = None
    n_heads: int | None = None
    window: int | None = None
    """Side of a window of swin, in places."""
    attention: Literal["sdpa", "native"] = "sdpa"
    """sdpa: PyTorch's fused kernels. native: the math, step by step; only vit has it."""
    dropout: bool = True
    """Drop activations in training, as the MNIST net has it."""
    save_model: bool = False
    """Leave one unsharded state dict, model.pt, in the run's folder; plain PyTorch loads it."""
    summary: bool = False
    """Print the model's summary and leave."""

    def sizes(self) -> dict[str, Any]:
        """The sizes that were given, by the name of the flag: those that differ from the preset."""
        names = ("image_size", "patch_size", "channels", "classes", "dim", "n_layers", "n_heads", "window")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Text:
    """Where tokens come from, and what happens to a text's documents."""

    dataset: Literal["text", "shakespeare", "random"] = "text"
    """text: the Python standard library's source, byte by byte (or --text). shakespeare: 1.1 MB of plays, downloaded
    once per host. random: uniform tokens, to time."""
    text: tuple[Path, ...] = ()
    """What to train on instead: files of text. mmm.trainer.lm also takes files of conversations (.jsonl: messages, or
    prompt and answer; the loss is that of the answers), a folder of `mmm tokens`, nanoGPT's or llm.c's .bin, and
    Megatron's .idx and .bin."""
    text_weights: tuple[float, ...] = ()
    """For several of --text: the share that each has in the sequences, in proportion, such as 0.7 0.3. Each may then be
    a folder of tokens. Default: they are one text, one after the other."""
    tokenizer: Path | None = None
    """bytes, chars, a Hugging Face tokenizer.json or a SentencePiece .model. Default: that of a folder of `mmm tokens`,
    else bytes."""
    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Type of the tokens in a .bin without a header, such as nanoGPT's (uint16). Other files say it themselves."""
    seq_length: int = 128
    """Tokens per sample."""
    pack: bool = False
    """Fill sequences with whole documents; one that is longer than a sequence is split. For folders of `mmm tokens`,
    and Megatron's .idx and .bin."""
    document_mask: bool = False
    """With --pack: neither attention nor positions cross the ends of documents."""

    def check(self) -> None:
        """Raises ConfigError for flags that contradict each other."""
        has_bin = any(".bin" in path.name for path in self.text)
        if self.token_dtype and not has_bin:
            raise ConfigError(f"--token_dtype {self.token_dtype} is for a .bin of --text, and there is none")
        for weight in self.text_weights:
            if not 0 < weight < math.inf:
                raise ConfigError(f"--text_weights {weight}: each must be above 0, and finite")
        if self.text_weights and not 1 < len(self.text) == len(self.text_weights):
            raise ConfigError(
                f"--text_weights has {counted(len(self.text_weights), 'number')}, and --text names "
                f"{counted(len(self.text), 'file')}: give one for each of several"
            )
        if self.text and self.dataset != "text":
            raise ConfigError(f"--text and --dataset {self.dataset} contradict each other: leave one out")
        if self.dataset == "random":
            # These are for text, and random tokens have none.
            for flag in ("tokenizer", "pack", "document_mask"):
                if getattr(self, flag):
                    raise ConfigError(f"--{flag} and --dataset random contradict each other: leave one out")


@dataclass(frozen=True, kw_only=True)
class Images:
    """Where images come from."""

    dataset: Literal["mnist", "fashion_mnist", "cifar10", "digits", "fake", "folder"] = "mnist"
    """mnist, fashion_mnist, cifar10: read, or downloaded once per host. digits: comes with the package. fake: made up,
    the label follows from the image. folder: any folder of images, one subfolder a class."""
    data_dir: Path | None = None
    """Where the files are; only read. Default: a cache of its own."""
    workers: int | None = None
    """Processes that read images ahead. Default: none for images in memory, else up to 4."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself."""
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"--workers {self.workers}: it must not be negative; 0 reads in the rank itself")


@dataclass(frozen=True, kw_only=True)
class MeshFlags:
    """The sizes of the mesh's axes, how each is used, and what saves memory or time on it."""

    parallel: Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp"] = "fsdp"
    """ddp: replicas. zero1, zero2: replicas, sharded optimizer state (and gradients). fsdp, zero3: everything sharded.
    hsdp: replicas of that."""
    dp_replicate: Annotated[int, "replicas"] = 0
    """Replicas of the model, where it is sharded over the other data-parallel ranks. 0: two under hsdp, else one."""
    dp_shard: int = -1
    """Data-parallel ranks that a replica of the model is sharded over; -1: all that the other axes leave."""
    tpsize: Annotated[int, "tp"] = 1
    """Ranks along tp: over how many each matrix is sharded."""
    pp: int = 1
    """Ranks along pp: over how many the layers are split."""
    cp: int = 1
    """Ranks along cp: over how many each sequence, or with --cp_style space each field, is split."""
    ep: int = 1
    """Ranks that the experts are sharded over: a divisor of the data-parallel ranks, which are the same ranks."""
    schedule: ScheduleName | None = None
    """With pp, the order of forwards and backwards. Default: 1F1B."""
    stages_per_rank: int | None = None
    """With pp. Default: the fewest that the schedule takes, 1 or 2."""
    microbatches: Annotated[int | None, "accumulate"] = None
    """Number of micro-batches that the batch of a step is split into: less memory, the same gradients. Default: 1, with
    pp the fewest that the schedule takes."""
    cp_style: Literal["ring", "ulysses", "usp", "space"] | None = None
    """With cp. ring: keys and values go round. ulysses: attention is sharded over its heads, which cp · tp divides.
    usp: ulysses among --ulysses neighbours, a ring between these groups. space: the rows of fields are split. Default:
    ring."""
    ulysses: int | None = None
    """With --cp_style usp: a divisor of --cp that, times --tp, divides the heads. Default: the most on a host."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """The parts of a model that FSDP frees after forward, and gathers again for backward. auto: all but the last, with
    which backward begins; with pp, none. always: less memory. never: less communication."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Recompute activations in backward instead of keeping them."""
    loss_chunks: int | None = None
    """Chunks of the sequence that logits and loss are computed in: the full logits never exist. Default: 1, or as many
    as keep them small where they would have more than 1 GB on a rank."""
    offload: bool = False
    """Keep a rank's part of parameters, gradients and optimizer state in the host's memory, and update it there."""
    compile: bool = False
    """torch.compile what is known to give right gradients on this layout."""
    exact: int | None = None
    """The same bits of weights, losses and norms on any number of dp and pp ranks: the number of lanes, a power of two,
    that a step's samples are computed in, one after the other or on several ranks. Runs to compare have the same number
    (docs/exact.md)."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself."""
        if self.exact is not None:
            check_lanes(self.exact)

    def fit(self, ranks: int) -> Layout:
        """The layout for that many ranks.

        Raises:
            ConfigError: a flag has no effect on it.
            LayoutError: the sizes do not multiply to the number of ranks; the data-parallel technique does not go with
                them.
        """
        replicas = self.dp_replicate
        # 0: no flag says so.
        if replicas == 0:
            replicas = 2 if self.parallel == "hsdp" else 1
        # `dp_shard` may be -1: `fit` computes it from the number of ranks.
        layout = Layout(
            pp=self.pp,
            dp_replicate=replicas,
            dp_shard=self.dp_shard,
            cp=self.cp,
            tp=self.tpsize,
            ep=self.ep,
        ).fit(ranks)
        check_effect(
            layout.pp > 1,
            "--pp",
            "there is one stage, the model",
            "--pp 2",
            schedule=self.schedule,
            stages_per_rank=self.stages_per_rank,
        )
        check_cp_effect(layout, self.cp_style, self.ulysses)
        check_data_parallel(self.parallel, layout)
        return layout

    def techniques(self) -> Techniques:
        """The techniques that the flags ask for; the others are as `Techniques` has them."""
        return techniques_of(self)


def techniques_of(flags: Any) -> Techniques:
    """The techniques that a group of flags asks for; the others are as `Techniques` has them."""
    asked = {}
    for field in fields(Techniques):
        # Some flags have another name than the field.
        flag = FLAGS.get(field.name, field.name)
        value = getattr(flags, flag, None)
        if value is not None:
            asked[field.name] = value
    return Techniques(**asked)


def check_cp_effect(layout: Layout, cp_style: str | None, ulysses: int | None) -> None:
    """Raises ConfigError for a --cp_style or --ulysses that has no effect."""
    check_effect(layout.cp > 1, "--cp", "no sequence is sharded", "--cp 2", cp_style=cp_style)
    why = "a ring is one of all of cp, and so is ulysses"
    check_effect(cp_style == "usp", "--cp_style usp", why, "--cp_style usp", ulysses=ulysses)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How weights are updated, and the schedule of the learning rate."""

    lr: float = 3e-3
    """Learning rate."""
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """muon is for language models: matrices by the orthogonalized momentum, embedding, output and norms by AdamW."""
    max_norm: float = 0.0
    """Clip the gradient's norm to this; 0 leaves it."""
    warmup: int = 0
    """Steps over which the learning rate rises; then --lr_schedule."""
    lr_schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up. cosine: falls as half a cosine. wsd: stays, and falls in a line over --decay steps."""
    min_lr: float = 0.0
    """The learning rate that it falls to."""
    decay: int | None = None
    """With --lr_schedule wsd, the last steps, over which the learning rate falls. Default: a fifth of the run."""
    gamma: float | None = None
    """Factor of the learning rate after each epoch. Default: 0.7 (digits 0.85)."""
    scale_lr: Literal["none", "sqrt", "linear"] = "none"
    """--lr is that of a base batch; of a global batch k times as large the rate is √k or k times that."""
    base_batch_size: int | None = None
    """With --scale_lr, the global batch that --lr is for. Default: what one data-parallel coordinate has where no flag
    says, so that the rate grows with their number."""
    betas: tuple[float, float] | None = None
    """How much of the means of gradients and of their squares AdamW keeps a step. Default: 0.9 0.999."""
    weight_decay: float | None = None
    """Fraction of a weight that a step takes off, times the learning rate. Default: 0.01, as PyTorch's AdamW has it."""
    decayed: Literal["all", "matrices"] | None = None
    """Which parameters decay. matrices: not norms and biases, which have one dim. Default: all."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What happens at a step with a loss or gradient that is not finite. stop: it ends the run. skip: all ranks leave
    weights and optimizer as they are, and continue."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong by itself, or has no effect."""
        # NaN is none of these: each rule says what a value has to be, not what it must not be.
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"--lr {self.lr}: it must be greater than 0, and finite")
        check_counts(base_batch_size=self.base_batch_size)
        check_counts(0, warmup=self.warmup, decay=self.decay)
        if not 0 <= self.max_norm < math.inf:
            raise ConfigError(
                f"--max_norm {self.max_norm}: it must be at least 0, and finite; 0 leaves the gradient as it is"
            )
        if not 0 <= self.min_lr <= self.lr:
            raise ConfigError(f"--min_lr {self.min_lr}: it must be from 0 to --lr {self.lr}")
        if self.gamma is not None and not 0 < self.gamma <= 1:
            raise ConfigError(f"--gamma {self.gamma}: it must be above 0, and at most 1")
        if self.weight_decay is not None and not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"--weight_decay {self.weight_decay}: it must be at least 0, and finite")
        if self.betas is not None:
            self._check_betas(*self.betas)
        if self.optimizer == "sgd":
            for name, value in (("weight_decay", self.weight_decay), ("decayed", self.decayed)):
                if value not in (None, "all"):
                    raise ConfigError(f"--{name} {value} with --optimizer sgd, which has no weight decay: leave it out")
        wsd = "--lr_schedule wsd"
        check_effect(self.lr_schedule == "wsd", wsd, "the learning rate falls all along", wsd, decay=self.decay)
        check_effect(
            self.scale_lr != "none",
            "--scale_lr",
            "the learning rate is --lr",
            "--scale_lr linear",
            base_batch_size=self.base_batch_size,
        )

    def _check_betas(self, first: float, second: float) -> None:
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ConfigError(f"--betas {first} {second}: both must be at least 0, and below 1")
        if self.optimizer == "sgd":
            raise ConfigError(f"--betas {first} {second} with --optimizer sgd, which has none: leave it out")

    def scaled(self, global_batch_size: int, default_base: int) -> tuple[float, list[str]]:
        """The learning rate for a global batch, and a note if it is not --lr.

        Sources: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014 (√k); Goyal et
        al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017 (k).

        Args:
            global_batch_size: samples of the global batch.
            default_base: samples of the global batch that --lr is for, if no flag says so.
        """
        if self.scale_lr == "none":
            return self.lr, []
        # k of the papers is the ratio of the two batches.
        base = self.base_batch_size or default_base
        ratio = global_batch_size / base
        factor = ratio if self.scale_lr == "linear" else ratio**0.5
        rate = self.lr * factor
        over = f"a global batch of {global_batch_size} over a base of {base}"
        note = f"learning rate {rate:.4g}: --lr {self.lr:g} scaled by {over}, {self.scale_lr}"
        return rate, [note]

    def make(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float | None = None,
        exact: bool = False,
    ) -> torch.optim.Optimizer:
        """Make the optimizer for these parameters: any kind but muon, which needs the model's plan.

        Args:
            parameters: this rank's parameters; DTensors if they are sharded.
            lr: the learning rate. None: as the flag says.
            exact: whether the run is exact (`--exact`).
        """
        rate = self.lr if lr is None else lr
        decayed = self.decayed or "all"
        return make_optimizer(self.optimizer, parameters, rate, self.weight_decay, decayed, self.betas, exact)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When the model is evaluated, and what else is watched during the run."""

    eval_every: int = 50
    """Steps between two evaluations, one more at the end; 0: only at the end."""
    eval_batches: int = 4
    """Global batches of the validation text in an evaluation."""
    eval_train: bool = False
    """Evaluate as many batches of the training text as well, without dropout: train_loss."""
    prompt: str | None = None
    """At each evaluation, have the model continue this text by 100 tokens; they are logged, and in the record."""
    fingerprints: int | None = None
    """Keep fingerprints of batch, loss, gradients and weights, every so many steps: `mmm diverge` finds by them where
    two runs part, whatever their layouts."""
    profile: bool = False
    """Profile some steps by PyTorch on each of the first 64 ranks: traces/rank-0.json.gz, … in the run's folder, for
    ui.perfetto.dev."""
    profile_steps: tuple[int, int] | None = None
    """With --profile, from which step to which, the second not among them. Default: three, after the first three."""

    def check(self) -> None:
        """Raises ConfigError for a value that is wrong, or has no effect."""
        check_counts(0, eval_every=self.eval_every)
        check_counts(eval_batches=self.eval_batches)
        if self.fingerprints is not None and self.fingerprints < 1:
            raise ConfigError(f"--fingerprints {self.fingerprints}: it must be at least 1, the steps between two")
        why = "nothing is profiled"
        check_effect(self.profile, "--profile", why, "--profile", profile_steps=self.profile_steps)
        if self.profile_steps is not None:
            first, end = self.profile_steps
            if not 0 <= first < end:
                raise ConfigError(f"--profile_steps {first} {end}: give the first one and the end, such as 10 13")
