"""Declares settings as dataclass fields, and generates flags and help texts from the declarations.

A group (or a registry entry) is a frozen dataclass. Each field declares one setting: its type, default, range,
conditions, derivation, and its help text in the string literal below it. That literal is read from the source only when
the user asks for help.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, Final, Literal, ParamSpec

from slime.settings.flags import Flag, Form, Range

if TYPE_CHECKING:
    from slime.settings.args import Args

P = ParamSpec("P")
Compute = Callable[[Any], Any]
"""(settings) -> value."""
Why = str | Callable[[Any], str]
"""The reason for a value: text, or a function of the settings that returns it."""


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = _Unset()
"""Sentinel for a value that counts as not set, such as `--device auto`."""


def is_on(value: Any) -> bool:
    """Returns whether `value` requests anything: None and False do not. This is the default of `asks`."""
    return value is not None and value is not False


def is_not_zero(value: Any) -> bool:
    """Returns whether a coefficient or count requests anything: zero does not."""
    return bool(value)


def always(value: Any) -> bool:
    """Returns True. For switches: switching a feature off is also a request."""
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """A condition that must hold for a setting to take effect."""

    acts: Callable[[Any], bool]
    """(resolved settings) -> whether the condition holds."""
    text: str
    """The condition, phrased to follow "which needs ", or a whole clause that begins with "which"."""

    @property
    def clause(self) -> str:
        """The reason why the setting has no effect, phrased to follow its value."""
        return self.text if self.text.startswith("which ") else f"which needs {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Adjusted:
    """A replacement for a set or derived value, because of other settings."""

    value: Any
    why: str
    """Shown by --explain."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenBy:
    """Selects a registry entry with a function of all settings, instead of the setting's own value."""

    name: Callable[[Any], str | None]
    """(settings) -> the entry's name; None chooses no entry."""
    what: str
    """What the name stands for, such as "a checkpoint of model_type". Messages put this text before the name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A field's declaration, except its type: the arguments of `opt` and `derived`, stored in the field's metadata."""

    default: Any = None
    """The value if the user does not set one and `compute` returns None."""
    names: tuple[str, ...] = ()
    """Additional spellings of the flag."""
    off_names: tuple[str, ...] = ()
    """Additional spellings that switch the setting off."""
    choices: tuple[str, ...] | None = None
    secret: bool = False
    """Whether the value is masked wherever it is written."""
    may_be_empty: bool = False
    """Without a value, or with an empty one, the flag gives None: scripts pass variables that can be empty."""
    append: bool = False
    """The value is a tuple; each occurrence of the flag adds one entry."""
    within: Range | None = None
    """The range of a number, usually a constant from `slime.settings.flags`. Overrides the four bounds below."""
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    form: Form | None = None
    """Check for a text value: `url_form` or `host_form`."""
    needs: Need | tuple[Need, ...] = ()
    """Conditions that must all hold for the setting to take effect. Messages show the first one that fails."""
    asks: Callable[[Any], bool] = is_on
    """Whether a value requests anything. Values that do not are never reported as having no effect."""
    chosen_from: str | None = None
    """The registry whose entries the value names, as `pkg.module:REGISTRY`."""
    chosen_by: ChosenBy | None = None
    """Selects the entry. The setting's value then only registers a user's entry."""
    compute: Compute | None = None
    """Computes the value if the user does not set one. If it returns None, `default` is used."""
    why: Why = ""
    """The reason for the computed value."""
    canonical: Callable[[Any], Any] | None = None
    """Converts a value to its canonical form. Returning `UNSET` discards the value."""
    adjust: Callable[[Any, Any], Adjusted | None] | None = None
    """(value, settings) -> the replacement, or None to keep the value."""
    required: str = ""
    """If not empty, the setting must be set or derived. The text is the error message for a missing value."""
    internal: bool = False
    """The run fills in the value; there is no flag."""
    first: str = ""
    """The heading of the flag on the first page of --help, one of `FIRST_PAGE`; empty: not on that page."""

    @property
    def range(self) -> Range:
        return self.within or Range(self.gt, self.ge, self.lt, self.le)

    @property
    def conditions(self) -> tuple[Need, ...]:
        """`needs` as a tuple."""
        return (self.needs,) if isinstance(self.needs, Need) else self.needs


_KEY = "setting"


def declared(field: dataclasses.Field[Any]) -> Declared:
    """Returns the declaration in a field's metadata; an empty one if the field has only a plain default."""
    found: Declared = field.metadata.get(_KEY, _PLAIN)
    return found


