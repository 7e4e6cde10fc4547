"""Text that a language model writes after a prompt; and a model from weights on disk: its sizes, and each rank's shard
of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmm.checkpoint.model_metadata import ModelMetadata
from mmm.data.text.byte_tokenizer import Tokenizer
from mmm.data.text.chat_template import chat_template_of
from mmm.data.text.tokenizer import tokenizer_of
from mmm.errors import CheckpointError, ConfigError, DataError
from mmm.layout import Layout, Techniques
from mmm.models.definition import of_config
from mmm.nn.experts import has_experts
from mmm.nn.init import Init
from mmm.nn.lora import is_lora
from mmm.nn.sampling import Sampling
from mmm.parallel import build_mesh, partition_model
from mmm.parallel.generate import Likeliest, generate
from mmm.parallel.local import local_box, to_local
from mmm.parallel.parallel_model import ParallelModel
from mmm.runtime.device import Precision
from mmm.runtime.process_group import broadcast_object, gather_objects
from mmm.runtime.ranks import Rank
from mmm.weights.weights import Weights


def checked(sampling: Sampling) -> Sampling:
    """The argument itself. Raises ConfigError for the first value that is wrong in it."""
    for name, rule in sampling.problems():
        flag = name.replace("_", "-")
        raise ConfigError(f"--{flag} {getattr(sampling, name)}: {rule}")
    return sampling


def check_block(config: Any, block: int) -> None:
    """Raises ConfigError if a model has fewer positions than it has to see tokens at once."""
    longest = of_config(config).longest(config)
    if longest is not None and block > longest:
        raise ConfigError(f"--block {block}: the model has positions for {longest} tokens; use fewer")


def encode_prompt(
    prompt: str,
    tokenizer: Tokenizer | None,
    block: int,
    vocabulary: int,
    bos: Sequence[int] = (),
) -> list[int]:
    """The tokens of a prompt, with `bos` before them unless the prompt begins with those by itself.

    Args:
        prompt: the text.
        tokenizer: makes tokens of it. None: it is not known.
        block: the most tokens that the model sees at once.
        vocabulary: number of tokens that the model knows.
        bos: tokens that begin a text.

    Raises:
        DataError: the vocabulary lacks a character, or there is no tokenizer.
        ConfigError: the prompt is empty, or too long.
    """
    if tokenizer is None:
        raise DataError("--prompt: no tokenizer is known, to make tokens of it; give --tokenizer, or a text with one")
    try:
        tokens = [int(token) for token in tokenizer.encode(prompt.encode())]
    except UnicodeEncodeError:
        # The bytes of the command line were not text.
        raise DataError("--prompt is not UTF-8") from None
    except DataError as error:
        raise DataError(f"--prompt: {error}") from None
    if tokens[: len(bos)] != [*bos]:
        tokens = [*bos, *tokens]
    if not tokens:
        raise ConfigError("--prompt is empty: give a text to continue")
    largest = max(tokens)
    if largest >= vocabulary:
        raise DataError(f"--prompt has the token {largest}, and the model's vocabulary has {vocabulary} tokens")
    if len(tokens) > block:
        raise ConfigError(f"--prompt has {len(tokens)} tokens, and the model's block {block}: shorten it")
    return tokens


def sample_text(
    model: ParallelModel,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    tokens: int,
    sampling: Sampling,
    block: int,
    vocabulary: int,
    stop: Sequence[int] = (),
    bos: Sequence[int] = (),
    show: int = 0,
    on_token: Callable[[int, Likeliest], object] | None = None,
) -> tuple[str, int]:
    """Have a model continue a prompt. A collective.

    Args: as those of `generate`; and

        tokenizer: makes text of the tokens.
        bos: tokens that the prompt begins with, and that are not text.

    Returns:
        The text of the prompt with what follows; and the number of tokens that follow.
    """
    # The model may know tokens that its tokenizer does not: the matrix is often made larger.
    most = min(vocabulary, tokenizer.vocab_size)
    written = generate(
        model,
        prompt,
        tokens,
        block,
        sampling,
        most,
        stop,
        show,
        on_token,
    )
    shown = list(prompt[len(bos) :])
    shown += [token for token in written if token not in stop]
    return tokenizer.decode(shown), len(written)


def tokenizer_on_disk(metadata: ModelMetadata) -> Tokenizer | None:
    """The tokenizer of a model on disk, if it has one."""
    if metadata.tokenizer is None:
        return None
    file, content = metadata.tokenizer
    tokenizer = tokenizer_of(Path(file), content)
    tokenizer.chat = metadata.chat
    return tokenizer


def chat_prompt(prompt: str, tokenizer: Tokenizer | None) -> str:
    """A message in the form of the tokenizer's chat template, up to where the answer begins.

    A tokenizer without a template gets the plain one.

    Raises:
        DataError: there is no tokenizer; or its template does not take the message.
    """
    if tokenizer is None:
        raise DataError("--chat: no tokenizer is known, and a chat template belongs to one")
    template = chat_template_of(tokenizer)
    tokenizer.chat = template.format
    return template.render([{"role": "user", "content": prompt}], add_generation_prompt=True)


def end_of_answers(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The token that ends an answer, as a tuple: empty if there is none, or no template that takes a conversation."""
    if tokenizer is None or tokenizer.chat is None:
        return ()
    try:
        text = chat_template_of(tokenizer).end_of_answers()
        tokens = tokenizer.encode(text.encode()).tolist()
    except DataError:
        return ()
    # A text of several tokens may also stand within an answer.
    if len(tokens) != 1:
        return ()
    return tuple(tokens)


