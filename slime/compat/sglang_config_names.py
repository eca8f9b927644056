"""Registers config classes with transformers for models that SGLang supports but transformers does not.

SGLang reads model configs with transformers' `AutoConfig`. Released checkpoints of such models include their config
class as code, which slime does not run (law 10). SGLang registers some classes with `AutoConfig`, such as DeepSeek-V3's
for Kimi-K2, but none for MiMo, whose config has the same keys as Qwen2's. Remove this module when transformers or
SGLang registers a class for MiMo.
"""

from __future__ import annotations

import json
from pathlib import Path

PATH_FLAG = "--model-path"
READ_AS = {"mimo": "Qwen2Config"}
"""Maps a `model_type` to a transformers class with the same config keys."""


def unnamed_type(model_path: str) -> str | None:
    """Returns the checkpoint's `model_type` if it needs to be registered, else None."""
    config = Path(model_path) / "config.json"
    found = json.loads(config.read_text()).get("model_type") if config.is_file() else None
    return found if found in READ_AS else None


def register(model_type: str) -> None:
    """Registers a config class for `model_type`. Call it before SGLang reads the config. Idempotent."""
    import transformers

    transformers.AutoConfig.register(model_type, __getattr__(f"{model_type.title()}Config"), exist_ok=True)


def __getattr__(name: str) -> type:
    """Makes the config classes attributes of this module, so that spawned schedulers can unpickle a config."""
    model_type = name.removesuffix("Config").lower()
    if name != f"{model_type.title()}Config" or model_type not in READ_AS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import transformers

    base = getattr(transformers, READ_AS[model_type])
    return globals().setdefault(name, type(name, (base,), {"model_type": model_type, "__module__": __name__}))
