"""How settings are declared, and the flags and help texts made from the declarations.

A group (or a registry entry) is a frozen dataclass. Each field declares everything about one setting: type, default,
range, condition, derivation, and its help text in the string literal below it. `--help` reads that literal from the
source, only when help is asked for.
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
"""Gets the settings, returns a value."""
Why = str | Callable[[Any], str]
"""The reason for a value: a text, or a function of the settings."""


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = _Unset()
"""A given value that counts as not given (`--device auto`)."""


def is_on(value: Any) -> bool:
    """The usual `asks`: None and False ask for nothing, so they may be given anywhere."""
    return value is not None and value is not False


def is_not_zero(value: Any) -> bool:
    """`asks` of a coefficient or count where zero means none."""
    return bool(value)


def always(value: Any) -> bool:
    """`asks` of a switch whose off value asks for something too."""
    return True


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """The condition under which a setting acts."""

    acts: Callable[[Any], bool]
    """Gets the resolved settings."""
    text: str
    """The condition in words, after "which needs"; or a whole clause that begins with "which"."""

    @property
    def clause(self) -> str:
        """Why the setting has no effect, after its value."""
        return self.text if self.text.startswith("which ") else f"which needs {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Adjusted:
    """A value that replaces a given or derived one because of other settings."""

    value: Any
    why: str
    """Shown by --explain."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenBy:
    """Names a registry entry where the setting's own value does not."""

    name: Callable[[Any], str | None]
    """Gets the settings."""
    what: str
    """What the name is, in words; messages put it before the known names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a field says beyond its type: the arguments of `opt` and `derived`, kept in its metadata."""

    default: Any = None
    """Used where the user gives no value and nothing is computed."""
    names: tuple[str, ...] = ()
    """Further spellings of the flag."""
    off_names: tuple[str, ...] = ()
    """Further spellings that switch it off."""
    choices: tuple[str, ...] | None = None
    secret: bool = False
    """Masked wherever it is written."""
    append: bool = False
    """A tuple; each occurrence of the flag adds one entry."""
    within: Range | None = None
    """The range of a number, one of the kinds in `slime.settings.flags`. Or give the bounds:"""
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    form: Form | None = None
    """What a text must be: `url_form` or `host_form`."""
    needs: Need | tuple[Need, ...] = ()
    """All must hold for the setting to act; the first one that does not is reported."""
    asks: Callable[[Any], bool] = is_on
    """Whether a given value asks for something, so that "has no effect" is worth a line."""
    chosen_from: str | None = None
    """The registry, `pkg.module:REGISTRY`, of which the value names an entry."""
    chosen_by: ChosenBy | None = None
    """Names the entry in place of the value; the value then only registers the user's own entry."""
    compute: Compute | None = None
    """The value where the user gives none; None leaves the default."""
    why: Why = ""
    """The reason for the computed value."""
    canonical: Callable[[Any], Any] | None = None
    """Rewrites a given value to its one spelling; `UNSET` drops it."""
    adjust: Callable[[Any, Any], Adjusted | None] | None = None
    """(value, settings) -> its replacement, or None to keep it."""
    required: str = ""
    """What to give, for a setting that a run cannot do without and that nothing derives."""
    internal: bool = False
    """Filled in by the run; has no flag."""

    @property
    def range(self) -> Range:
        return self.within or Range(self.gt, self.ge, self.lt, self.le)

    @property
    def conditions(self) -> tuple[Need, ...]:
        """`needs` as a tuple."""
        return (self.needs,) if isinstance(self.needs, Need) else self.needs


_KEY = "setting"


def declared(field: dataclasses.Field[Any]) -> Declared:
    """The declaration in a field's metadata; a plain default has an empty one."""
    found: Declared = field.metadata.get(_KEY, _PLAIN)
    return found


_PLAIN = Declared()


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The field's default, a fresh copy if it is mutable."""
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
"""`opt(default, ge=0, ...)`: a field with more than a default; `Declared` explains the arguments."""

derived = _derived(Declared)
"""`derived(compute, why, ...)`: a field computed from others when the user does not give it.

`compute` gets the settings, each derived when it is read (`s.name`, `s.megatron["name"]`, `s.was_given("name")`). Where
it returns None, `default` is used. `why` is shown by --explain. The other arguments are those of `Declared`."""


def internal(compute: Compute | None = None, why: str = "") -> Any:
    """A field that the run fills in; it has no flag."""
    return _field(Declared(internal=True, compute=compute, why=why))


def _field(says: Declared) -> Any:
    default = says.default
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={_KEY: says})
    return dataclasses.field(default=default, metadata={_KEY: says})


def _kind(hint: Any) -> tuple[str, str | None, tuple[Any, ...] | None, bool]:
    """(kind, nargs, choices, optional) of a type annotation."""
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [a for a in typing.get_args(hint) if a is not type(None)]
        assert len(members) == 1, f"a field's type is one type or None, got {hint}"
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
    """Whether a mapping (or an optional one) has string values."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return any(typing.get_args(member) == (str, str) for member in members)


def own_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """The settings that a dataclass declares itself, without those of its bases."""
    own = inspect.get_annotations(cls)
    return [field for field in dataclasses.fields(cls) if field.name in own and field.init]


def flags_of(cls: type, *, heading: str, docs: Mapping[str, str] | None = None) -> list[Flag]:
    """The flags of the fields that `cls` itself declares; `docs` are their help texts, if wanted."""
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
        derived=says.compute is not None and default is None,
        secret=says.secret,
        internal=says.internal,
    )


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string literal below it, from the source of `cls` itself (not of its bases)."""
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
"""Returns None, or a message: what was given, why it cannot work, what to do."""


def refuse_if(holds: Callable[[Any], Any], message: str | Callable[[Any], str]) -> Rule:
    """A rule that returns `message` if `holds(args)`: a text with settings in braces (`{s.seed}`), or a function."""
    told = message.format if isinstance(message, str) else lambda s: message(s)
    return lambda s: told(s=s) if holds(s) else None


@dataclass(frozen=True, slots=True)
class Passed:
    """A setting of Megatron or SGLang that slime computes where the user does not give it."""

    owner: Literal["megatron", "sglang"]
    name: str
    compute: Compute
    """Gets the settings, each derived when it is read. None leaves the owner's default."""
    why: Why
    """Shown by --explain."""


@dataclass(frozen=True, slots=True)
class Group:
    settings: type
    """A frozen dataclass, a base of `Args`."""
    heading: str
    """Above its flags in --help."""
    rules: tuple[Rule, ...] = ()
    """Checked in this order before any process starts."""
    passed: tuple[Passed, ...] = ()
    """What it sets for Megatron and SGLang."""
