"""Adapters for frameworks that keep their state elsewhere.

Each imports its framework. So an adapter is imported only when it is used.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

from mmm_verify.adapter import Adapter
from mmm_verify.errors import ConfigError
from mmm_verify.subject import load_object


def adapter_names() -> list[str]:
    """The names that --adapter knows: the modules in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_adapter(spec: str) -> Adapter:
    """Load the adapter of a framework by its name, or one of a user's by ``module:name``.

    Raises:
        ConfigError: there is no such adapter.
    """
    if ":" in spec:
        adapter = load_object(spec, "--adapter")
    elif spec in adapter_names():
        try:
            adapter = importlib.import_module(f"{__name__}.{spec}").ADAPTER
        except ModuleNotFoundError as error:
            raise ConfigError(f"--adapter {spec}: {error.name} is not installed in {sys.executable}") from None
    else:
        raise ConfigError(
            f"--adapter {spec}: the frameworks known are {', '.join(adapter_names()) or 'none'}; for an Adapter of "
            "yours write MODULE:NAME"
        )
    if not isinstance(adapter, Adapter):
        raise ConfigError(f"--adapter {spec}: it is {type(adapter).__name__}, and has to be an mmm_verify.Adapter")
    return adapter
