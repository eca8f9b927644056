"""`Args`: every resolved setting of a run, flat, typed, frozen and picklable.

Invariants
1. Nothing in it is unresolved: what the user left out is a default or derived; `origins` says which and why.
2. `getattr(args, name)` finds slime's own fields first, then the settings of registries' entries, then Megatron's,
   then the user's `custom` ones.
3. Written as JSON and read back it is equal, secrets aside.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.text import HIDDEN
from slime.settings.groups.agent import AgentSettings
from slime.settings.groups.algorithm import AlgorithmSettings
from slime.settings.groups.checkpoint import CheckpointSettings
from slime.settings.groups.cluster import ClusterSettings
from slime.settings.groups.configuration import ConfigurationSettings
from slime.settings.groups.critic import CriticSettings
from slime.settings.groups.data import DataSettings
from slime.settings.groups.debug import DebugSettings
from slime.settings.groups.evaluation import EvalSettings
from slime.settings.groups.fleet import FleetSettings
from slime.settings.groups.hooks import HookSettings
from slime.settings.groups.images import ImageSettings
from slime.settings.groups.launch_scripts import LaunchScriptSettings
from slime.settings.groups.logging import LoggingSettings
from slime.settings.groups.off_policy import OffPolicySettings
from slime.settings.groups.parameters import ParameterSettings
from slime.settings.groups.profiling import ProfilingSettings
from slime.settings.groups.quantised import QuantisedSettings
from slime.settings.groups.reward import RewardSettings
from slime.settings.groups.rollout import RolloutSettings
from slime.settings.groups.routing import RoutingSettings
from slime.settings.groups.serving import ServingSettings
from slime.settings.groups.speculation import SpeculationSettings
from slime.settings.groups.teacher import TeacherSettings
from slime.settings.groups.topology import TopologySettings
from slime.settings.groups.training import TrainingSettings
from slime.settings.groups.weights import WeightSyncSettings
from slime.settings.passthrough import Passthrough

MAPPINGS = ("components", "megatron", "sglang", "router", "custom", "critic", "idle", "origins")
"""The fields of `Args` that hold settings of others, or what is known about settings."""
NOT_A_SETTING = ("command",)
"""Fields of `Args` that say how it came to be."""
_BEHIND = ("components", "megatron", "custom")
"""Mappings whose settings are attributes as well, in this order."""


@dataclass(frozen=True, kw_only=True)
class Args(
    ClusterSettings,
    RolloutSettings,
    DataSettings,
    ImageSettings,
    EvalSettings,
    RewardSettings,
    AgentSettings,
    AlgorithmSettings,
    OffPolicySettings,
    RoutingSettings,
    SpeculationSettings,
    TeacherSettings,
    CriticSettings,
    ParameterSettings,
    TrainingSettings,
    CheckpointSettings,
    WeightSyncSettings,
    QuantisedSettings,
    ServingSettings,
    TopologySettings,
    FleetSettings,
    LoggingSettings,
    DebugSettings,
    ProfilingSettings,
    HookSettings,
    LaunchScriptSettings,
    ConfigurationSettings,
):
    """All settings of one run. User hooks receive it as `args`."""

    components: Passthrough = field(default_factory=lambda: Passthrough("components", {}))
    """The settings of registries' entries (an estimator's, a loss's), by name."""
    megatron: Passthrough = field(default_factory=lambda: Passthrough("megatron", {}))
    """Every Megatron setting by config field name, the architecture included; dtypes and enums by name."""
    sglang: Passthrough = field(default_factory=lambda: Passthrough("sglang", {}))
    """ServerArgs fields that the user gave with --sglang-*, and the dtype."""
    router: Passthrough = field(default_factory=lambda: Passthrough("router", {}))
    """Router settings that the user gave with --router-*."""
    custom: Passthrough = field(default_factory=lambda: Passthrough("custom", {}))
    """The user's own settings, from the key `custom` of --custom-config-path."""
    critic: Passthrough = field(default_factory=lambda: Passthrough("critic", {}))
    """Megatron settings of the critic where they are not the policy's; `slime.settings.roles.critic_args` applies
    them."""
    command: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """`slime train ...`: the command line that means these settings, secrets included; it is not among what `args.json`
    holds."""
    idle: Passthrough = field(default_factory=lambda: Passthrough("idle", {}), compare=False)
    """Setting -> its value and why it has no effect, for settings that were given and act on nothing."""
    origins: Passthrough = field(default_factory=lambda: Passthrough("origins", {}), compare=False, repr=False)
    """Setting -> where its value came from: default, command line, HF config, derived (and why)."""

    if not TYPE_CHECKING:  # strict typing sees the fields only; names behind a mapping are for users' hooks

        def __getattr__(self, name: str) -> Any:
            # Reached only for what is not a field. Dunder lookups (pickle, copy) must fail before `__dict__` is filled.
            if not name.startswith("__"):
                for owner in _BEHIND:
                    settings = self.__dict__.get(owner)
                    if settings is not None and name in settings:
                        return settings[name]
            raise AttributeError(f"args has no setting {name!r}")

    def was_given(self, name: str) -> bool:
        """Whether the user gave a setting, on the command line or in a file (an engine's as `owner.name`)."""
        return not self.origins.get(name, "default").startswith(("default", "derived", "HF config"))

    def replace(self, **changes: Any) -> Args:
        """A copy with other values; settings of entries and of Megatron may be given by name.

        Nothing is derived again or checked. Raises `ConfigError` for an unknown name.
        """
        own = {f.name for f in dataclasses.fields(self)}
        for owner in ("components", "megatron"):
            mapping = getattr(self, owner)
            inner = {name: changes.pop(name) for name in list(changes) if name not in own and name in mapping}
            if inner:
                changes[owner] = Passthrough(owner, {**changes.get(owner, mapping), **inner})
        if unknown := set(changes) - own:
            raise ConfigError(f"got unknown settings {sorted(unknown)} in Args.replace")
        return dataclasses.replace(self, **changes)

    def without_secrets(self) -> Args:
        """A copy for code that is to know no key: secret settings are None, those of engines and router are not there.

        Nor are the command line as it was typed and the variables of training processes, which may hold some.
        """
        from slime.settings.table import components_of, secret_settings

        secrets = secret_settings(components_of(self))
        own = {field.name for field in dataclasses.fields(self)}
        changes: dict[str, Any] = {name: None for owner, name in secrets if owner == "slime" and name in own}
        for name in MAPPINGS:
            owner = "slime" if name == "components" else name
            kept = {k: v for k, v in getattr(self, name).items() if (owner, k) not in secrets}
            hidden = dict.fromkeys(k for k in getattr(self, name) if k not in kept) if name == "components" else {}
            changes[name] = Passthrough(name, {**kept, **hidden})
        return dataclasses.replace(self, **changes, command=(), train_env_vars={})

    def to_json_dict(self) -> dict[str, Any]:
        """A JSON-serialisable copy with secrets masked, and with the evaluation datasets that the settings mean."""
        from slime.settings.eval_config import eval_datasets
        from slime.settings.table import components_of, secret_settings

        secrets = secret_settings(components_of(self))
        out: dict[str, Any] = {"format": 1, "eval_datasets": [dict(vars(one)) for one in eval_datasets(self)]}
        for one in dataclasses.fields(self):
            if one.name in NOT_A_SETTING:
                continue
            value = getattr(self, one.name)
            if one.name in MAPPINGS:
                owner = "slime" if one.name == "components" else one.name
                value = {k: _masked(v, (owner, k) in secrets) for k, v in value.items()}
            out[one.name] = _masked(value, ("slime", one.name) in secrets)
        return out


def _masked(value: Any, secret: bool) -> Any:
    return HIDDEN if secret and value is not None else value
