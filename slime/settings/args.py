"""`Args`: every resolved setting of a run, flat, typed, frozen and picklable.

Invariants
1. Nothing in it is unresolved: what the user left out is a default or derived; `origins` says which and why.
2. `getattr(args, name)` finds slime's own fields first, then Megatron's settings, then the user's `custom` ones.
3. Written as JSON and read back it is equal, secrets aside.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.settings.groups import (
    AlgorithmArgs,
    CheckpointArgs,
    ClusterArgs,
    CriticArgs,
    DataArgs,
    DebugArgs,
    EvalArgs,
    HookArgs,
    LoggingArgs,
    OffPolicyArgs,
    ParameterArgs,
    RewardArgs,
    RolloutArgs,
    ServingArgs,
    TeacherArgs,
    TrainingArgs,
    WeightSyncArgs,
)
from slime.settings.settings import Settings

MASK = "***"
"""Written in place of a secret."""

_MAPPINGS = ("megatron", "sglang", "router", "custom", "origins")


@dataclass(frozen=True, kw_only=True)
class Args(
    ClusterArgs,
    RolloutArgs,
    DataArgs,
    EvalArgs,
    RewardArgs,
    AlgorithmArgs,
    OffPolicyArgs,
    TeacherArgs,
    CriticArgs,
    ParameterArgs,
    TrainingArgs,
    CheckpointArgs,
    WeightSyncArgs,
    ServingArgs,
    LoggingArgs,
    DebugArgs,
    HookArgs,
):
    """All settings of one run. User hooks receive it as `args`."""

    megatron: Settings = field(default_factory=lambda: Settings("megatron", {}))
    """Every Megatron setting by config field name, the model's shape included; dtypes and enums by name."""
    sglang: Settings = field(default_factory=lambda: Settings("sglang", {}))
    """ServerArgs fields that the user gave with --sglang-*, and the dtype."""
    router: Settings = field(default_factory=lambda: Settings("router", {}))
    """Router settings that the user gave with --router-*."""
    custom: Settings = field(default_factory=lambda: Settings("custom", {}))
    """The user's own settings, from the key `custom` of --custom-config-path."""
    origins: Settings = field(default_factory=lambda: Settings("origins", {}), compare=False, repr=False)
    """Setting -> where its value came from: default, command line, HF config, derived (and why)."""

    if not TYPE_CHECKING:  # strict typing sees the fields only; names behind a mapping are for users' hooks

        def __getattr__(self, name: str) -> Any:
            # Reached only for what is no field. Dunder lookups (pickle, copy) must fail before `__dict__` is filled.
            if not name.startswith("__"):
                for owner in ("megatron", "custom"):
                    settings = self.__dict__.get(owner)
                    if settings is not None and name in settings:
                        return settings[name]
            raise AttributeError(f"args has no setting {name!r}")

    def replace(self, **changes: Any) -> Args:
        """A copy with other values; Megatron's settings may be given by name. Raises `ConfigError` if unknown."""
        own = {f.name for f in dataclasses.fields(self)}
        inner = {k: changes.pop(k) for k in list(changes) if k not in own and k in self.megatron}
        unknown = set(changes) - own
        if unknown:
            raise ConfigError(f"got unknown settings {sorted(unknown)} in Args.replace")
        if inner:
            base = changes.get("megatron", self.megatron)
            changes["megatron"] = Settings("megatron", {**base, **inner})
        return dataclasses.replace(self, **changes)

    def to_json_dict(self) -> dict[str, Any]:
        """A JSON-serialisable copy with secrets masked, and with the evaluation datasets that the settings mean."""
        from slime.settings.eval_config import eval_datasets
        from slime.settings.table import secret_settings

        secrets = secret_settings()
        out: dict[str, Any] = {"format": 1, "eval_datasets": [dict(vars(one)) for one in eval_datasets(self)]}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.name in _MAPPINGS:
                value = {k: _masked(v, (one.name, k) in secrets) for k, v in value.items()}
            out[one.name] = _masked(value, ("slime", one.name) in secrets)
        return out


def _masked(value: Any, secret: bool) -> Any:
    return MASK if secret and value is not None else value
