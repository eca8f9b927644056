"""Small, complete examples of slime's hooks, to copy from.

A package of yours that is called `examples` too stays importable from here (`python train.py` in this folder): its
modules come first.
"""

import sys
from pathlib import Path
from pkgutil import extend_path
from types import ModuleType

_OURS = list(__path__)
_THEIRS = [folder for folder in extend_path(__path__, __name__) if folder not in _OURS]
__path__ = _THEIRS + _OURS

for _found in sorted(path for folder in _THEIRS for path in Path(folder).glob("*/")):
    if not (_found / "__init__.py").exists() and Path(_OURS[0], f"{_found.name}.py").exists():
        # Python would take our file, since it prefers a module to a folder without `__init__.py`.
        _module = ModuleType(f"{__name__}.{_found.name}")
        _module.__path__ = [str(_found)]
        sys.modules[_module.__name__] = _module
