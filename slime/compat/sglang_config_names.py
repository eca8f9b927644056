"""Registers config classes with transformers for models that SGLang serves but transformers does not know.

SGLang reads a model's config with transformers' `AutoConfig`. Released checkpoints of such a model contain a config
class as code, which slime does not run (law 10). SGLang registers some classes with `AutoConfig`, for example
DeepSeek-V3's for Kimi-K2, but none for MiMo, which has the config keys of Qwen2. Remove this module when transformers
or SGLang registers a class for MiMo.
"""

from __future__ import annotations

import json
from pathlib import Path

PATH_FLAG = "--model-path"
READ_AS = {"mimo": "Qwen2Config"}
"""`model_type` -> the transformers class with the keys of this model's config.json."""


def unnamed_type(model_path: str) -> str | None:
    """Returns the folder's `model_type` if it must be registered, else None."""
    config = Path(model_path) / "config.json"
    found = json.loads(config.read_text()).get("model_type") if config.is_file() else None
    return found if found in READ_AS else None


def register(model_type: str) -> None:
    """Registers a config class for `model_type`. Call this before SGLang reads the config. Idempotent."""
    import transformers

    base = getattr(transformers, READ_AS[model_type])
    own = type(f"{model_type.title()}Config", (base,), {"model_type": model_type, "__module__": __name__})
    transformers.AutoConfig.register(model_type, own, exist_ok=True)
