"""`Args`: every resolved setting of a run, flat, typed, frozen and picklable.

Invariants
1. Every setting has its final value. A setting that the user did not set has its default or a derived value; `origins`
   records which one, and why.
2. `getattr(args, name)` looks up slime's own fields first, then registry entries' settings, then Megatron's, then the
   user's `custom` ones.
3. A JSON round trip preserves everything except secrets.
4. User code receives a copy (`for_hook`), so nothing else sees its changes.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from slime.core.errors import ConfigError
from slime.core.text import HIDDEN, nearest
from slime.settings.groups.algorithm import (
    AlgorithmSettings,
    CriticSettings,
    OffPolicySettings,
    RoutingSettings,
    TeacherSettings,
)
from slime.settings.groups.cluster import ClusterSettings, FleetSettings
from slime.settings.groups.data import DataSettings, ImageSettings
from slime.settings.groups.engines import ServingSettings, SpeculationSettings, TopologySettings
from slime.settings.groups.evaluation import EvalSettings
from slime.settings.groups.hooks import HookSettings
from slime.settings.groups.launch_scripts import LaunchScriptSettings
from slime.settings.groups.logging import ConfigurationSettings, DebugSettings, LoggingSettings, ProfilingSettings
from slime.settings.groups.reward import AgentSettings, RewardSettings
from slime.settings.groups.rollout import RolloutSettings, ScheduleSettings
from slime.settings.groups.training import CheckpointSettings, ParameterSettings, TrainingSettings
from slime.settings.groups.weights import QuantisedSettings, WeightSyncSettings

logger = logging.getLogger(__name__)


class Passthrough(Mapping[str, Any]):
    """A read-only, picklable mapping from field name to value, for one owner's settings.

    Values are JSON data; `dict(settings)` is a plain copy. The error for a missing key suggests a similar name.
    """

    __slots__ = ("_owner", "_values")

    def __init__(self, owner: str, values: Mapping[str, Any]) -> None:
        self._owner = owner
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            near = nearest(name, self._values)
            hint = f"; did you mean {near!r}?" if near else ""
            raise KeyError(f"args.{self._owner} has no setting {name!r}{hint}") from None

    def get(self, name: str, default: Any = None) -> Any:
        """Works like `dict.get`. Called in every step, so it does not search for a similar name."""
        return self._values.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Passthrough({self._owner!r}, {self._values!r})"

    def __reduce__(self) -> tuple[type[Passthrough], tuple[str, dict[str, Any]]]:
        return Passthrough, (self._owner, self._values)


MAPPINGS = ("components", "megatron", "sglang", "router", "custom", "critic", "idle", "for_functions", "origins")
"""Fields of `Args` that hold other owners' settings, or metadata about settings."""
NOT_A_SETTING = ("command",)
"""Fields of `Args` that record where its values came from."""
_BEHIND = ("components", "megatron", "custom")
"""Mappings searched on attribute access, in this order."""


