"""Makes SGLang read model configs correctly: config classes missing from transformers, and the served dtype.

SGLang reads model configs with transformers' `AutoConfig`. Released checkpoints of such models include their config
class as code, which slime does not run (law 10). SGLang registers some classes with `AutoConfig`, such as DeepSeek-V3's
for Kimi-K2, but none for MiMo, whose config has the same keys as Qwen2's. Remove `register` when transformers or SGLang
registers a class for MiMo.

SGLang keeps some parameters of gpt-oss and Qwen3-Next in the dtype of the config, whatever `--dtype` says. If a float32
checkpoint is served in bfloat16, these stay in float32, and their digests differ from the trainer's. `serve_dtype`
changes the dtype in the config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slime.compat import Hook

PATH_FLAG = "--model-path"
READ_AS = {"mimo": "Qwen2Config"}
"""Maps a `model_type` to a transformers class with the same config keys."""


FROM_CONFIG = ("gpt_oss", "qwen3_next")
"""The `model_type`s whose parameters SGLang creates in the config's dtype."""


def serve_dtype(_result: Any, model_config: Any, *_: Any, **__: Any) -> None:
    """Gives the config the dtype in which SGLang serves the model."""
    for config in (model_config.hf_config, model_config.hf_text_config):
        if config.model_type in FROM_CONFIG:
            config.dtype = model_config.dtype


HOOKS = (Hook("AFTER", "sglang.srt.configs.model_config.ModelConfig.__init__", serve_dtype),)


def model_type_of(model_path: str) -> str | None:
    """Returns the checkpoint's `model_type`, or None for a path without a config."""
    config = Path(model_path) / "config.json"
    return json.loads(config.read_text()).get("model_type") if config.is_file() else None


def unnamed_type(model_path: str) -> str | None:
    """Returns the checkpoint's `model_type` if it needs to be registered, else None."""
    found = model_type_of(model_path)
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
