"""Resolves the user's values to `Args`: adds defaults, derived values and the checkpoint's architecture, then checks.

Invariants
1. Each setting is computed once, when it is first read, so derivations can be declared in any order. Its origin
   is recorded at the same time.
2. A cycle of derivations raises an error that names the cycle, instead of recursing.
3. A setting without effect is listed when the run starts (refused with --strict). It is then resolved as if the user
   had not set it, so it has no effect wherever it is read.
4. The checkpoint defines the architecture. A flag that agrees with it, in any notation, is accepted. A flag that
   contradicts it is refused, or listed as having no effect if this kind of model does not use it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from slime.core.errors import ConfigError
from slime.core.text import HIDDEN
from slime.settings.all_flags import Components
from slime.settings.args import Args, Passthrough
from slime.settings.custom_yaml import FREE, Given, for_user_functions
from slime.settings.eval_config import unread_keys
from slime.settings.fields import UNSET, Compute, Declared, Need, Passed, Rule, Why, declared, default_of
from slime.settings.flags import ANY, Flag, refuse
from slime.settings.groups import GROUPS
from slime.settings.megatron import FIXED, SLIME_DEFAULTS, need_of
from slime.settings.rules import ASYNC_RULES, IDLE_IN_SYNC, RULES, SYNC_RULES, a_step_is_finite, held_out_files_exist
from slime.settings.schema import architecture_of, contradictions, flags_of_owner


class Resolver:
    """The settings of one run during resolution.

    `s.name` is a setting of slime or of a registry entry, else Megatron's. `s.megatron["name"]` and `s.sglang["name"]`
    are settings of the engines. The user's value takes precedence over the derived value, which takes precedence over
    the default. A field's `adjust` can then replace the value.
    """

    def __init__(
        self,
        components: Components,
        given: Mapping[str, Any],
        *,
        origins: Mapping[str, str],
        megatron: Mapping[str, tuple[Any, str]],
        passed: Mapping[tuple[str, str], Passed],
    ) -> None:
        """Stores the inputs; computes nothing yet.

        `given`: the user's values by name, or by `owner.name` for engines. `origins`: where the user set each.
        `megatron`: Megatron's defaults and their origins by name. `passed`: settings that slime computes for Megatron
        and SGLang.
        """
        self.components = components
        self.origins: dict[str, str] = {}
        self.megatron = _Owner(self, "megatron")
        self.sglang = _Owner(self, "sglang")
        self._given = {name: value for name, value in _canonical(components, given) if value is not UNSET}
        self._given_where = origins
        self._defaults = megatron
        self._passed = passed
        self._values: dict[str, Any] = {}
        self._underway: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self.components.knows(name):
            return self._once(name, lambda: self._own(name))
        if name in self.megatron:
            return self.megatron[name]
        raise AttributeError(f"there is no setting {name!r}")

    def was_given(self, name: str) -> bool:
        """Returns whether the user set this. Engine settings are `owner.name`."""
        return name in self._given

    def given(self, name: str) -> Any:
        return self._given.get(name)

    def fix(self, owner: str, name: str, value: Any, origin: str) -> None:
        """Sets an engine's setting, overriding the user's value."""
        self._values[f"{owner}.{name}"] = value
        self.origins[f"{owner}.{name}"] = origin

    def names(self, owner: str) -> list[str]:
        """Returns the names of an engine's settings that have or can get a value."""
        known = dict.fromkeys(self._defaults) if owner == "megatron" else {}
        known |= dict.fromkeys(name for of, name in self._passed if of == owner)
        spelled = (*self._given, *self._values)
        known |= dict.fromkeys(n.removeprefix(f"{owner}.") for n in spelled if n.startswith(f"{owner}."))
        return list(known)

    def engine(self, owner: str, name: str) -> Any:
        """Returns the value of an engine's setting; `UNSET` if it has none."""
        return self._once(f"{owner}.{name}", lambda: self._of_engine(owner, name))

    def _own(self, name: str) -> Any:
        field = self.components.field_of(name, self)
        says = declared(field)
        if name in self._given:
            value, origin = self._given[name], self._given_where[name]
        else:
            value, origin = self._derived(name, says.compute, says.why, default_of(field), "default")
        adjusted = None if says.adjust is None else says.adjust(value, self)
        if adjusted is not None:
            value, origin = adjusted.value, f"derived: {adjusted.why}"
        self.origins[name] = origin
        return value

    def _of_engine(self, owner: str, name: str) -> Any:
        spelled = f"{owner}.{name}"
        if spelled in self._given:
            value, origin = self._given[spelled], self._given_where[spelled]
        else:
            rule = self._passed.get((owner, name))
            default, why = self._defaults.get(name, (UNSET, "")) if owner == "megatron" else (UNSET, "")
            compute = None if rule is None else rule.compute
            value, origin = self._derived(spelled, compute, "" if rule is None else rule.why, default, why)
        if value is not UNSET:
            self.origins[spelled] = origin
        return value

    def _derived(self, name: str, compute: Compute | None, why: Why, default: Any, origin: str) -> tuple[Any, str]:
        value = None if compute is None else compute(self)
        if value is None:
            return default, origin
        self._values[name] = value  # `why` may read this setting
        return value, f"derived: {why if isinstance(why, str) else why(self)}"

    def _once(self, name: str, compute: Callable[[], Any]) -> Any:
        if name in self._values:
            return self._values[name]
        if name in self._underway:
            circle = " -> ".join((*self._underway[self._underway.index(name) :], name))
            raise ConfigError(f"these settings derive from each other: {circle}; set one of them")
        self._underway.append(name)
        try:
            value = compute()
        finally:
            self._underway.pop()
        self._values[name] = value
        return value


