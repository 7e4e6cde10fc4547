"""The model that ``mmm verify MODEL`` names, and a batch for it: of one's own module, or of a library."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mmm_verify.errors import ConfigError, is_for_user
from mmm_verify.observe import float64_by_default
from mmm_verify.ranks.ranks import Rank, RanksFailed, fork_ranks
from mmm_verify.reference import SEED, make_model, seed_all
from mmm_verify.subject import load_function, make_subject, plain_step
from mmm_verify.torch_private import Convolution, tree_leaves, tree_map_only

LIBRARIES = ("hf", "torchvision", "timm")
SAMPLES = 4
LENGTHS = (16, 8, 4)  # of sequences that are tried
SIDES = (64, 96, 128, 160, 192, 224, 256, 299, 384)  # of images
MAPPINGS = (  # of transformers: config → class; the first that has a config is meant
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
)

Batch = Callable[[], Any]
Importer = Callable[[str], ModuleType]  # the name of a part of torchvision, such as ``models`` → that module


@dataclass(frozen=True)
class NamedModel:
    """A model by its name.

    Attributes:
        model_fn: () → the model, with random weights.
        batches: samples → functions that make a batch of as many, of which the first that its forward takes is meant.
            None where they depend on the model itself.
        step_fn: where it is not `plain_step`.
    """

    model_fn: Callable[[], nn.Module]
    batches: Callable[[int], tuple[Batch, ...]] | None = None
    step_fn: Callable[[nn.Module, Any], Tensor] = plain_step


def import_torchvision(part: str) -> ModuleType:
    """A part of torchvision, such as ``models``.

    Raises:
        ConfigError: it is not installed, or does not import.
    """
    try:
        return importlib.import_module(f"torchvision.{part}")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install {error.name}") from None
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"torchvision does not import beside torch {torch.__version__} ({error}): install the release made for it"
        ) from error


def load_model(name: str, importer: Importer = import_torchvision) -> NamedModel:
    """The model of ``module:function``, ``hf:config.json``, ``torchvision:NAME`` or ``timm:NAME``.

    Args:
        importer: imports torchvision, which all three libraries import where it is there.

    Raises:
        ConfigError: there is none, or the library is not installed.
    """
    library, _, rest = name.partition(":")
    if library not in LIBRARIES:
        return NamedModel(load_function(name, "MODEL"))
    if not rest:
        raise ConfigError(f"MODEL {name}: write {library}:{'config.json' if library == 'hf' else 'NAME'}")
    return {"hf": _hugging_face, "torchvision": _torchvision, "timm": _timm}[library](rest, importer)


def keep_no_cache(model: nn.Module) -> None:
    """Have a model of transformers keep nothing for the next token: that would be there in a second forward."""
    if hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False  # type: ignore[union-attr]


def default_batch(named: NamedModel, samples: int, timeout: float) -> Batch:
    """A function that makes a batch that a model takes, chosen by a process that is then gone.

    Tokens where the model begins with an embedding, images where it begins with a convolution, else floats.

    Args:
        samples: of the batch. timeout: seconds that it may take.

    Raises:
        ConfigError: the model's function raises, or gives none; or its forward takes none of what was tried.
    """
    try:
        ((problem, batch),) = fork_ranks(_choose_batch, 1, named, samples, timeout=timeout)
    except RanksFailed as failure:
        raise ConfigError(f"finding a batch: {str(failure).removeprefix('rank 0: ')}") from None
    if problem:
        raise ConfigError(problem)
    return lambda: batch


def _choose_batch(rank: Rank, named: NamedModel, samples: int) -> tuple[str, Any]:
    """Why there is none, or the batch."""
    try:
        model = make_model(make_subject(named.model_fn, _nothing, dict, None, "dp1"), None, False, True)
    except ConfigError as error:
        return str(error), None
    keep_no_cache(model)
    problems = []
    for make in named.batches(samples) if named.batches else _batches_of(model, samples):
        seed_all(SEED)
        batch = make()
        try:
            with torch.no_grad(), float64_by_default():
                named.step_fn(model, tree_map_only(Tensor, _double, batch))
            return "", batch
        except Exception as error:  # whatever the model's code raises
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            problems.append(f"{_shape_of(batch)}: {first}")
    tried = f"; tried {problems[0]}" if problems else ""
    return f"no --batch is given, and none was found that the model takes{tried}: give --batch MODULE:NAME", None


def _nothing(model: nn.Module, mesh: Any) -> None:
    """Leave the model as it is."""


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _shape_of(batch: Any) -> str:
    tensor: Tensor = next(iter(batch.values())) if isinstance(batch, dict) else batch
    kind = "floats" if tensor.is_floating_point() else "tokens"
    return f"{kind} of {tuple(tensor.shape)}"


def _floats(*shape: int) -> Batch:
    return lambda: torch.randn(shape)


def _tokens(vocab_size: int, *shape: int) -> Batch:
    """Of the upper half of a vocabulary: tokens of padding, and others that mean more, are among the first."""
    return lambda: torch.randint(vocab_size // 2, vocab_size, shape)


def _batches_of(model: nn.Module, samples: int) -> tuple[Batch, ...]:
    """Batches by the first module that has parameters."""
    if _is_hugging_face(model):
        return _hugging_face_batches(type(model), model.config, samples, True)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return tuple(_tokens(module.num_embeddings, samples, length) for length in LENGTHS)
        if isinstance(module, Convolution):
            dims = len(module.kernel_size)
            sides = SIDES if dims < 3 else SIDES[:1]
            return tuple(_floats(samples, module.in_channels, *[side] * dims) for side in sides)
        width = _width_of(module)
        if width:
            return (*(_floats(samples, length, width) for length in LENGTHS), _floats(samples, width))
    return ()


def _width_of(module: nn.Module) -> int:
    """The last dim of what a module takes; 0 of one that does not say."""
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[-1]
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim
    return module.in_features if isinstance(module, nn.Linear) else 0


def _library(name: str, importer: Importer) -> ModuleType:
    """Import a library that imports torchvision.

    Raises:
        ConfigError: it is not installed, or does not import.
    """
    try:
        importer("transforms")
    except Exception as error:
        if not is_for_user(error):
            raise
        if name != "transformers":  # which can do without
            raise ConfigError(f"{name}: {error}") from None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install {error.name}") from None
    except Exception as error:  # whatever a library raises as it is imported
        raise ConfigError(f"{name} does not import: {type(error).__name__}: {error}") from None


def _near(kind: str, name: str, known: list[str]) -> ConfigError:
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    return ConfigError(f"{kind} {name}: there is no such model{hint}")


def _torchvision(name: str, importer: Importer) -> NamedModel:
    models: Any = importer("models")
    known = models.list_models()
    if name not in known:
        raise _near("torchvision", name, known)
    return NamedModel(lambda: models.get_model(name, weights=None), lambda samples: _images(samples, 3, SIDES))


def _images(samples: int, channels: int, sides: tuple[int, ...]) -> tuple[Batch, ...]:
    return tuple(_floats(samples, channels, side, side) for side in sides)


def _timm(name: str, importer: Importer) -> NamedModel:
    timm = _library("timm", importer)
    known = timm.list_models()
    base = name.partition(".")[0]  # behind it stands which weights
    if base not in known:
        raise _near("timm", name, known)
    config = timm.get_pretrained_cfg(base)
    channels, height, width = config.input_size if config is not None else (3, 224, 224)
    fixed = config is not None and config.fixed_input_size

    def batches(samples: int) -> tuple[Batch, ...]:
        if fixed:
            return (_floats(samples, channels, height, width),)
        return _images(samples, channels, (*(side for side in SIDES if side < height), height))

    return NamedModel(lambda: timm.create_model(base, pretrained=False), batches)


def read_config(file: Path) -> dict[str, Any]:
    """What a config.json says. Raises ConfigError."""
    reason = "it is no JSON object"
    try:
        if file.exists() and not file.is_file():  # a FIFO would be waited for
            raise ConfigError(f"{file} cannot be read: it is no regular file")
        values = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
    except OSError as error:
        reason = error.strerror or str(error)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        reason = f"it is no JSON: {error}"
    raise ConfigError(f"{file} cannot be read: {reason}")


def _hugging_face(path: str, importer: Importer) -> NamedModel:
    """A model of a config, with random weights."""
    transformers = _library("transformers", importer)
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    values = read_config(file)
    kind = values.pop("model_type", None)
    values.setdefault("experts_implementation", "eager")  # kernels of grouped experts have no float64
    known = list(transformers.CONFIG_MAPPING)
    if kind not in known:
        near = get_close_matches(str(kind), known, n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"{file}: transformers {transformers.__version__} has no model_type {kind}{hint}")
    try:
        config = transformers.AutoConfig.for_model(kind, **values)
    except Exception as error:  # of a library that checks in many ways
        first = (str(error).strip() or "it fails").splitlines()[0]
        raise ConfigError(f"{file}: transformers refuses it: {type(error).__name__}: {first}") from None
    config.use_cache = False  # what is kept for the next token is of no use in a step
    kind, with_loss = _class_of(transformers, config)
    return NamedModel(
        lambda: kind(config),
        lambda samples: _hugging_face_batches(kind, config, samples, with_loss),
        plain_step if with_loss else square_of_output,
    )


def _class_of(transformers: Any, config: Any) -> tuple[Any, bool]:
    """The class that a config of transformers names, else the first that is made for its kind; and whether that
    computes a loss."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name), "For" in name or "LMHead" in name
    for mapping in (getattr(transformers, name) for name in MAPPINGS):
        if type(config) in mapping:
            kind = mapping[type(config)]
            return kind[0] if isinstance(kind, tuple) else kind, True
    if type(config) in transformers.MODEL_MAPPING:
        kind = transformers.MODEL_MAPPING[type(config)]
        return kind[0] if isinstance(kind, tuple) else kind, False
    raise ConfigError(f"transformers {transformers.__version__} has no model for a {type(config).__name__}")


def square_of_output(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a model that has none: the mean square of the first tensor that it returns."""
    return tree_leaves(tuple(model(**batch).values()))[0].square().mean()


def _labelled_images(config: Any, samples: int, with_loss: bool) -> dict[str, Tensor]:
    side, channels = getattr(config, "image_size", None) or 224, getattr(config, "num_channels", None) or 3
    images = {"pixel_values": torch.randn(samples, channels, side, side)}
    return images | ({"labels": torch.randint(config.num_labels, (samples,))} if with_loss else {})


def _is_hugging_face(model: nn.Module) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__) and hasattr(model, "config")


def _hugging_face_batches(kind: Any, config: Any, samples: int, with_loss: bool) -> tuple[Batch, ...]:
    """Tokens with labels, or images with labels."""
    vocab = getattr(config, "vocab_size", 0)
    if getattr(kind, "main_input_name", "") == "pixel_values":
        return (lambda: _labelled_images(config, samples, with_loss),)

    def tokens(length: int) -> Batch:
        def make() -> dict[str, Tensor]:
            ids = _tokens(vocab, samples, length)()
            return {"input_ids": ids, "labels": ids.clone()} if with_loss else {"input_ids": ids}

        return make

    return tuple(tokens(length) for length in LENGTHS)
