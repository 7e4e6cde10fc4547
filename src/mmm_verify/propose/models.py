"""Makes the model that ``mmm verify MODEL`` names, from a module or a config of transformers, and a batch for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mmm_verify.dtypes import by_default, widest
from mmm_verify.errors import ConfigError, describe, is_for_user
from mmm_verify.plain import SEED, make_model, seed_all
from mmm_verify.propose.batches import LENGTHS, Batch, floats, hugging_face_batches, tokens
from mmm_verify.propose.trace import first_line
from mmm_verify.ranks.ranks import fork_one
from mmm_verify.subject import load_function, make_subject, plain_step, samples_of
from mmm_verify.torch_private import Convolution, tensors_in, tree_map_only

SAMPLES = 4
# The sides of images that are tried, in pixels.
SIDES = (64, 96, 128, 160, 192, 224, 256, 299, 384)
# Names of mappings of transformers from a config's class to a model's; the first that has a config counts.
MAPPINGS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
)

# Imports a submodule of torchvision, such as ``transforms``.
Importer = Callable[[str], ModuleType]


@dataclass(frozen=True)
class NamedModel:
    """A model that was given by name.

    Attributes:
        model_fn: returns the model, with random weights.
        batches: takes a number of samples and returns functions that make such a batch; the first batch that the
            model's forward takes is used. None if they depend on the model itself.
        step_fn: takes the model and a batch and returns the loss.
    """

    model_fn: Callable[[], nn.Module]
    batches: Callable[[int], tuple[Batch, ...]] | None = None
    step_fn: Callable[[nn.Module, Any], Tensor] = plain_step


def load_model(name: str, importer: Importer | None = None) -> NamedModel:
    """Find the model of ``module:function`` or ``hf:config.json``.

    Args:
        name: what the user gave.
        importer: imports torchvision before transformers does, where its compiled part may be missing.

    Raises:
        ConfigError: there is no such model, or transformers is not installed.
    """
    library, _, path = name.partition(":")
    if name.endswith(".py"):
        raise ConfigError(f"MODEL {name}: write MODULE:NAME; or --program {name}, to verify a script as it is")
    if library != "hf":
        return NamedModel(load_function(name, "MODEL"))
    if not path:
        raise ConfigError(f"MODEL {name}: write hf:config.json")
    return _hugging_face(path, importer)


def keep_no_cache(model: nn.Module) -> None:
    """Switch off the cache of a model of transformers. A second forward would find in it what the first one kept."""
    for module in model.modules():
        # A part, such as a language model in one of images and text, has a config of its own.
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False


def default_batch(named: NamedModel, samples: int, timeout: float) -> Batch:
    """Choose a batch that a model takes, in a process that ends afterwards. Returns a function that returns it.

    The batch has tokens if the model begins with an embedding, images if it begins with a convolution, and floats
    otherwise.

    Args:
        named: the model.
        samples: number of samples in the batch.
        timeout: seconds that it may take.

    Raises:
        ConfigError: the model's function raises or does not return a model, or its forward takes none of the batches.
    """
    batch = fork_one("finding a batch", _choose_batch, named, samples, timeout=timeout)
    return lambda: batch


def _choose_batch(named: NamedModel, samples: int) -> Any:
    """Returns the batch. Raises ConfigError: see `default_batch`."""
    subject = make_subject(named.model_fn, _nothing, dict, None, "dp1")
    model = make_model(subject, None, dropout=False, evaluating=True)
    keep_no_cache(model)
    if named.batches is None:
        batches = _batches_of(model, samples)
    else:
        batches = named.batches(samples)
    first_problem = ""
    for make in batches:
        seed_all(SEED)
        batch = make()
        try:
            # The model will be verified in float64.
            with torch.no_grad(), by_default(torch.float64):
                loss = named.step_fn(model, tree_map_only(Tensor, widest, batch))
            if isinstance(loss, Tensor) and bool(loss.isfinite().all()):
                return batch
            problem = f"the loss is {loss}"
        # The model's code may raise anything.
        except Exception as error:
            problem = first_line(error)
        if not first_problem:
            first_problem = f"; tried {_shape_of(batch)}: {problem}"
    raise ConfigError(
        f"no --batch is given, and none was found that the model takes{first_problem}: give --batch MODULE:NAME"
    )


def _nothing(model: nn.Module, mesh: Any) -> None:
    """Leave the model as it is."""


def _shape_of(batch: Any) -> str:
    """What a batch's first tensor holds, and its shape, for messages: ``tokens of (4, 16)``."""
    tensor: Tensor = batch
    if isinstance(batch, dict):
        tensor = next(iter(batch.values()))
    kind = "floats" if tensor.is_floating_point() else "tokens"
    return f"{kind} of {tuple(tensor.shape)}"


