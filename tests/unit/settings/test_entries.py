"""Entries of registries bring settings of their own: known to the command line, resolved, and told if idle."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slime.core.errors import ConfigError
from slime.settings import parse_args
from slime.settings.all_flags import Components, entries_named_in, entries_named_on
from slime.settings.all_flags import components as slime_components
from slime.settings.args import Args, Passthrough
from slime.settings.command_line import explain_args as explain
from slime.settings.command_line import help_text
from slime.settings.fields import derived
from slime.settings.flag_parser import OVERRIDE, FlagTable
from slime.settings.resolve import Resolver, derived_out_of_range, given_out_of_range, own_settings_without_effect
from tests.support.command_line import refused
from tests.support.toy_shapes import SHAPES, ToySettings
from tests.support.toy_shapes.entries import Circle

OWN = """
from dataclasses import dataclass
from slime.settings.fields import opt
from tests.support.toy_shapes import SHAPES, Shape
from tests.support.toy_shapes.entries import Lined

@SHAPES.register("{name}")
@dataclass(frozen=True, kw_only=True)
class Star(Lined):
    num_points: int = opt(5, ge=3)
    "Points of the star."
"""


def components(*user_entries: tuple[str, str]) -> Components:
    return Components([ToySettings], user_entries)


def resolved(known: Components, **given: Any) -> Resolver:
    return Resolver(known, given, origins=dict.fromkeys(given, "command line"), megatron={}, passed={})


def idle(known: Components, **given: Any) -> dict[str, str]:
    return own_settings_without_effect(resolved(known, **given), known)


@pytest.fixture
def star(tmp_path: Path) -> str:
    path = tmp_path / f"star_{tmp_path.name}.py"
    path.write_text(OWN.format(name=f"star_{tmp_path.name}"))
    return str(path)


def spellings(known: Components) -> set[str]:
    return {flag.names[0] for flag in known.flags()}


def test_entries_bring_flags_and_a_base_brings_one() -> None:
    known = components()
    assert {"--line-width", "--radius", "--corners"} <= spellings(known)
    assert [flag.dest for flag in known.flags()].count("line_width") == 1
    (line,) = (flag for flag in known.flags(with_docs=True) if flag.dest == "line_width")
    assert line.doc.startswith("Width of the line. Used by circle, square") and line.kind == "float"
    assert "--scale" not in spellings(known), "the group's"


def test_values_are_derived_and_defaults_are_those_of_the_chosen_entry() -> None:
    known = components()
    assert resolved(known).radius == 2.0 and resolved(known, line_width=3.0).radius == 6.0
    square = resolved(known, scale=0.5)
    assert square.shape == "square" and square.line_width == 3.0
    settings = resolved(known)
    assert SHAPES.build("circle", settings) == Circle(line_width=1.0, radius=2.0, scale=2.0)
    assert settings.origins["radius"] == "derived: line_width * scale"


def test_a_setting_of_an_entry_that_is_not_chosen_has_no_effect() -> None:
    known = components()
    assert idle(known, corners="soft") == {"corners": "soft, which needs shape square"}
    assert idle(known, shape="square", corners="soft") == {}
    assert idle(known, others=("square",), corners="soft") == {}
    assert idle(known, shape="point", line_width=2.0)["line_width"].startswith(
        "2.0, which needs shape circle or square"
    )
    assert idle(known, draws=False, radius=2.0)["radius"] == "2.0, which needs --draws"


def test_ranges_hold_where_a_setting_is_given_or_acts() -> None:
    known = components()
    assert "--line-width is -1.0, but must be > 0" in next(given_out_of_range(resolved(known, line_width=-1.0), known))
    assert not list(derived_out_of_range(resolved(known, scale=-1.0), known)), "the derived radius is no square's"


def test_a_chosen_entry_checks_itself() -> None:
    known = components()
    (choice,) = known.chosen(resolved(known, radius=101.0))
    assert choice.problems(resolved(known, radius=101.0)) == ["got radius 101.0 above 100; give less"]


def test_a_users_entry_is_known_once_it_is_named(star: str) -> None:
    named = entries_named_on(["--draws", f"--shape={star}", "--num-points", "7"], components())
    assert named == {"shape": (star,)} == entries_named_in({"shape": star, "scale": 3}, components())
    assert entries_named_on(["--others", "circle", star, "--draws"], components()) == {"others": (star,)}
    known = components(("shape", star))
    given = FlagTable(known.flags()).parse(["--num-points", "7"])
    assert given == {("slime", "num_points"): 7}
    settings = resolved(known, shape=star, num_points=7)
    assert settings.num_points == 7 and settings.line_width == 1.0
    assert idle(known, num_points=7)["num_points"].startswith("7, which needs shape ")
    assert "--num-points is 2, but must be at least 3" in next(given_out_of_range(resolved(known, num_points=2), known))


def test_a_field_of_two_bases_is_refused(tmp_path: Path) -> None:
    path = tmp_path / f"other_{tmp_path.name}.py"
    path.write_text(OWN.format(name=f"other_{tmp_path.name}").replace("num_points", "radius"))
    with pytest.raises(ConfigError, match="Star and Circle both declare the setting radius and would share a flag"):
        components(("shape", str(path)))


@pytest.mark.parametrize("words", [["--update-weight-transport", "no.such:Thing"], ["--model-family", "missing.py"]])
def test_a_path_to_nowhere_is_refused(base: list[str], words: Sequence[str]) -> None:
    assert words[0] in refused([*base, *words])


def test_settings_that_derive_from_each_other_are_told() -> None:
    import dataclasses

    circle = dataclasses.make_dataclass(
        "Round",
        [
            ("a", int, derived(lambda s: s.b, "b")),
            ("b", int, derived(lambda s: s.a, "a")),
        ],
        frozen=True,
        kw_only=True,
    )
    with pytest.raises(ConfigError, match="derive from each other: a -> b -> a"):
        _ = resolved(Components([circle])).a


def test_settings_of_entries_are_attributes_and_survive_a_pickle() -> None:
    args = Args(components=Passthrough("components", {"radius": 2.0}), custom=Passthrough("custom", {"radius": 3.0}))
    assert args.radius == 2.0 and pickle.loads(pickle.dumps(args)).radius == 2.0  # type: ignore[attr-defined]
    assert args.replace(radius=5.0).components == {"radius": 5.0}


TRANSPORT = """
from dataclasses import dataclass
from slime.settings.fields import opt
from slime.weights.transports import TRANSPORTS, Transport

