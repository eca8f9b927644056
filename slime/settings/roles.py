"""`--megatron-config-path`: Megatron settings for a single role, the policy or the critic.

The file has a list under `megatron`, with at most one entry per role:

    megatron:
      - name: value model
        role: critic
        overrides: {lr: 1.0e-5, lr_warmup_iters: 10}

An override replaces the command line's value for its role, and is parsed like a flag. Each role is resolved and checked
like a full run, with the critic's learning rate as its `lr`. Both roles share ranks, batches and model, so the file can
only repeat the run's values for those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.core.errors import ConfigError
from slime.core.user_files import read_yaml
from slime.settings.args import Args, Passthrough
from slime.settings.conditions import ADVANTAGES, CRITIC
from slime.settings.custom_yaml import Given, setting_of
from slime.settings.flag_parser import FlagTable
from slime.settings.flags import refuse, shown
from slime.settings.resolve import without_effect

_FLAG = "--megatron-config-path"
_ROLES = ("actor", "critic")
_ENTRY = ("name", "role", "overrides", "args")

MAY_DIFFER = (
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"),
    *("lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init"),
    *("lr_wsd_decay_iters", "lr_wsd_decay_style"),
    *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
    *("adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
    *("optimizer_cpu_offload", "optimizer_offload_fraction", "use_precision_aware_optimizer"),
    *("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("overlap_grad_reduce", "bucket_size"),
)
"""Settings that may differ between roles: optimizer, schedule, and how forward and backward passes save memory."""
_OF_CRITIC = {"lr": "critic_lr", "load": "critic_load"}
"""Name in the critic's entry -> equivalent setting on the command line."""
_PLACES = ("num_nodes", "num_gpus_per_node")
"""Keys of the public format that have no effect here, because both roles run on the same ranks."""
_RATE, _FLOOR = ("megatron", "lr"), ("megatron", "min_lr")
_LAYOUT = ("parallel", "pipeline", "context", "stage")
"""Words in the names of settings that split the model over ranks."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """An override of a setting that both roles share."""

    key: tuple[str, str]
    """(owner, dest)"""
    value: Any
    otherwise: str
    """The error message if the run has a different value."""


@dataclass(frozen=True, slots=True)
class _Role:
    """One entry of the file."""

    given: Given
    idle: Mapping[str, str]
    """Setting -> value and why it has no effect."""
    shared: tuple[_Shared, ...] = ()


def resolve_roles(
    given: Given, *, table: FlagTable, origins: Mapping[tuple[str, str], str], resolve: Callable[..., Args]
) -> Args:
    """Returns the settings of a run, including the per-role settings of `--megatron-config-path`.

    `given` and `origins` hold the user's values and where they were set; `resolve` is `slime.settings.resolve.resolve`.
    Raises `ConfigError`.
    """
    path = given.get(("slime", "megatron_config_path"))
    if path is None:
        return resolve(given, origins=origins)
    roles = _read(path, table, given)

    def of(role: str) -> Args:
        own = roles[role].given if role in roles else {}
        values = {**given, **own}
        where: Mapping[tuple[str, str], str] = {**origins, **dict.fromkeys(own, f"{path}, role {role}")}
        if role == "critic":
            values, where = _at_its_rate(values, where, floor_is_own=_FLOOR in own)
        try:
            return resolve(values, origins=where)
        except ConfigError as error:
            raise ConfigError(f"with the values in {path} for role {role}: {error}") from None

    args = of("actor")
    refuse([line.otherwise for role in roles.values() for line in role.shared if not _repeats(line, args, given)])
    told = {f"{role}.{name}": text for role, entry in roles.items() for name, text in entry.idle.items()}
    missing = next((need.clause for need in (ADVANTAGES, CRITIC) if not need.acts(args)), None)
    if missing is None:
        args, more = _with_critic(args, of("critic"), roles.get("critic"))
        told |= more
    elif "critic" in roles:
        values = roles["critic"].given
        told |= {f"critic.{name.removeprefix('critic_')}": f"{value}, {missing}" for (_, name), value in values.items()}
    if told:
        args = args.replace(idle=Passthrough("idle", {**args.idle, **told}))
        refuse(list(without_effect(args)))
    return args


def _at_its_rate(
    given: Given, origins: Mapping[tuple[str, str], str], *, floor_is_own: bool
) -> tuple[Given, Mapping[tuple[str, str], str]]:
    """Returns values and origins with `lr` set to the critic's learning rate, if the user set one.

    A `min_lr` that the critic shares with the policy is lowered to that rate, as in `critic_args`.
    """
    of_critic = ("slime", "critic_lr")
    if of_critic not in given:
        return given, origins
    rate, why = given[of_critic], origins[of_critic]
    given, origins = {**given, _RATE: rate}, {**origins, _RATE: why}
    if not floor_is_own and (given.get(_FLOOR) or 0.0) > rate:
        given, origins = {**given, _FLOOR: rate}, {**origins, _FLOOR: f"derived: critic_lr, from {why}, is lower"}
    return given, origins


def _repeats(line: _Shared, args: Args, given: Given) -> bool:
    """Returns whether the override equals the run's value, either as the user wrote it or resolved."""
    owner, dest = line.key
    has = getattr(args, owner).get(dest) if owner in ("megatron", "sglang", "router") else getattr(args, dest)
    return bool(line.value == has or (line.key in given and given[line.key] == line.value))