def evaluation_model(
    config: Any,
    layout: Layout,
    precision: Precision,
    device: torch.device,
    timeout: float,
) -> ParallelModel:
    """A model to load weights into, which only runs forward. A collective.

    Args:
        config: sizes of the model.
        layout: the layout, fitted to the number of ranks.
        precision: data types.
        device: this rank's device.
        timeout: seconds that a collective may take.

    Raises:
        UserError: the model does not go onto the layout.
    """
    definition = of_config(config)
    # A small batch is enough to find the shapes: (pp, 2 · cp · tp), which every axis divides.
    seq_length = 2 * layout.cp * layout.tp
    model, inputs = definition.on_meta(config, layout.pp, seq_length)
    model = without_draws(model)
    plan = definition.plan(config)
    techniques = Techniques()
    partition = partition_model(model, plan, layout, techniques, inputs)
    mesh = build_mesh(layout, device.type, timeout, experts=has_experts(model))
    # Nothing for FSDP to shard: it would copy each unit, for each token.
    if layout.dp * layout.cp == 1:
        mesh = replace(mesh, no_data_parallel=True)
        precision = replace(precision, storage=precision.compute)
    parallel = ParallelModel(
        model,
        plan,
        mesh,
        precision,
        techniques,
        partition,
        device=device,
        seed=0,
    )
    parallel.train(False)
    return parallel


def without_draws(model: nn.Module) -> nn.Module:
    """The same model, whose weights start as zeros instead of drawn ones: others are loaded over them.

    The matrices of LoRA are drawn all the same: no file has them.
    """
    rule: Callable[[str], Init | None] = model.init_rule  # type: ignore[assignment]
    zeros = Init("constant", 0.0)
    model.init_rule = lambda name: rule(name) if is_lora(name) else zeros  # type: ignore[assignment]
    return model


@torch.no_grad()
def load_weights(rank: Rank, model: ParallelModel, weights: Weights) -> None:
    """Load this rank's shard of each tensor, in place. A collective: every rank checks some of the files.

    Raises:
        CheckpointError: a file is damaged, or a tensor is missing or of another shape; on every rank.
    """
    problem = None
    try:
        _load_local(rank, model, weights)
    except CheckpointError as error:
        problem = str(error)
    # What fails on one rank is raised on all of them, or the others would wait for it.
    problems = [text for text in gather_objects(rank, problem) if text]
    first = broadcast_object(problems[0] if problems else None)
    if first:
        raise CheckpointError(first, on_every_rank=True)
    # ZeRO-1 and ZeRO-2 have loaded shards of parameters that each rank has in full.
    model.gather_updated()


def _load_local(rank: Rank, model: ParallelModel, weights: Weights) -> None:
    problem = weights.check(rank.rank, rank.world_size)
    if problem:
        raise CheckpointError(problem)
    tensors = [*model.named_parameters(), *model.saved_buffers().items()]
    for name, tensor in tensors:
        if is_lora(name):
            continue
        # Which shard of the full tensor this rank has.
        box = local_box(tensor.detach())
        entry = weights.entries.get(name)
        if entry is None or entry.shape != box.full:
            stored = "no such tensor"
            if entry is not None:
                stored = f"it as {'×'.join(map(str, entry.shape))}"
            own = "×".join(map(str, box.full))
            raise CheckpointError(f"{weights.path} has {stored}: {name}, which is {own} in the model")
        shard = weights.read(name, box.start, box.length)
        to_local(tensor.detach()).copy_(shard)
