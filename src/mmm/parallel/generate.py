"""Generates text from a model on any layout, token after token, keeping keys and values of the tokens before.

Each rank keeps the keys and values of its own heads and layers. A step computes one token. Under tp, where the sequence
is sharded between the matrices, it computes as many as there are tp ranks: those after the first are padding, which the
causal mask hides and the next step overwrites. A model whose plan names no attention, such as a recurrent one, computes
the whole text for each token. With pp every stage gets the hidden states of the one before, and
waits for them. Along dp and cp all ranks compute the same; FSDP gathers its units for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from mmm.nn.attention import visible_keys
from mmm.nn.sampling import Sampling, likeliest
from mmm.parallel.dp.fsdp import reshard
from mmm.parallel.local import to_local, unsharded
from mmm.parallel.memory.chunked_loss import DeferredLMHead
from mmm.parallel.parallel_model import ParallelModel
from mmm.torch_private.dynamo import is_dynamo_loaded

# Tokens of a prompt whose logits exist together.
AT_ONCE = 256
# Tokens and their probabilities, the largest first.
Likeliest = list[tuple[int, float]]


class KVCache:
    """Takes the place of an ``attention_fn``, and keeps keys and values.

    Args:
        tokens: number of tokens that there is room for.
        window: how many tokens a token attends to at most, itself the last of them.
    """

    def __init__(self, tokens: int, window: int | None = None) -> None:
        self.tokens = tokens
        self.length = 0
        self.window = window
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of new tokens to the tokens before them and to themselves.

        Args:
            q: (batch, heads, new, head_dim).
            k, v: (batch, kv heads, new, head_dim).

        Returns:
            (batch, heads, new, head_dim).
        """
        if self.keys is None or self.values is None:
            batch, heads, _, head_dim = k.shape
            self.keys = k.new_empty(batch, heads, self.tokens, head_dim)
            self.values = torch.empty_like(self.keys)
        start = self.length
        end = start + k.shape[2]
        # (batch, kv heads, tokens, head_dim)
        self.keys[:, :, start:end] = k
        self.values[:, :, start:end] = v
        positions = torch.arange(end, device=q.device)
        # (new, end): whether a new token attends to each token so far.
        visible = visible_keys(positions, start, self.window)
        # (batch, kv heads, end, head_dim)
        k = self.keys[:, :, :end]
        v = self.values[:, :, :end]
        grouped = q.shape[1] > k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=grouped)


class Decoder:
    """A model that continues one text.

    Args:
        model: a model in evaluation mode (``train(False)``).
        tokens: length of the longest text.
    """

    def __init__(self, model: ParallelModel, tokens: int) -> None:
        self.model = model
        self.length = 0
        # Padding of a step is written behind the text.
        room = tokens + model.layout.tp
        self.attention = []
        self.caches = []
        for stage in model.modules.values():
            for module in stage.modules():
                if model.has_attention and hasattr(module, "attention_fn"):
                    window = getattr(module, "window", None)
                    self.attention.append(module)
                    self.caches.append(KVCache(room, window))
        # By stage, the shape after (batch, seq) and the dtype of its output.
        self._outputs: dict[int, Any] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Have the model attend to what the caches hold, in this block."""
        own_attention = [module.attention_fn for module in self.attention]
        for module, cache in zip(self.attention, self.caches, strict=True):
            module.attention_fn = cache  # type: ignore[assignment]
        try:
            with _eager(), torch.no_grad():
                yield
        finally:
            for module, attention_fn in zip(self.attention, own_attention, strict=True):
                module.attention_fn = attention_fn
            # FSDP itself frees gathered parameters only after a backward, and there is none.
            for stage in self.model.modules.values():
                reshard(stage)

    def restart(self) -> None:
        """Forget the text so far."""
        self.length = 0
        for cache in self.caches:
            cache.length = 0

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits of the token after these tokens, which continue the text so far. A collective of all ranks.

        Args:
            tokens: (1, new) int64, at least one.

        Returns:
            (vocabulary,); None on the ranks of pp that do not have the last stage.
        """
        if not self.model.has_attention:
            return self._forward(tokens)
        last_logits = None
        for chunk in tokens.split(AT_ONCE, 1):
            last_logits = self._forward(chunk)
        return last_logits

    def _forward(self, tokens: Tensor) -> Tensor | None:
        model = self.model
        tp = model.layout.tp
        n_new = tokens.shape[1]
        # (1, new + padding): a multiple of tp, so that each rank of tp has as many.
        padding = -n_new % tp
        h: Any = F.pad(tokens, (0, padding))
        padded_length = h.shape[1]
        end = self.length + padded_length
        positions = torch.arange(self.length, end, device=h.device)
        # Tokens that a rank has between two stages, where the sequence is sharded over tp.
        local_tokens = padded_length // tp
        # Without a pipeline there is stage 0.
        last_stage = max(model.stages - 1, 0)
        output = None
        for stage_id in range(last_stage + 1):
            stage = model.modules.get(stage_id)
            if stage is not None:
                h = stage(h, positions=positions)
            if stage_id < last_stage:
                h = self._passed_on(h, stage_id, local_tokens)
            elif stage is not None:
                output = h
        self.length += n_new
        for cache in self.caches:
            cache.length = self.length
        if stage is None or output is None:
            return None
        return self._last_logits(stage, output, n_new - 1)

    @staticmethod
    def _last_logits(stage: nn.Module, output: Tensor, index: int) -> Tensor:
        """Return the logits of one token.

        Args:
            output: (1, seq, vocabulary); with a chunked loss the hidden states, (1, seq, dim).
            index: which token of the sequence.

        Returns:
            (vocabulary,), full. A collective of the ranks of tp, where these shard the output.
        """
        deferred = None
        for module in stage.modules():
            if isinstance(module, DeferredLMHead):
                deferred = module
        if deferred is None:
            return unsharded(output[0, index])
        weight = deferred.weight
        # (1, seq, dim)
        full = unsharded(output)
        # (dim,)
        hidden = full[0, index]
        hidden = hidden.to(deferred.dtype)
        # (local vocabulary, dim)
        matrix = to_local(weight).to(deferred.dtype)
        # (local vocabulary,)
        logits = hidden @ matrix.mT
        if isinstance(weight, DTensor):
            shape = torch.Size(weight.shape[:1])
            logits = DTensor.from_local(logits, weight.device_mesh, [Shard(0)], shape=shape, stride=(1,))
        return unsharded(logits)

    def _passed_on(self, h: Tensor, stage_id: int, tokens: int) -> Tensor:
        """Give the output of a stage, (1, tokens, …), to all ranks of pp. A collective of these.

        Args:
            h: the output, on the rank that has the stage; the others pass any tensor.
        """
        group = self.model.mesh["pp"].get_group()
        source = dist.get_global_rank(group, self.model.stage_to_pp_rank[stage_id])
        is_here = stage_id in self.model.modules
        # The others learn shape and dtype with the first message.
        if stage_id not in self._outputs:
            message: list[Any] = [(tuple(h.shape[2:]), h.dtype)]
            dist.broadcast_object_list(message, source, group=group, device=self.model.device)
            self._outputs[stage_id] = message[0]
        shape, dtype = self._outputs[stage_id]
        if is_here:
            h = h.contiguous()
        else:
            h = torch.empty(1, tokens, *shape, dtype=dtype, device=self.model.device)
        dist.broadcast(h, source, group=group)
        return h


