"""Text from a model on any layout, token after token, with the keys and values of the tokens before it kept.

Each rank keeps those of its own heads and layers. A step computes one token; under tp, where the sequence between the
matrices is sharded, so many that each rank has one: those behind the first are padding, which the causal mask hides and
the next step overwrites. With pp the hidden states pass from stage to stage, and the other stages wait. Along dp and cp
all ranks compute the same; FSDP gathers its units for each token.
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

from mmm.nn.sampling import Sampling, likeliest
from mmm.parallel.dp.fsdp import reshard
from mmm.parallel.local import to_local, unsharded
from mmm.parallel.memory.chunked_loss import DeferredLMHead
from mmm.parallel.parallel_model import ParallelModel
from mmm.torch_private.dynamo import is_dynamo_loaded

AT_ONCE = 256  # tokens of a prompt, whose logits exist together
Likeliest = list[tuple[int, float]]  # tokens and their probabilities, the largest first


class KVCache:
    """Takes the place of an ``attention_fn``, and keeps keys and values.

    Args:
        tokens: room for so many.
        window: a token attends to so many at most, itself the last of them.
    """

    def __init__(self, tokens: int, window: int | None = None) -> None:
        self.tokens, self.length = tokens, 0
        self.window = window
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of further tokens to those before them and to themselves.

        Args:
            q: (batch, heads, new, head_dim). k, v: (batch, kv heads, new, head_dim).
        """
        if self.keys is None or self.values is None:
            batch, heads, _, head_dim = k.shape
            self.keys = k.new_empty(batch, heads, self.tokens, head_dim)
            self.values = torch.empty_like(self.keys)
        end = self.length + k.shape[2]
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = k, v
        place = torch.arange(end, device=q.device)
        seen = place <= place[self.length :, None]  # (new, end)
        if self.window is not None:
            seen = seen & (place > place[self.length :, None] - self.window)
        k, v = self.keys[:, :, :end], self.values[:, :, :end]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] > k.shape[1])


class Decoder:
    """A model that goes on with one text.

    Args:
        model: evaluating (``train(False)``). tokens: of the longest text.
    """

    def __init__(self, model: ParallelModel, tokens: int) -> None:
        self.model, self.length = model, 0
        room = tokens + model.layout.tp
        inside = (module for stage in model.modules.values() for module in stage.modules())
        self.attention = [module for module in inside if hasattr(module, "attention_fn")]
        self.caches = [KVCache(room, getattr(module, "window", None)) for module in self.attention]
        self._hidden: dict[int, Any] = {}  # by stage, shape after (batch, seq) and dtype of what comes from it

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the model attends to what the caches have."""
        before = [module.attention_fn for module in self.attention]
        for module, cache in zip(self.attention, self.caches, strict=True):
            module.attention_fn = cache  # type: ignore[assignment]
        try:
            with _eager(), torch.no_grad():
                yield
        finally:
            for module, attention_fn in zip(self.attention, before, strict=True):
                module.attention_fn = attention_fn
            for stage in self.model.modules.values():
                reshard(stage)  # FSDP itself does so only after a backward

    def restart(self) -> None:
        """Forget the text."""
        self.length = 0
        for cache in self.caches:
            cache.length = 0

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Of the token after these, which come after all before. A collective.

        Args:
            tokens: (1, new) int64, at least one.

        Returns:
            (vocabulary,); None on the ranks of pp that have not the last stage.
        """
        last_logits = None
        for chunk in tokens.split(AT_ONCE, 1):
            last_logits = self._forward(chunk)
        return last_logits

    def _forward(self, tokens: Tensor) -> Tensor | None:
        model, new = self.model, tokens.shape[1]
        h: Any = F.pad(tokens, (0, -new % model.layout.tp))
        positions = torch.arange(self.length, self.length + h.shape[1], device=h.device)
        local = h.shape[1] // model.layout.tp  # tokens of a rank between two stages
        for stage_id in range(max(model.stages, 1)):
            if stage_id not in model.modules:
                continue
            if stage_id and stage_id - 1 not in model.modules:
                h = self._receive(stage_id - 1, local)
            stage = model.modules[stage_id]
            h = stage(h, positions=positions)
            if stage_id + 1 < model.stages and stage_id + 1 not in model.modules:
                self._send(h, stage_id)
            last = h if stage_id + 1 >= model.stages else None
        self.length += new
        for cache in self.caches:
            cache.length = self.length
        return None if last is None else self._last_logits(stage, last, new - 1)

    @staticmethod
    def _last_logits(stage: nn.Module, output: Tensor, index: int) -> Tensor:
        """
        Args:
            output: (1, seq, vocabulary), or of a chunked loss the hidden states.
        """
        deferred = next((module for module in stage.modules() if isinstance(module, DeferredLMHead)), None)
        if deferred is None:
            return unsharded(output[0, index])
        weight, hidden = deferred.weight, unsharded(output)[0, index].to(deferred.dtype)
        logits = hidden @ to_local(weight).to(deferred.dtype).mT  # of the local vocabulary
        if isinstance(weight, DTensor):
            shape, stride = torch.Size(weight.shape[:1]), (1,)
            logits = DTensor.from_local(logits, weight.device_mesh, [Shard(0)], shape=shape, stride=stride)
        return unsharded(logits)

    def _send(self, h: Tensor, stage_id: int) -> None:
        group, to = self._peer(stage_id + 1)
        if stage_id not in self._hidden:
            self._hidden[stage_id] = tuple(h.shape[2:]), h.dtype
            dist.send_object_list([self._hidden[stage_id]], to, group=group, device=self.model.device)
        dist.send(h.contiguous(), to, group=group)

    def _receive(self, stage_id: int, tokens: int) -> Tensor:
        group, source = self._peer(stage_id)
        if stage_id not in self._hidden:
            box: list[Any] = [None]
            dist.recv_object_list(box, source, group=group, device=self.model.device)
            self._hidden[stage_id] = box[0]
        rest, dtype = self._hidden[stage_id]
        h = torch.empty(1, tokens, *rest, dtype=dtype, device=self.model.device)
        dist.recv(h, source, group=group)
        return h

    def _peer(self, stage_id: int) -> tuple[dist.ProcessGroup, int]:
        """The group of this rank's pipeline, and the rank in it that has a stage."""
        group = self.model.mesh["pp"].get_group()
        return group, dist.get_global_rank(group, self.model.stage_to_pp_rank[stage_id])