def _batches_of(model: nn.Module, samples: int) -> tuple[Batch, ...]:
    """The batches to try, by the first module that says what it takes."""
    if _is_hugging_face(model):
        return hugging_face_batches(type(model), model.config, samples, with_loss=True)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # (batch, seq)
            return tuple(tokens(module.num_embeddings, samples, length) for length in LENGTHS)
        if isinstance(module, Convolution):
            dims = len(module.kernel_size)
            # A volume of 96 × 96 × 96 would take long.
            sides = SIDES if dims < 3 else SIDES[:1]
            # (batch, channels, side, …)
            return tuple(floats(samples, module.in_channels, *[side] * dims) for side in sides)
        width = _width_of(module)
        if width:
            # (batch, seq, width), or (batch, width)
            sequences = [floats(samples, length, width) for length in LENGTHS]
            return (*sequences, floats(samples, width))
    return ()


def _width_of(module: nn.Module) -> int:
    """The last dim of what a module takes; 0 if it does not say."""
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[-1]
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim
    if isinstance(module, nn.Linear):
        return module.in_features
    return 0


def _transformers(importer: Importer | None) -> ModuleType:
    """Import transformers, which itself imports torchvision if it is installed.

    Raises:
        ConfigError: it is not installed, or its import fails.
    """
    try:
        if importer is not None:
            importer("transforms")
    except Exception as error:
        # transformers works without torchvision.
        if not is_for_user(error):
            raise
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install {error.name}") from None
    # A library may raise anything when it is imported.
    except Exception as error:
        raise ConfigError(f"transformers does not import: {describe(error)}") from None


def _hugging_face(path: str, importer: Importer | None) -> NamedModel:
    """The model of a config.json, with random weights."""
    transformers = _transformers(importer)
    # transformers would look for a model of this name in the network.
    if not Path(path).exists():
        raise ConfigError(f"MODEL hf:{path}: there is no such file or folder")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    # transformers checks in many ways.
    except Exception as error:
        raise ConfigError(f"{path}: transformers refuses it: {type(error).__name__}: {first_line(error)}") from None
    return of_config(transformers, config)


def of_config(transformers: Any, config: Any) -> NamedModel:
    """The model for a config of transformers.

    Raises:
        ConfigError: transformers has none.
    """
    # A step of training does not use what is kept for the next token.
    config.use_cache = False
    kind, with_loss = class_of(transformers, config)
    # A class for text may take only this part of a config of text and images.
    if config.sub_configs.get("text_config") is kind.config_class:
        config = config.get_text_config()
    # Kernels of grouped experts have no float64.
    for one in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if one is not None and one._experts_implementation is None:
            one._experts_implementation = "eager"
    return NamedModel(
        model_fn=lambda: kind(config),
        batches=lambda samples: hugging_face_batches(kind, config, samples, with_loss),
        step_fn=loss_or_square,
    )


def class_of(transformers: Any, config: Any) -> tuple[Any, bool]:
    """The model's class for a config of transformers, and whether that class computes a loss.

    It is the class that the config names, or the first one that is made for its kind.
    """
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            with_loss = "For" in name or "LMHead" in name
            return getattr(transformers, name), with_loss
    # The last one has models without a head, and so without a loss.
    for name in (*MAPPINGS, "MODEL_MAPPING"):
        mapping = getattr(transformers, name)
        if type(config) in mapping:
            kind = mapping[type(config)]
            # Several classes for one config.
            if isinstance(kind, tuple):
                kind = kind[0]
            return kind, name != "MODEL_MAPPING"
    raise ConfigError(f"transformers {transformers.__version__} has no model for a {type(config).__name__}")


def loss_or_square(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model computes from labels. Without labels: the mean squares of the floats that it returns.

    Of these only tensors of samples count. One of (samples, samples) compares samples with each other, and the mean
    over ranks is not the mean over the batch.
    """
    if "labels" in batch:
        return plain_step(model, batch)
    outputs = model(**batch)
    if isinstance(outputs, Mapping):
        outputs = tuple(outputs.values())
    n_samples = samples_of(batch)
    floats_of_model = [tensor for tensor in tensors_in(outputs) if tensor.is_floating_point()]
    if not floats_of_model:
        raise ConfigError(f"{type(model).__name__} returns no tensor of floats: give --step MODULE:NAME")
    counted = []
    for tensor in floats_of_model:
        has_samples = tensor.ndim > 1 and len(tensor) == n_samples
        compares_samples = tensor.shape == (n_samples, n_samples)
        if has_samples and tensor.requires_grad and not compares_samples:
            counted.append(tensor)
    if not counted:
        counted = floats_of_model[:1]
    squares = [tensor.square().mean() for tensor in counted]
    return torch.stack(squares).sum()


def _is_hugging_face(model: nn.Module) -> bool:
    """Whether a model is one of transformers."""
    # By name, so that transformers need not be installed.
    class_names = [kind.__name__ for kind in type(model).__mro__]
    return "PreTrainedModel" in class_names and hasattr(model, "config")
