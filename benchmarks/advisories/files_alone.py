"""Files of a package are imported without the __init__.py of the folders above them, which import much more."""

import sys
from importlib.util import find_spec
from types import ModuleType


def skip_init(*names):
    """Let these packages be there, empty, so that files in them can be imported. The first one is the uppermost."""
    if names[0] in sys.modules:
        return
    folder = find_spec(names[0]).submodule_search_locations[0]
    for name in names:
        package = ModuleType(name)
        package.__path__ = [folder + name.removeprefix(names[0]).replace(".", "/")]
        sys.modules[name] = package
