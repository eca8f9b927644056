"""Tells transformers how to read a config.json whose `model_type` it has no class for, though SGLang serves the model.

SGLang reads a model's config with transformers' `AutoConfig`. Released folders of such a model bring a class as code,
which is not run here (Law 10). SGLang registers its own classes with `AutoConfig`, DeepSeek-V3's for Kimi-K2 among
them, and forgets MiMo, whose config has the keys of Qwen2. The class is registered in transformers' own way. To be
removed when transformers or SGLang has one.
"""

from __future__ import annotations

import json
from pathlib import Path

PATH_FLAG = "--model-path"
READ_AS = {"mimo": "Qwen2Config"}
"""`model_type` -> the class of transformers whose keys its config.json has."""


def unnamed_type(model_path: str) -> str | None:
    """The `model_type` of a folder, if it has to be registered."""
    config = Path(model_path) / "config.json"
    found = json.loads(config.read_text()).get("model_type") if config.is_file() else None
    return found if found in READ_AS else None


def register(model_type: str) -> None:
    """Call before SGLang reads the config; again: no second time."""
    import transformers

    base = getattr(transformers, READ_AS[model_type])
    own = type(f"{model_type.title()}Config", (base,), {"model_type": model_type, "__module__": __name__})
    transformers.AutoConfig.register(model_type, own, exist_ok=True)
