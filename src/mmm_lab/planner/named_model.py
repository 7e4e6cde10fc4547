"""Reads the model that ``--model`` names: a preset, or a config.json of Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmm.errors import ConfigError
from mmm.models.definition import NAMES, ModelDef, find
from mmm.outside import read_json
from mmm.weights.hugging_face import known_model
from mmm.weights.weights import config_from
from mmm_lab.planner.models import model_spec
from mmm_lab.planner.spec import ModelSpec
from mmm_launch.errors import did_you_mean

LARGEST = 1_000_000  # that any size may be
MOST_LAYERS = 1000  # with more, balancing them over stages takes a minute


def read_model(
    name: str,
    sizes: Mapping[str, int | None],
    seq_length: int,
) -> ModelSpec:
    """The model that ``--model`` names.

    Args:
        name: a preset of the first model, such as ``llama-8b``; ``gpt``, ``gpt-shakespeare``, ``vit-base`` …; the path
            of a config.json of Hugging Face's, or of its folder.
        sizes: values that the command line gives for the model's sizes; None where it gives none.
        seq_length: number of tokens in a sample; for language models.

    Raises:
        ConfigError: no such model, or sizes that do not fit together.
    """
    asked: dict[str, Any] = {key: value for key, value in sizes.items() if value is not None}
    for key, value in asked.items():
        if not 0 <= value <= LARGEST:
            raise ConfigError(f"--{key.replace('_', '-')} {value}: it must be from 0 to {LARGEST:,}")
    from_file = name.endswith(".json") or Path(name).is_dir()
    if from_file:
        definition, config, flags = _hugging_face(Path(name))
    else:
        definition, preset = _preset(name)
        config = definition.presets[preset]
        flags = ("--preset", preset)
    if asked and (from_file or not definition.language):
        flag = next(iter(asked)).replace("_", "-")
        raise ConfigError(f"--{flag} with --model {name}: only the sizes of a language model's preset can be changed")
    if not definition.language:
        # The first model of a program needs no flag.
        programs = [other.name for other in map(find, NAMES) if other.program == definition.program]
        if definition.name != programs[0]:
            flags = ("--model", definition.name, *flags)
        return replace(model_spec(config), name=name, flags=flags)
    for key, value in asked.items():
        flags += (f"--{key}", str(value))
    if definition.longest(config) is not None:
        asked["block_size"] = seq_length
    config = definition.changed(config, **asked)
    _check(name, config)
    if definition.name != NAMES[0]:
        flags = ("--model", definition.name, *flags)
    if "--vocab_size" not in flags:
        # Without this flag the trainer would take the vocabulary of its text.
        flags += ("--vocab_size", str(config.vocab_size))
    return replace(model_spec(config, seq_length), name=name, flags=flags)


def _preset(name: str) -> tuple[ModelDef, str]:
    """The model and the preset that a name means. The name of a model alone means its largest preset."""
    known: dict[str, tuple[ModelDef, str]] = {}
    for definition in map(find, NAMES):
        if not definition.costs.planned:
            continue
        sizes = definition.presets
        prefix = f"{definition.name}-"
        if definition.name == NAMES[0]:
            prefix = ""
        else:
            # The name alone means the deepest and widest preset.
            largest = max(sizes, key=lambda preset: sizes[preset].dim * sizes[preset].n_layers)
            known[definition.name] = definition, largest
        known |= {f"{prefix}{preset}": (definition, preset) for preset in sizes}
    if name not in known:
        others = f" There are {', '.join(known)}, and the config.json of Hugging Face's"
        raise ConfigError(f"--model {name}: not known.{did_you_mean(name, list(known)) or others}")
    return known[name]


def _check(name: str, config: Any) -> None:
    """Check the sizes of a language model. Raises ConfigError."""
    problems = config.problems()
    if config.n_layers > MOST_LAYERS:
        problems.append(f"{config.n_layers:,} layers; up to {MOST_LAYERS:,} are planned")
    if config.n_experts * config.n_layers > LARGEST:
        problems.append(f"{config.n_experts} experts in {config.n_layers} layers: together more than {LARGEST:,}")
    if problems:
        raise ConfigError(f"--model {name}: {'; '.join(problems)}")


def _hugging_face(path: Path) -> tuple[ModelDef, Any, tuple[str, ...]]:
    """The model of a config.json (or of its folder), its sizes, and the flags of its program.

    The program starts from the weights next to the config.json, because flags cannot say all that the file says.
    """
    file = path / "config.json" if path.is_dir() else path
    data = read_json(file, ConfigError, name=f"--model {path}")
    try:
        definition, names, config = known_model(data, file)
        sizes = names.read(config, file)
        # A file may come from anywhere: a huge size would take all memory.
        for name, value in sizes.items():
            if isinstance(value, int) and value > LARGEST:
                raise ConfigError(f"{name} is {value}; it must be at most {LARGEST:,}")
        return definition, config_from(definition, sizes), ("--init_from", str(file.parent))
    except ValueError as error:
        # All errors of this package are ValueErrors.
        raise ConfigError(f"--model {path}: {error}") from None
