"""Registers config classes with transformers for models that SGLang serves but transformers does not know.

SGLang reads a model's config with transformers' `AutoConfig`. Released folders of such a model bring a class as code,
which is not run here (law 10). SGLang registers its own classes with `AutoConfig`, for example DeepSeek-V3's for
Kimi-K2, but not one for MiMo, whose config has the keys of Qwen2. Remove it when transformers or SGLang has one.
"""

from __future__ import annotations

import json
from pathlib import Path

PATH_FLAG = "--model-path"
READ_AS = {"mimo": "Qwen2Config"}
"""`model_type` -> transformers class with the keys of its config.json."""


def unnamed_type(model_path: str) -> str | None:
    """The `model_type` of a folder if it must be registered."""
    config = Path(model_path) / "config.json"
    found = json.loads(config.read_text()).get("model_type") if config.is_file() else None
    return found if found in READ_AS else None


def register(model_type: str) -> None:
    """Call before SGLang reads the config. May be called again."""
    import transformers

    base = getattr(transformers, READ_AS[model_type])
    own = type(f"{model_type.title()}Config", (base,), {"model_type": model_type, "__module__": __name__})
    transformers.AutoConfig.register(model_type, own, exist_ok=True)