_PLAIN = Declared()


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Returns the field's default; a new copy if it is mutable."""
    factory: Any = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _opt(says: Callable[P, Declared]) -> Callable[Concatenate[Any, P], Any]:
    def field(default: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return _field(dataclasses.replace(says(*args, **kwargs), default=default))

    return field


def _derived(says: Callable[P, Declared]) -> Callable[Concatenate[Compute, Why, P], Any]:
    def field(compute: Compute, why: Why, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return _field(dataclasses.replace(says(*args, **kwargs), compute=compute, why=why))

    return field


opt = _opt(Declared)
"""`opt(default, ge=0, ...)` declares a field with a default. The keyword arguments are the fields of `Declared`."""

derived = _derived(Declared)
"""`derived(compute, why, ...)` declares a field that is computed from other settings if the user does not set it.

`compute` receives the settings and resolves what it reads (`s.name`, `s.megatron["name"]`, `s.was_given("name")`).
If it returns None, `default` is used. --explain shows `why`. The keyword arguments are the fields of `Declared`."""


def internal(compute: Compute | None = None, why: str = "") -> Any:
    """Declares a field that has no flag. The run fills it in."""
    return _field(Declared(internal=True, compute=compute, why=why))


def _field(says: Declared) -> Any:
    default = says.default
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={_KEY: says})
    return dataclasses.field(default=default, metadata={_KEY: says})


def _kind(hint: Any) -> tuple[str, str | None, tuple[Any, ...] | None, bool]:
    """Returns (kind, nargs, choices, optional) for a type annotation."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [a for a in typing.get_args(hint) if a is not type(None)]
        assert len(members) == 1, f"a field must have a single type, optionally with None, not {hint}"
        hint, optional = members[0], True
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "str", None, typing.get_args(hint), optional
    if origin is tuple:
        return _kind(typing.get_args(hint)[0])[0], "+", None, optional
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        return "json", None, None, optional
    simple = {int: "int", float: "float", str: "str", bool: "bool"}
    assert hint in simple, f"no flag for a field of type {hint}"
    return simple[hint], None, None, optional


def _holds_strings(hint: Any) -> bool:
    """Returns whether the type is a mapping from strings to strings, optional or not."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return any(typing.get_args(member) == (str, str) for member in members)


def own_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """Returns the settings that `cls` itself declares, without inherited ones."""
    own = inspect.get_annotations(cls)
    return [field for field in dataclasses.fields(cls) if field.name in own and field.init]


def flags_of(cls: type, *, heading: str, docs: Mapping[str, str] | None = None) -> list[Flag]:
    """Returns the flags of the fields that `cls` itself declares. `docs` maps field names to help texts."""
    hints = typing.get_type_hints(cls)
    return [
        _flag(field, hints[field.name], heading=heading, doc=(docs or {}).get(field.name, ""))
        for field in own_fields(cls)
    ]


def _flag(field: dataclasses.Field[Any], hint: Any, *, heading: str, doc: str) -> Flag:
    says = declared(field)
    kind, nargs, choices, optional = _kind(hint)
    dashed = field.name.replace("_", "-")
    off = says.off_names
    if kind == "bool" and not dashed.startswith(("no-", "disable-", "skip-")):
        off = (*off, f"--no-{dashed}")
    default = default_of(field)
    return Flag(
        dest=field.name,
        owner="slime",
        names=(f"--{dashed}", *says.names),
        kind=kind,
        default=default,
        doc=doc,
        group=heading,
        off_names=off,
        nargs=None if says.append else nargs,
        append=says.append,
        choices=says.choices or choices,
        limits=says.range,
        form=says.form,
        of_strings=kind == "json" and _holds_strings(hint),
        optional=optional,
        required=bool(says.required),
        derived=says.compute is not None,
        secret=says.secret,
        may_be_empty=says.may_be_empty,
        internal=says.internal,
        first=says.first,
    )


def field_docs(cls: type) -> dict[str, str]:
    """Returns field name -> the string literal below it, from the source of `cls` (inherited fields are left out)."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef), f"{cls} is not a class"
    out = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            out[statement.target.id] = " ".join(following.value.value.split())
    return out


Rule = Callable[["Args"], "str | None"]
"""(args) -> None, or a message that names the setting and its value, what is wrong, and what to do."""


def refuse_if(holds: Callable[[Any], Any], message: str | Callable[[Any], str]) -> Rule:
    """Returns a rule that reports `message` if `holds(args)`.

    `message` is a format string over the settings (`{s.seed}`), or a function of the settings.
    """
    told = message.format if isinstance(message, str) else lambda s: message(s)
    return lambda s: told(s=s) if holds(s) else None


@dataclass(frozen=True, slots=True)
class Passed:
    """A Megatron or SGLang setting that slime computes if the user does not set it."""

    owner: Literal["megatron", "sglang"]
    name: str
    compute: Compute
    """(settings, resolved lazily) -> value. None keeps the owner's default."""
    why: Why
    """Shown by --explain."""


@dataclass(frozen=True, slots=True)
class Group:
    settings: type
    """A frozen dataclass that is a base of `Args`."""
    topic: str
    """`--help TOPIC` shows the group. Groups can share a topic. Settings of registry entries have the topic of the
    setting that selects the entry."""
    heading: str
    """The title above the group's flags in --help."""
    rules: tuple[Rule, ...] = ()
    """Checked in this order before any process starts."""
    passed: tuple[Passed, ...] = ()
    """Settings that the group computes for Megatron and SGLang."""
