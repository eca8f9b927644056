"""From given values to `Args`: defaults, the checkpoint's architecture, derivations, what has no effect, checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.settings.architecture import take_architecture
from slime.settings.args import Args
from slime.settings.components import Components, entries_named_in
from slime.settings.cross_rules import a_step_is_finite, held_out_files_exist
from slime.settings.custom_yaml import FREE, Given
from slime.settings.effects import engine_settings_without_effect, own_settings_without_effect
from slime.settings.group import Passed
from slime.settings.groups import GROUPS
from slime.settings.megatron_defaults import SLIME_DEFAULTS
from slime.settings.passthrough import Passthrough
from slime.settings.problems import refuse
from slime.settings.resolver import Resolver
from slime.settings.schema import flags_of_owner
from slime.settings.table import components as slime_components
from slime.settings.validation import check_required, given_out_of_range, validate


def resolve(
    given: Given,
    *,
    components: Components,
    origins: Mapping[tuple[str, str], str],
    custom: Mapping[str, Any],
    synchronous: bool = True,
) -> Args:
    """The settings of a run. Raises one `ConfigError` for everything that cannot work.

    `given` and `origins`: values and where each was given, by (owner, dest); `custom`: the user's own settings;
    `synchronous`: the loop is train.py's, not train_async.py's.
    """
    values = {_spelled(owner, dest): value for (owner, dest), value in given.items()}
    where = {_spelled(owner, dest): text for (owner, dest), text in origins.items()}
    resolver = resolver_of(components, values, where)
    check_required(resolver, components)
    list(components.chosen(resolver))  # a name that no entry has is an error, whether it would act or not
    too_many = a_step_is_finite(resolver)
    refuse([*given_out_of_range(resolver, components), *([too_many] if too_many else [])])  # before what follows
    args, idle, problems = _without_idle(components, values, where)
    if idle.keys() & {"eval_prompt_data", "eval_config"} and (missing := held_out_files_exist(resolver)):
        problems = [*problems, missing]
    router = {dest: value for (owner, dest), value in given.items() if owner == "router"}
    args = args.replace(
        router=Passthrough("router", router),
        custom=Passthrough("custom", custom),
        idle=Passthrough("idle", {**idle, **{n: text for n, text in where.items() if n.startswith(FREE)}}),
        origins=Passthrough("origins", {**args.origins, **{f"router.{n}": where[f"router.{n}"] for n in router}}),
    )
    validate(args, components, synchronous=synchronous, problems=problems)
    return args


def _without_idle(
    components: Components, values: Mapping[str, Any], where: Mapping[str, str]
) -> tuple[Args, dict[str, str], list[str]]:
    """(settings, setting -> why it has no effect, contradictions with the checkpoint).

    What acts on nothing is left out, and what then acts on nothing (a reference without its KL) as well.
    """
    idle: dict[str, str] = {}
    while True:
        resolver = resolver_of(components, {name: v for name, v in values.items() if name not in idle}, where)
        problems, found = take_architecture(resolver)
        args = _args(resolver)
        found |= own_settings_without_effect(resolver, components)
        found |= engine_settings_without_effect(args, flags_of_owner("megatron"))
        if not found:
            return args, idle, problems
        idle |= found


def resolver_of(components: Components, given: Mapping[str, Any], where: Mapping[str, str]) -> Resolver:
    """Of the values given on the command line and in the file; the checkpoint's architecture is not in it yet."""
    return Resolver(components, given, origins=where, megatron=megatron_defaults(components), passed=_passed())


def assemble(given: Mapping[str, Any], *, megatron: Mapping[str, Any]) -> Args:
    """`Args` of given values by name, derivations included: without a command line, a checkpoint or any check.

    `megatron` is taken as it is. What has neither a given value nor a default is None. For tests and notebooks that
    need the settings of a part.
    """
    named = entries_named_in(given, slime_components())
    components = slime_components(tuple((setting, path) for setting, paths in named.items() for path in paths))
    unknown = [name for name in given if not components.knows(name)]
    assert not unknown, f"no settings of slime: {unknown}"
    resolver = Resolver(
        components,
        dict(given),
        origins=dict.fromkeys(given, "given"),
        megatron={name: (value, "given") for name, value in megatron.items()},
        passed={},
    )
    return _args(resolver)


def megatron_defaults(components: Components) -> dict[str, tuple[Any, str]]:
    """Megatron's settings that slime does not declare -> default and whose it is."""
    out: dict[str, tuple[Any, str]] = {
        flag.dest: (flag.default, "default of Megatron")
        for flag in flags_of_owner("megatron")
        if flag.dest not in components.own
    }
    return out | {name: (value, f"default of slime: {why}") for name, (value, why) in SLIME_DEFAULTS.items()}


def _spelled(owner: str, dest: str) -> str:
    return dest if owner == "slime" else f"{owner}.{dest}"


def _passed() -> dict[tuple[str, str], Passed]:
    rules = [rule for group in GROUPS for rule in group.passed]
    out: dict[tuple[str, str], Passed] = {(rule.owner, rule.name): rule for rule in rules}
    assert len(out) == len(rules), "a setting of an engine is derived in two places"
    return out


def _args(resolver: Resolver) -> Args:
    """Every setting, resolved."""
    components = resolver.components
    values: dict[str, Any] = {name: getattr(resolver, name) for name in components.own}
    of_entries = {name: getattr(resolver, name) for name in components.of_entries()}
    values["components"] = Passthrough("components", of_entries)
    for owner in ("megatron", "sglang"):
        values[owner] = Passthrough(owner, getattr(resolver, owner))
    return Args(**values, origins=Passthrough("origins", resolver.origins))
