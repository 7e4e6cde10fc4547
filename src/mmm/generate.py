"""Text that a language model writes, a prompt and what follows; and a model from weights on disk: of which sizes it is,
and each rank's part of its tensors."""

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
from mmm.nn.draw import Init
from mmm.nn.experts import has_experts
from mmm.nn.sampling import Sampling
from mmm.parallel import build_mesh, partition_model
from mmm.parallel.generate import Likeliest, generate
from mmm.parallel.local import local_box, to_local
from mmm.parallel.parallel_model import ParallelModel
from mmm.runtime.device import Precision
from mmm.runtime.process_group import broadcast_object, gather_objects
from mmm.runtime.ranks import Rank
from mmm.weights.weights import Weights, config_from


def checked(sampling: Sampling) -> Sampling:
    """It itself. Raises ConfigError for what is wrong with it."""
    for name, rule in sampling.problems():
        raise ConfigError(f"--{name.replace('_', '-')} {getattr(sampling, name)}: {rule}")
    return sampling


def check_block(config: Any, block: int) -> None:
    """Raises ConfigError where a model has not as many positions as it is to see tokens at once."""
    longest = of_config(config).longest(config)
    if longest is not None and block > longest:
        raise ConfigError(f"--block {block}: the model has positions for {longest} tokens; use fewer")


def encode_prompt(
    prompt: str, tokenizer: Tokenizer | None, block: int, vocabulary: int, bos: Sequence[int] = ()
) -> list[int]:
    """The tokens of a prompt, `bos` before them, unless the prompt begins with those by itself.

    Raises:
        DataError: a character that the vocabulary lacks, or no tokenizer. ConfigError: it is empty, or too long.
    """
    if tokenizer is None:
        raise DataError("--prompt: no tokenizer is known, to make tokens of it; give --tokenizer, or a text with one")
    try:
        tokens = [int(token) for token in tokenizer.encode(prompt.encode())]
    except UnicodeEncodeError:
        raise DataError("--prompt is no UTF-8") from None
    except DataError as error:
        raise DataError(f"--prompt: {error}") from None
    if tokens[: len(bos)] != [*bos]:
        tokens = [*bos, *tokens]
    if not tokens:
        raise ConfigError("--prompt is empty: give a text to go on with")
    if max(tokens) >= vocabulary:
        raise DataError(f"--prompt has the token {max(tokens)}, and the model's vocabulary has {vocabulary} tokens")
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
    """The prompt, without the `bos` that it begins with, and what follows; of how many tokens that is. A collective.

    Args: as of `generate`.
    """
    most = min(vocabulary, tokenizer.vocab_size)
    written = generate(model, prompt, tokens, block, sampling, most, stop, show, on_token)
    return tokenizer.decode([*prompt[len(bos) :], *(token for token in written if token not in stop)]), len(written)


def config_of(weights: Weights) -> Any:
    """The sizes of a model on disk.

    Raises:
        CheckpointError: they do not go together.
    """
    try:
        config = config_from(weights.definition, weights.sizes)
    except ValueError as error:
        raise CheckpointError(f"{weights.path}: {error}") from None
    problems = config.problems()
    if problems:
        raise CheckpointError(f"{weights.path}: {problems[0]}")
    return config


def tokenizer_on_disk(metadata: ModelMetadata) -> Tokenizer | None:
    """The tokenizer of a model on disk, if it has one."""
    if metadata.tokenizer is None:
        return None
    tokenizer = tokenizer_of(Path(metadata.tokenizer[0]), metadata.tokenizer[1])
    tokenizer.chat = metadata.chat
    return tokenizer


def chat_prompt(prompt: str, tokenizer: Tokenizer | None) -> str:
    """A message by the tokenizer's chat template, up to where its answer begins. A tokenizer without one gets the
    plain one.

    Raises:
        DataError: no tokenizer; the template does not take it.
    """
    if tokenizer is None:
        raise DataError("--chat: no tokenizer is known, which a chat template belongs to")
    template = chat_template_of(tokenizer)
    tokenizer.chat = template.format
    return template.render([{"role": "user", "content": prompt}], add_generation_prompt=True)


def end_of_answers(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The token that ends an answer, where the tokenizer's chat template has one."""
    if tokenizer is None or tokenizer.chat is None:
        return ()
    text = tokenizer.chat.special_tokens.get("eos_token", "")
    try:
        tokens = tokenizer.encode(text.encode()).tolist()
    except DataError:
        return ()
    return tuple(tokens) if len(tokens) == 1 else ()


def evaluation_model(
    config: Any, layout: Layout, precision: Precision, device: torch.device, timeout: float
) -> ParallelModel:
    """A model to load weights into, for forward alone. A collective.

    Raises:
        UserError: it does not go onto the layout.
    """
    definition = of_config(config)
    model, inputs = definition.on_meta(config, layout.pp, 2 * layout.cp * layout.tp)
    model = without_draws(model)
    plan = definition.plan(config)
    techniques = Techniques()
    partition = partition_model(model, plan, layout, techniques, inputs)
    mesh = build_mesh(layout, device.type, timeout, experts=has_experts(model))
    if layout.dp * layout.cp == 1:  # nothing for FSDP to shard: it would copy each unit, for each token
        mesh = replace(mesh, no_data_parallel=True)
        precision = replace(precision, storage=precision.compute)
    parallel = ParallelModel(model, plan, mesh, precision, techniques, partition, device=device, seed=0)
    parallel.train(False)
    return parallel


def without_draws(model: nn.Module) -> nn.Module:
    """The model, whose weights start as zeros: others are loaded over them."""
    model.init_rule = lambda name: Init("constant", 0.0)  # type: ignore[assignment]
    return model


@torch.no_grad()
def load_weights(rank: Rank, model: ParallelModel, weights: Weights) -> None:
    """Load this rank's part of each tensor, in place. A collective: every rank checks some of the files.

    Raises:
        CheckpointError: a file is damaged, or a tensor is missing or of another shape; on every rank.
    """
    problem = None
    try:
        _load_local(rank, model, weights)
    except CheckpointError as error:
        problem = str(error)
    problems = [text for text in gather_objects(rank, problem) if text]
    first = broadcast_object(problems[0] if problems else None)
    if first:
        raise CheckpointError(first, on_every_rank=True)
    model.gather_updated()


def _load_local(rank: Rank, model: ParallelModel, weights: Weights) -> None:
    problem = weights.check(rank.rank, rank.world_size)
    if problem:
        raise CheckpointError(problem)
    for name, tensor in [*model.named_parameters(), *model.saved_buffers().items()]:
        box = local_box(tensor.detach())
        entry = weights.entries.get(name)
        if entry is None or entry.shape != box.full:
            stored = "no such tensor" if entry is None else f"it as {'×'.join(map(str, entry.shape))}"
            own = "×".join(map(str, box.full))
            raise CheckpointError(f"{weights.path} has {stored}: {name}, which is {own} in the model")
        to_local(tensor.detach()).copy_(weights.read(name, box.start, box.length))