@dataclass(frozen=True, kw_only=True)
class Args(
    ClusterSettings,
    RolloutSettings,
    ScheduleSettings,
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
    """All settings of one run. User hooks receive a copy as `args` (`for_hook`)."""

    components: Passthrough = field(default_factory=lambda: Passthrough("components", {}))
    """Settings of registry entries, such as the advantage estimator, by name."""
    megatron: Passthrough = field(default_factory=lambda: Passthrough("megatron", {}))
    """Every Megatron setting by config field name, including the architecture. Dtypes and enums are stored by name."""
    sglang: Passthrough = field(default_factory=lambda: Passthrough("sglang", {}))
    """ServerArgs fields set with --sglang-*, and the dtype."""
    router: Passthrough = field(default_factory=lambda: Passthrough("router", {}))
    """Router settings set with --router-*."""
    custom: Passthrough = field(default_factory=lambda: Passthrough("custom", {}))
    """The user's own settings: the key `custom` and the unknown keys of --custom-config-path."""
    critic: Passthrough = field(default_factory=lambda: Passthrough("critic", {}))
    """Megatron settings of the critic that differ from the policy's; applied by `slime.settings.roles.critic_args`."""
    command: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The command line, starting with `slime train`, including secrets. Not written to `args.json`."""
    idle: Passthrough = field(default_factory=lambda: Passthrough("idle", {}), compare=False)
    """Setting -> value and reason, for settings that the user set but that have no effect."""
    for_functions: Passthrough = field(default_factory=lambda: Passthrough("for_functions", {}), compare=False)
    """Setting -> value, for settings without effect that only the run's user functions may read. Only `for_hook` shows
    these values as attributes."""
    origins: Passthrough = field(default_factory=lambda: Passthrough("origins", {}), compare=False, repr=False)
    """Setting -> where its value came from: default, command line, HF config, derived (and why)."""

    if not TYPE_CHECKING:  # type checkers see only the fields; lookup in the mappings is for user hooks

        def __getattr__(self, name: str) -> Any:
            # Python calls this only for names that are not fields. pickle and copy look up dunder names before
            # `__dict__` is filled, and those lookups must fail.
            if not name.startswith("__"):
                for owner in _BEHIND:
                    settings = self.__dict__.get(owner)
                    if settings is not None and name in settings:
                        return settings[name]
            raise AttributeError(f"args has no setting {name!r}")

    def was_given(self, name: str) -> bool:
        """Returns whether the user set this on the command line or in a file. Engine settings are `owner.name`."""
        return not self.origins.get(name, "default").startswith(("default", "derived", "HF config"))

    def replace(self, **changes: Any) -> Args:
        """Returns a copy with changed values. Settings of registry entries and Megatron can be passed by name.

        Does not derive or check anything else. Raises `ConfigError` for an unknown name.
        """
        own = {f.name for f in dataclasses.fields(self)}
        for owner in ("components", "megatron"):
            mapping = getattr(self, owner)
            inner = {name: changes.pop(name) for name in list(changes) if name not in own and name in mapping}
            if inner:
                changes[owner] = Passthrough(owner, {**changes.get(owner, mapping), **inner})
        if unknown := set(changes) - own:
            raise ConfigError(f"Args.replace got unknown settings {sorted(unknown)}; correct the names")
        return dataclasses.replace(self, **changes)

    def without_secrets(self) -> Args:
        """Returns a copy without secrets, for code that must not see keys.

        slime's secret settings become None; secrets of engines and the router are removed. The command line and the
        environment variables of training processes may hold secrets, so both are removed too.
        """
        from slime.settings.all_flags import components_of, secret_settings

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
        """Returns all settings and the evaluation datasets as JSON data, with secrets masked."""
        from slime.settings.all_flags import components_of, secret_settings
        from slime.settings.eval_config import eval_datasets

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


class HookArgs(Args):
    """The `args` for one call to a user function, which may set and delete attributes."""

    if not TYPE_CHECKING:  # frozen for type checkers

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                found = None if name.startswith("_") else _as_public(self, name)
                if found is None:
                    raise
                return found[0]

        def __setattr__(self, name: str, value: Any) -> None:
            if name not in _TOLD and hasattr(self, name) and _is_setting(self, name):
                _TOLD.add(name)
                logger.warning("a function set args.%s; the new value applies only to that call of the function", name)
            self.__dict__[name] = value

        def __delattr__(self, name: str) -> None:
            if name not in self.__dict__:
                raise AttributeError(f"args has no attribute {name!r} of its own")
            del self.__dict__[name]


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")
    return distributed.get_rank() if distributed is not None and distributed.is_initialized() else 0


def _eval_datasets(args: Args) -> list[Any]:
    from slime.settings.eval_config import eval_datasets

    return list(eval_datasets(args))


def _uses_critic(args: Args) -> bool:
    from slime.settings.conditions import estimator_of

    return bool(estimator_of(args).needs_critic)


_PUBLIC: Mapping[str, Callable[[Args], Any]] = {
    "eval_datasets": _eval_datasets,
    "num_experts": lambda args: args.megatron.get("num_moe_experts"),
    "rank": lambda _: _rank(),
    "rollout_external": lambda args: bool(args.rollout_external_engine_addrs),
    "rollout_global_dataset": lambda args: not args.disable_rollout_global_dataset,
    "sglang_tp_size": lambda args: args.rollout_num_gpus_per_engine // (args.sglang.get("pp_size") or 1),
    "use_critic": _uses_critic,
    "world_size": lambda args: args.actor_num_nodes * args.actor_num_gpus_per_node,
    **dict.fromkeys(("use_distributed_post", "use_stateless_adam"), lambda _: False),
    **dict.fromkeys(
        (
            *("custom_model_provider_path", "load_forge_rollout_data", "opd_teacher_ckpt_step", "ref_ckpt_step"),
            *(
                f"megatron_deepgemm_{part}_{what}"
                for part in ("forward", "moe_forward")
                for what in ("layers", "modules")
            ),
        ),
        lambda _: None,
    ),
}
"""Attributes of the public slime's `args` that are not settings here -> their values. Features that this package does
not have are off.
"""


def _as_public(args: Args, name: str) -> tuple[Any] | None:
    """Returns the value of an attribute that the public slime's `args` has, in a tuple; None for other names.

    Settings of SGLang and of the router that the user did not set have their own defaults.
    """
    from slime.settings.schema import flags_of_owner

    if name in _PUBLIC:
        return (_PUBLIC[name](args),)
    for prefix, owner in (("sglang_router_", "router"), ("router_", "router"), ("sglang_", "sglang")):
        if name.startswith(prefix):
            dest = name.removeprefix(prefix)
            defaults = {flag.dest: flag.default for flag in flags_of_owner(owner)}
            if dest in defaults:
                return (getattr(args, owner).get(dest, defaults[dest]),)
    return None


_TOLD: set[str] = set()
"""Settings whose warning has been logged."""
T = TypeVar("T")


def for_hook(settings: T) -> T:
    """Returns a copy of `settings` for one call to a user function, and anything other than `Args` unchanged."""
    if not isinstance(settings, Args):
        return settings
    view: Any = HookArgs.__new__(HookArgs)
    view.__dict__.update(settings.__dict__)
    view.__dict__.update({name: value for name, value in settings.for_functions.items() if "." not in name})
    return view


def _is_setting(args: Args, name: str) -> bool:
    own = {one.name for one in dataclasses.fields(args)}
    return name in own or any(name in getattr(args, owner) for owner in _BEHIND)


def _masked(value: Any, secret: bool) -> Any:
    return HIDDEN if secret and value is not None else value