@dataclass(frozen=True, kw_only=True)
class Pigeon(Transport):
    "By air."
    num_pigeons: int = opt(1, ge=1)
    "Birds per bucket."
    pigeon_key: str | None = opt(None, secret=True)
    "What the birds ask for."

    def check(self, args):
        return "got one pigeon in a storm; give more" if self.num_pigeons == 13 else None

    def open(self, context):
        raise NotImplementedError
"""


@pytest.fixture
def pigeon(tmp_path: Path) -> str:
    path = tmp_path / "pigeon.py"
    path.write_text(TRANSPORT)
    return f"{path}:Pigeon"


def test_a_users_entry_brings_flags_to_the_real_command_line(base: list[str], pigeon: str) -> None:
    words = [*base, "--num-pigeons", "4", "--pigeon-key", "hunter2", "--update-weight-transport", pigeon]
    args = parse_args(words)
    assert args.components["num_pigeons"] == 4 and args.update_weight_transport == pigeon
    record = json.dumps(args.to_json_dict())
    assert '"num_pigeons": 4' in record and "hunter2" not in record
    assert "num_pigeons = 4    (command line)" in explain(args) and "hunter2" not in explain(args)
    assert "--num-pigeons is 0, but must be at least 1" in refused([*words, OVERRIDE, "--num-pigeons", "0"])
    assert "pigeon in a storm" in refused([*words, OVERRIDE, "--num-pigeons", "13"])
    assert "unknown flag --num-pigeons" in refused([*base, "--num-pigeons", "4"])
    assert "unknown flag --num-pigeon;" in refused([*words, "--num-pigeon", "4"])


def test_a_users_entry_is_named_in_yaml_as_well(base: list[str], pigeon: str, tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text(f"update_weight_transport: {pigeon}\nnum_pigeons: 3\n")
    args = parse_args([*base, "--custom-config-path", str(file)])
    assert args.components["num_pigeons"] == 3 and args.origins["num_pigeons"] == str(file)
    assert parse_args([*base, "--custom-config-path", str(file), "--num-pigeons", "3"]).components["num_pigeons"] == 3


def test_help_shows_names_and_settings_of_entries() -> None:
    text = help_text("slime")
    assert "--update-weight-transport {disk|distributed|mixed|nccl|tensor|import path}" in text
    assert "Weight transport: settings of --update-weight-transport entries" in text
    assert "Used by disk." in text


def test_a_derived_value_of_an_estimator_that_is_not_chosen_has_no_effect(base: list[str], tmp_path: Path) -> None:
    """With the estimator of the documentation, and with rewards that a hook normalises."""
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    code = page.split("A `GroupEstimator` needs one method")[1].split("```python\n")[1].split("```")[0]
    (file := tmp_path / "rank_in_group.py").write_text(code)
    name = "grpo_std_normalization = True    (derived, but without effect: needs"
    own = parse_args([*base, "--advantage-estimator", str(file)])
    assert f"{name} advantage_estimator cispo or grpo" in explain(own)
    assert "advantage_scale = group    (derived, but without effect: needs advantage_estimator" in explain(own)
    hook = parse_args([*base, "--custom-reward-post-process-path", "a.b"])
    assert f"{name} rewards_normalization)" in explain(hook)
    assert "(derived: rewards are divided by the standard deviation" in explain(parse_args(base))


@pytest.mark.parametrize(
    ("given", "means"), [("nccl", "distributed"), ("distributed", "distributed"), ("auto", "tensor")]
)
def test_a_further_name_of_a_transport_means_its_first_one(base: list[str], given: str, means: str) -> None:
    args = parse_args([*base, "--device", "cpu", "--update-weight-transport", given])
    assert args.update_weight_transport == means


def test_a_setting_of_a_built_in_entry_is_told_if_another_is_chosen(base: list[str]) -> None:
    words = [*base, "--update-weight-disk-keep-files"]
    assert parse_args(words).idle["update_weight_disk_keep_files"] == "True, which needs update_weight_transport disk"
    assert not parse_args([*words, "--update-weight-transport", "disk"]).idle
    assert "unknown" not in refused([*words, "--strict"]) and "--strict" in refused([*words, "--strict"])


def test_every_check_returns_one_message_or_none() -> None:
    entries = [(c, entry) for c in slime_components().choosers for _, entry in c.registry]
    assert len({c.setting for c, _ in entries}) >= 9, "the registries that settings choose from"
    for chooser, entry in entries:
        says = inspect.get_annotations(entry.check)
        assert (says["args"], says["return"]) == ("Args", "str | None"), f"{entry} of {chooser.setting}"


def test_a_check_that_answers_otherwise_is_refused(base: list[str], tmp_path: Path) -> None:
    path = tmp_path / "talker.py"
    path.write_text(TRANSPORT.replace('return "got', 'return ["got').replace('more" if', 'more"] if'))
    words = [*base, "--update-weight-transport", f"{path}:Pigeon"]
    assert "returned a list; it must return a message or None" in refused([*words, "--num-pigeons", "13"])


OWN_GROUPS = """
from dataclasses import dataclass
from slime.algorithms.advantages import ESTIMATORS
from slime.algorithms.advantages.grpo import GroupEstimator

@ESTIMATORS.register("own_{name}")
@dataclass(frozen=True, kw_only=True)
class Own(GroupEstimator):
    def compared({parameters}):
        return rewards
"""


@pytest.mark.parametrize(
    ("parameters", "flags", "said"),
    [
        (
            "self, rewards, groups",
            "",
            "(self, rewards, groups) must take the parameters (self, rewards, groups,",
        ),
        ("self, rewards, groups, others", "--disable-rewards-normalization", "compared() of advantage_estimator"),
        (
            "self, rewards, groups, others",
            "--custom-reward-post-process-path json.loads",
            "--custom-reward-post-process-path makes the rewards final",
        ),
    ],
)
def test_an_estimator_that_could_not_be_called_is_refused(
    parameters: str, flags: str, said: str, base: list[str], tmp_path: Path
) -> None:
    """Law: an estimator of the user is used, or the start says why it cannot be; not step 0."""
    file = tmp_path / f"own_{tmp_path.name}.py"
    file.write_text(OWN_GROUPS.format(name=tmp_path.name, parameters=parameters))
    assert said in refused([*base, "--advantage-estimator", str(file), *flags.split()])