def critic_args(args: Args) -> Args:
    """Returns the run's settings with the critic's values instead of the policy's."""
    rate = float(args.critic_lr)
    own = Passthrough("megatron", {**args.megatron, **args.critic, "lr": rate})
    return args.replace(megatron=own).replace(min_lr=min(float(own["min_lr"]), rate))


def _with_critic(args: Args, critic: Args, entry: _Role | None) -> tuple[Args, dict[str, str]]:
    """Returns (the policy's settings with `Args.critic` filled in, the critic's settings without effect)."""
    apart = [n for n in MAY_DIFFER if n != "lr" and critic.megatron.get(n) != args.megatron.get(n)]
    origins = {f"critic.{n}": critic.origins.get(f"megatron.{n}", "default") for n in apart}
    shared = ("critic_lr", "critic_load")
    origins |= {name: critic.origins[name] for name in shared}
    own = () if entry is None else entry.given
    idle = {f"critic.{name}": critic.idle[f"megatron.{name}"] for _, name in own if f"megatron.{name}" in critic.idle}
    changed = args.replace(
        critic=Passthrough("critic", {n: critic.megatron.get(n) for n in apart}),
        origins=Passthrough("origins", {**args.origins, **origins}),
        **{name: getattr(critic, name) for name in shared},
    )
    return changed, idle


def _read(path: str, table: FlagTable, given: Given) -> dict[str, _Role]:
    """Reads the entries by role. Raises one `ConfigError` that lists all problems."""
    content = read_yaml(path, _FLAG)
    entries = content.get("megatron")
    if set(content) != {"megatron"} or not isinstance(entries, list):
        raise ConfigError(
            f"{path} has the keys {sorted(map(str, content))}, but must have only the key megatron, with a list of "
            "entries with role and overrides"
        )
    roles: dict[str, _Role] = {}
    problems: list[str] = []
    for number, entry in enumerate(entries):
        where = f"{path}: megatron[{number}]"
        try:
            role, values = _entry(entry, where)
            if role in roles:
                raise ConfigError(f"{where} is a second entry for role {role}; write one entry per role")
            roles[role] = _role(role, values, table, given, where=f"{where}.overrides")
        except ConfigError as error:
            problems.append(str(error))
    refuse(problems)
    return roles


def _entry(entry: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    """Returns the role and overrides of an entry. Raises `ConfigError` for a malformed entry."""
    if not isinstance(entry, dict) or entry.get("role") not in _ROLES:
        role = entry.get("role") if isinstance(entry, dict) else entry
        raise ConfigError(f"{where} has the role {role!r}; set role to {' or '.join(_ROLES)}, and add overrides")
    if unknown := [str(key) for key in entry if key not in _ENTRY]:
        raise ConfigError(f"{where} has the unknown keys {', '.join(unknown)}; choose from {', '.join(_ENTRY)}")
    given = [key for key in ("overrides", "args") if key in entry]
    values = entry[given[0]] if given else {}
    if len(given) > 1 or not isinstance(values, dict):
        raise ConfigError(f"{where} has {' and '.join(given)} {values!r}; write overrides as one mapping")
    return str(entry["role"]), values


def _role(role: str, values: Mapping[str, Any], table: FlagTable, given: Given, *, where: str) -> _Role:
    """Parses the overrides of an entry. Raises one `ConfigError` that lists all problems."""
    own: Given = {}
    idle: dict[str, str] = {}
    shared: list[_Shared] = []
    problems: list[str] = []
    for key, value in values.items():
        name = str(key)
        if name in _PLACES:
            idle[name] = f"{value}, which needs separate ranks; policy and critic share ranks"
            continue
        if role == "critic" and name == "save":
            idle[name] = f"{value}, which needs separate checkpoints; each checkpoint in --save holds both roles"
            continue
        try:
            found = _setting(role, name, value, table, given, where=f"{where}.{name}")
        except ConfigError as error:
            problems.append(str(error))
            continue
        if isinstance(found, _Shared):
            shared.append(found)
        else:
            own[found[0]] = found[1]
    refuse(problems)
    return _Role(own, idle, tuple(shared))


def _setting(
    role: str, name: str, value: Any, table: FlagTable, given: Given, *, where: str
) -> tuple[tuple[str, str], Any] | _Shared:
    """Returns ((owner, dest), value) of one override, or `_Shared` for a setting that roles share.

    Raises `ConfigError` for an unknown name or an invalid value.
    """
    aliases = _OF_CRITIC if role == "critic" else {}
    found = table.by_name.get("--" + name.replace("_", "-"))
    dest = found[0].dest if found is not None else name
    if dest in aliases:
        return setting_of(table, aliases[dest], value, given, where=where)
    if dest in MAY_DIFFER:
        return setting_of(table, name, value, {}, where=where)
    if found is None:
        near = table.nearest("--" + name.replace("_", "-"))
        hint = f"did you mean {near[2:].replace('-', '_')}?" if near else f"a role can set {', '.join(MAY_DIFFER)}"
        raise ConfigError(f"{where} is not a setting; {hint}")
    shared = "the parallel layout" if any(w in dest for w in _LAYOUT) else "this setting"
    key, typed = setting_of(table, name, value, {}, where=where)
    wrong = f"{where} is {shown(found[0], typed)}, but the run has a different value, and both roles share {shared}"
    return _Shared(key, typed, f"{wrong}; set it with a flag")