class _Owner(Mapping[str, Any]):
    """A mapping of one engine's settings, computed when they are read."""

    def __init__(self, resolver: Resolver, owner: str) -> None:
        self._resolver, self._owner = resolver, owner

    def __getitem__(self, name: str) -> Any:
        value = self._resolver.engine(self._owner, name)
        if value is UNSET:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        names = self._resolver.names(self._owner)
        return (name for name in names if self._resolver.engine(self._owner, name) is not UNSET)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _canonical(components: Components, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the user's values in canonical form."""
    for name, value in given.items():
        says = declared(components.own[name]) if name in components.own else Declared()
        yield name, value if says.canonical is None else says.canonical(value)


def own_settings_without_effect(settings: Resolver, components: Components) -> dict[str, str]:
    """Returns the settings of slime and registry entries that the user set but that have no effect.

    Maps each name to the user's value (masked if secret) and the reason.
    """
    out = {}
    for name in (*components.own, *components.of_entries()):
        says, value = declared(components.field_of(name, settings)), settings.given(name)
        if settings.was_given(name) and says.asks(value):
            text = what_is_missing(name, settings, components)
            if text is not None:
                out[name] = f"{HIDDEN if says.secret else value}, {text}"
    return out


def derived_without_effect(settings: Any, components: Components) -> dict[str, str]:
    """Returns the origin, with the reason, of each derived setting of slime and registry entries without effect."""
    derived = [n for n in (*components.own, *components.of_entries()) if settings.origins[n].startswith("derived: ")]
    missing = ((name, what_is_missing(name, settings, components)) for name in derived)
    return {name: f"derived, but without effect: {text.removeprefix('which ')}" for name, text in missing if text}


def what_is_missing(name: str, settings: Any, components: Components) -> str | None:
    """Returns why a setting has no effect, as a clause ("which needs ..."); None if it takes effect.

    A setting takes effect if the conditions in its declaration hold. An entry's setting also requires that an entry
    with this setting is chosen.
    """
    needs = declared(components.field_of(name, settings)).conditions
    missing = _first_missing(needs, settings)
    if missing is not None or name in components.own:
        return missing
    chosen = {choice.entry: choice.chooser for choice in components.chosen(settings)}
    readers = [reader for reader in components.readers(name) if reader.entry in chosen]
    if not readers:
        return "which needs " + " or ".join(_choices_with(name, components))
    texts = [_first_missing(declared(components.own[r.chooser.setting]).conditions, settings) for r in readers]
    return None if None in texts else texts[0]


def _first_missing(needs: tuple[Need, ...], settings: Any) -> str | None:
    return next((need.clause for need in needs if not need.acts(settings)), None)


def _choices_with(name: str, components: Components) -> Iterator[str]:
    """Yields `SETTING a or b` for each setting that can select entries with the field `name`.

    If an entry has a switch, it follows the entry's name in parentheses.
    """
    by_chooser: dict[str, dict[str, None]] = {}
    for reader in components.readers(name):
        switch = getattr(reader.entry, "switch", "")
        label = f"{reader.label} ({switch})" if switch else reader.label
        by_chooser.setdefault(reader.chooser.what, {})[label] = None
    for what, labels in by_chooser.items():
        yield f"{what} {' or '.join(labels)}"


def engine_settings_without_effect(args: Args, flags: Iterable[Flag]) -> dict[str, str]:
    """Returns the Megatron settings that the user set but that have no effect, like `own_settings_without_effect`.

    Skips flags set to Megatron's or slime's default, because they request nothing.
    """
    out = {}
    for flag in flags:
        need, value = need_of(flag.dest), args.megatron.get(flag.dest)
        if not args.was_given(f"megatron.{flag.dest}") or need is None or need.acts(args):
            continue
        usual = FIXED[flag.dest][:1] if flag.dest in FIXED else (flag.default, *SLIME_DEFAULTS.get(flag.dest, ())[:1])
        if value not in usual:
            out[f"megatron.{flag.dest}"] = f"{HIDDEN if flag.secret else value}, {need.clause}"
    return out


def check_required(settings: Any, components: Components) -> None:
    """Raises one `ConfigError` that names all required settings that are neither set nor derived."""
    wanted = {name: declared(field).required for name, field in components.own.items() if declared(field).required}
    missing = [text for name, text in wanted.items() if getattr(settings, name) in (None, "")]
    if missing:
        raise ConfigError("required settings are missing: " + "; ".join(missing))


def validate(args: Args, components: Components, *, synchronous: bool = True, problems: Iterable[str] = ()) -> None:
    """Checks all rules. Raises one `ConfigError` that lists `problems` and all violated rules."""
    rules: list[Rule] = [rule for group in GROUPS for rule in group.rules]
    rules += [*RULES, *(SYNC_RULES if synchronous else ASYNC_RULES)]
    checks: list[Callable[[], Iterable[str | None]]] = [
        lambda: problems,
        lambda: derived_out_of_range(args, components),
        *(lambda rule=rule: [rule(args)] for rule in rules),
        lambda: of_chosen_entries(args, components),
        lambda: without_effect(args),
    ]
    found: list[str] = []
    for check in checks:
        try:
            messages = [message for message in check() if message is not None]
        except ConfigError as error:  # several rules may raise the same error; `refuse` drops duplicates
            messages = [str(error)]
        found += messages
    refuse(found)


def of_chosen_entries(args: Args, components: Components) -> Iterator[str]:
    """Yields the problems reported by chosen entries, if the setting that chooses them takes effect."""
    for choice in components.chosen(args):
        if what_is_missing(choice.chooser.setting, args, components) is None:
            yield from choice.problems(args)


def given_out_of_range(settings: Any, components: Components) -> Iterator[str]:
    """Yields a message for each number that the user set outside the range of the chosen entry."""
    for name in components.of_entries():
        if settings.was_given(name) and (problem := _problem_of(name, settings, components)) is not None:
            where = settings.origins[name]
            where = "--" + name.replace("_", "-") if where == "command line" else f"{where}: {name}"
            yield f"{where} is {getattr(settings, name)}, {problem}; correct it or leave it out"


def derived_out_of_range(settings: Any, components: Components) -> Iterator[str]:
    """Yields a message for each derived number that takes effect and is outside its range."""
    for name in (*components.own, *components.of_entries()):
        problem = None if settings.was_given(name) else _problem_of(name, settings, components)
        if problem is not None and what_is_missing(name, settings, components) is None:
            reason = settings.origins[name].removeprefix("derived: ")
            do = f"set --{name.replace('_', '-')}, or change what it is derived from"
            yield f"{name} is {getattr(settings, name)} (derived from {reason}), {problem}; {do}"


def _problem_of(name: str, settings: Any, components: Components) -> str | None:
    limits = declared(components.field_of(name, settings)).range
    return None if limits == ANY else limits.problem(getattr(settings, name))


def without_effect(args: Args) -> Iterator[str]:
    """If --strict is set, yields a message that lists the settings without effect."""
    if args.strict and args.idle:
        told = "; ".join(f"{name} {text}" for name, text in args.idle.items())
        yield f"--strict refuses settings without effect: {told}; drop them, or set what they need"


_PLAIN_ATTENTION = Need(
    lambda m: not m.get("multi_latent_attention"), "attention with heads of queries, keys and values, not latent ones"
)
ARCHITECTURE_NEEDS: Mapping[str, Need] = {
    "kv_channels": Need(
        lambda m: not m.get("multi_latent_attention"),
        "attention with one head size; latent attention has --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim",
    ),
    "add_qkv_bias": _PLAIN_ATTENTION,
    "group_query_attention": _PLAIN_ATTENTION,
    "num_query_groups": _PLAIN_ATTENTION,
    "max_position_embeddings": Need(
        lambda m: m.get("position_embedding_type") not in ("rope", "mrope", "none"),
        "learned embeddings of positions; this checkpoint has rotary ones, and its config.json determines the context "
        "length",
    ),
    "ffn_hidden_size": Need(
        lambda m: not m.get("num_moe_experts") or _says("moe_layer_freq", m["moe_layer_freq"], m).count(0) > 0,
        "a layer without experts, which this checkpoint does not have",
    ),
    "moe_router_pre_softmax": Need(
        lambda m: m.get("moe_router_score_function", "softmax") == "softmax",
        "a softmax router; this checkpoint has a sigmoid router",
    ),
}
"""Megatron setting defined by the checkpoint -> condition, which receives the architecture instead of the settings."""

CHOICES: Mapping[str, tuple[Any, ...]] = {"moe_router_dtype": ("fp32",)}
"""Megatron setting defined by the checkpoint -> other values that a flag can set, because only the precision changes.
"""

_PATTERNS: Mapping[str, Callable[[int, int], bool]] = {
    "moe_layer_freq": lambda frequency, layer: layer % frequency == 0,
    "linear_attention_freq": lambda frequency, layer: (layer + 1) % frequency != 0,
}
"""Setting with one entry per layer -> function (frequency, layer index) -> whether the layer's entry is 1."""


def take_architecture(resolver: Resolver) -> tuple[list[str], dict[str, str]]:
    """Fixes the settings that the checkpoint defines.

    Returns (messages about flags that contradict the checkpoint, given setting -> why it has no effect). Raises
    `ConfigError` for a checkpoint that cannot be trained.
    """
    architecture = architecture_of(resolver.hf_checkpoint, resolver.model_family)
    explicit, idle = {}, {}
    for name, stored in architecture.items():
        value = stored
        if resolver.was_given(f"megatron.{name}"):
            given = resolver.given(f"megatron.{name}")
            need = ARCHITECTURE_NEEDS.get(name)
            if _says(name, given, architecture) == _says(name, stored, architecture):
                pass
            elif given in CHOICES.get(name, ()):
                value = given
            elif need is not None and not need.acts(architecture):
                idle[f"megatron.{name}"] = f"{given}, {need.clause}"
            else:
                explicit[name] = given
        resolver.fix("megatron", name, value, "HF config" if value is stored else "command line")
    return contradictions(architecture, explicit), idle


def _says(name: str, value: Any, architecture: Mapping[str, Any]) -> Any:
    """Converts a value for comparison. A layer pattern (`[0]*3+[1]*75`) or frequency becomes one entry per layer."""
    of_frequency = _PATTERNS.get(name)
    if of_frequency is None:
        return list(value) if isinstance(value, tuple) else value
    if isinstance(value, int) and value > 0:
        return [int(of_frequency(value, layer)) for layer in range(architecture["num_layers"])]
    if not isinstance(value, str):
        return value
    try:
        return _evaluated(ast.parse(value.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        return value


def _evaluated(node: ast.expr) -> Any:
    """Evaluates an expression of integer lists with `+` and `*`. Raises `ValueError` for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and 0 <= node.value <= _MOST:
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_evaluated(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            return left * right
    raise ValueError("not a layer pattern")


_MOST = 10_000
"""Largest integer in a layer pattern, which bounds the evaluated list. Models have fewer layers."""


def resolve(
    given: Given,
    *,
    components: Components,
    origins: Mapping[tuple[str, str], str],
    custom: Mapping[str, Any],
    synchronous: bool = True,
) -> Args:
    """Returns the settings of a run. Raises one `ConfigError` that lists all problems.

    `given` maps (owner, dest) to the user's value, and `origins` to where the user set it. `custom` holds the user's
    own settings. `synchronous` selects the rules of train.py instead of train_async.py.
    """
    values = {_spelled(owner, dest): value for (owner, dest), value in given.items()}
    where = {_spelled(owner, dest): text for (owner, dest), text in origins.items()}
    resolver = resolver_of(components, values, where)
    check_required(resolver, components)
    list(components.chosen(resolver))  # raises for an unknown name, even if the setting has no effect
    too_many = a_step_is_finite(resolver)
    refuse([*given_out_of_range(resolver, components), *([too_many] if too_many else [])])
    args, idle, problems = _without_idle(components, values, where, IDLE_IN_SYNC if synchronous else {})
    if idle.keys() & {"eval_prompt_data", "eval_config"} and (missing := held_out_files_exist(resolver)):
        problems = [*problems, missing]
    if "eval_config" not in idle:
        idle |= unread_keys(args)
    router = {dest: value for (owner, dest), value in given.items() if owner == "router"}
    free = {name: text for name, text in where.items() if name.startswith(FREE)}
    args = args.replace(custom=Passthrough("custom", custom))
    read = for_user_functions(args, idle := {**idle, **free}, values, where)
    args = args.replace(
        router=Passthrough("router", router),
        idle=Passthrough("idle", {name: text for name, text in idle.items() if name not in read}),
        for_functions=Passthrough("for_functions", read),
        origins=Passthrough(
            "origins",
            {
                **args.origins,
                **derived_without_effect(args, components),
                **{name: text for name, text in free.items() if name in read},
                **{f"router.{n}": where[f"router.{n}"] for n in router},
            },
        ),
    )
    validate(args, components, synchronous=synchronous, problems=problems)
    return args


def _without_idle(
    components: Components, values: Mapping[str, Any], where: Mapping[str, str], of_loop: Mapping[str, tuple[Any, str]]
) -> tuple[Args, dict[str, str], list[str]]:
    """Returns (settings, setting -> why it has no effect, contradictions with the checkpoint).

    Drops settings without effect and resolves again until all remaining ones take effect, because a setting may depend
    on a dropped one (a reference needs a KL). `of_loop`: those without effect in this loop.
    """
    idle = {n: f"{values[n]}, {why}" for n, (usual, why) in of_loop.items() if values.get(n, usual) != usual}
    while True:
        resolver = resolver_of(components, {name: v for name, v in values.items() if name not in idle}, where)
        problems, found = take_architecture(resolver)
        args = args_of(resolver)
        found |= own_settings_without_effect(resolver, components)
        found |= engine_settings_without_effect(args, flags_of_owner("megatron"))
        if not found:
            return args, idle, problems
        idle |= found


def resolver_of(components: Components, given: Mapping[str, Any], where: Mapping[str, str]) -> Resolver:
    """Returns a resolver for the user's values, before the checkpoint's architecture is added."""
    return Resolver(components, given, origins=where, megatron=megatron_defaults(components), passed=passed_settings())


def megatron_defaults(components: Components) -> dict[str, tuple[Any, str]]:
    """Returns (default, origin of the default) for each Megatron setting that slime does not declare itself."""
    out: dict[str, tuple[Any, str]] = {
        flag.dest: (flag.default, "default of Megatron")
        for flag in flags_of_owner("megatron")
        if flag.dest not in components.own
    }
    return out | {name: (value, f"default of slime: {why}") for name, (value, why) in SLIME_DEFAULTS.items()}


def _spelled(owner: str, dest: str) -> str:
    return dest if owner == "slime" else f"{owner}.{dest}"


def passed_settings() -> dict[tuple[str, str], Passed]:
    """Returns (owner, name) -> the rule that computes an engine's setting."""
    rules = [rule for group in GROUPS for rule in group.passed]
    out: dict[tuple[str, str], Passed] = {(rule.owner, rule.name): rule for rule in rules}
    assert len(out) == len(rules), "two groups derive the same engine setting"
    return out


def args_of(resolver: Resolver) -> Args:
    """Resolves every setting. Checks nothing."""
    components = resolver.components
    values: dict[str, Any] = {name: getattr(resolver, name) for name in components.own}
    of_entries = {name: getattr(resolver, name) for name in components.of_entries()}
    values["components"] = Passthrough("components", of_entries)
    for owner in ("megatron", "sglang"):
        values[owner] = Passthrough(owner, getattr(resolver, owner))
    return Args(**values, origins=Passthrough("origins", resolver.origins))