def _eager() -> AbstractContextManager:
    """Inside, compiled modules run as they are: each token would have them compiled anew, for another length."""
    return torch.compiler.set_stance("force_eager") if is_dynamo_loaded() else nullcontext()


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
    """Tokens that go on with a prompt, the same on every rank. A collective.

    Args:
        prompt: at least one token, and at most `block`. tokens: how many, unless one of `stop` ends the text.
        block: tokens that the model sees at once; where there are more, it goes on from the last half of a block.
        vocabulary: tokens from there on are never drawn.
        show: so many of the likeliest tokens are found at each step, on every rank.
        on_token: called with each token as it comes, and with these.
    """
    decoder = Decoder(model, min(block, len(prompt) + tokens))
    source, world = _drawing_rank(model), dist.get_world_size()
    new_tokens, generated = list(prompt), list[int]()
    with decoder.attached():
        while len(generated) < tokens and not (generated and generated[-1] in stop):
            if decoder.length + len(new_tokens) > block:
                decoder.restart()
                new_tokens = [*prompt, *generated][-(block // 2 or 1) :]
            logits = decoder.logits(torch.tensor([new_tokens], device=model.device))
            show = min(show, vocabulary)
            drawn = torch.zeros(1 + show, dtype=torch.int64, device=model.device)  # the token, then the likeliest
            probabilities = torch.zeros(show, device=model.device)
            if logits is not None:
                drawn[0] = sampling.draw(logits[:vocabulary], len(generated))
                drawn[1:], probabilities[:] = likeliest(logits[:vocabulary], show)
            if world > 1:
                dist.broadcast(drawn, source)
                if show:
                    dist.broadcast(probabilities, source)
            token, *shown = drawn.tolist()
            new_tokens = [token]
            generated.append(token)
            if on_token is not None:
                on_token(token, list(zip(shown, probabilities.tolist(), strict=True)))
    return generated


def _drawing_rank(model: ParallelModel) -> int:
    """The first rank that has the last stage."""
    last = model.stage_to_pp_rank[max(model.stage_to_pp_rank)] if model.stage_to_pp_rank else 0
    ranks = range(dist.get_world_size())
    return next(rank for rank in ranks if model.layout.coordinates(rank)["pp"] == last)