def _eager() -> AbstractContextManager:
    """A context in which compiled modules run uncompiled: each token would have them compiled for another length."""
    if is_dynamo_loaded():
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def generate(
    model: ParallelModel,
    prompt: Sequence[int],
    tokens: int,
    block: int,
    sampling: Sampling,
    vocabulary: int,
    stop: Sequence[int] = (),
    show: int = 0,
    on_token: Callable[[int, Likeliest], object] | None = None,
) -> list[int]:
    """Generate tokens that continue a prompt, the same on every rank. A collective of all ranks.

    Args:
        prompt: at least one token, and at most `block`.
        tokens: how many to generate, unless one of `stop` ends the text.
        block: how many tokens the model sees at once. When a text becomes longer, generation restarts from the last
            half of a block.
        vocabulary: number of tokens that may be drawn: those from this index on never are.
        show: how many of the likeliest tokens are found at each step, on every rank.
        on_token: called with each token as it comes, and with the likeliest tokens of that step.
    """
    longest = min(block, len(prompt) + tokens)
    decoder = Decoder(model, longest)
    source = _drawing_rank(model)
    world_size = dist.get_world_size()
    show = min(show, vocabulary)
    new_tokens = list(prompt)
    generated: list[int] = []
    with decoder.attached():
        while len(generated) < tokens:
            if generated and generated[-1] in stop:
                break
            if decoder.length + len(new_tokens) > block:
                decoder.restart()
                half_block = block // 2 or 1
                text = [*prompt, *generated]
                new_tokens = text[-half_block:]
            # (1, new)
            inputs = torch.tensor([new_tokens], device=model.device)
            logits = decoder.logits(inputs)
            # The token that is drawn, then the likeliest.
            drawn = torch.zeros(1 + show, dtype=torch.int64, device=model.device)
            probabilities = torch.zeros(show, device=model.device)
            if logits is not None:
                logits = logits[:vocabulary]
                drawn[0] = sampling.draw(logits, len(generated))
                shown_tokens, shown_probabilities = likeliest(logits, show)
                drawn[1:] = shown_tokens
                probabilities[:] = shown_probabilities
            if world_size > 1:
                # One rank decides for all, so that all continue with the same token.
                dist.broadcast(drawn, source)
                if show:
                    dist.broadcast(probabilities, source)
            token, *shown = drawn.tolist()
            if not model.has_attention:
                # No keys and values keep what came before: the whole text goes through the model again.
                decoder.restart()
                new_tokens.append(token)
            else:
                new_tokens = [token]
            generated.append(token)
            if on_token is not None:
                pairs = zip(shown, probabilities.tolist(), strict=True)
                on_token(token, list(pairs))
    return generated


def _drawing_rank(model: ParallelModel) -> int:
    """Return the first rank that has the last stage."""
    # Without a pipeline there are no stages, and rank 0 is the first.
    last_stage = model.stages - 1
    pp_rank = model.stage_to_pp_rank.get(last_stage, 0)
    # pp is the outermost axis: the ranks of a coordinate follow each other.
    ranks_per_stage = dist.get_world_size() // model.layout.pp
    return pp_rank * ranks_per_stage
