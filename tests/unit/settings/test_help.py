"""`--help`: a first page, topics and search, and defaults that are those of a run."""

from __future__ import annotations

import re
import sys

import pytest

from slime.core.errors import ConfigError
from slime.core.hf_config import text_config
from slime.core.text import program
from slime.models import architecture
from slime.settings import Args, parse_args
from slime.settings.all_flags import engine_flags, own_flags
from slime.settings.command_line import default_shown, help_or_version, help_text, json_line, topics
from slime.settings.flags import FIRST_PAGE, Flag
from slime.settings.groups import GROUPS
from slime.settings.groups.training import OPTIMIZER_VALUES
from slime.settings.megatron import DOCS, FIRST, FIXED, OF_CHECKPOINT
from tests.support.published import SYNCED

FLAG = re.compile(r"^  (--[\w-]+)", re.MULTILINE)
ENGINES = ("megatron", "sglang", "router")


def shown(topic: str) -> list[str]:
    """The first spelling of each flag that a topic shows, without the options of --help itself."""
    own = ("--help", "--explain", "--version", "--override")
    return [name for name in FLAG.findall(help_text(topic)) if name not in own]


def users(flags: tuple[Flag, ...]) -> list[str]:
    return [flag.names[0] for flag in flags if not flag.internal]


def test_the_first_page_has_what_a_first_run_needs() -> None:
    """Law: about thirty flags, under the headings in their order, with all that are required and every topic."""
    names, text = shown(""), help_text("")
    assert 25 <= len(names) <= 36 and len(set(names)) == len(names), names
    required = [flag.names[0] for flag in own_flags() if flag.required]
    assert {*required, "--prompt-data", "--rm-type", "--lr", "--save", "--load", "--eval-prompt-data"} <= {*names}
    assert [line for line in text.splitlines() if line in FIRST_PAGE] == list(FIRST_PAGE)
    assert all(re.search(rf"^  {topic} ", text, re.MULTILINE) for topic in topics())
    assert len(text.splitlines()) < 180


def test_every_heading_of_the_first_page_is_known_and_every_engine_flag_on_it_exists() -> None:
    flags = [*own_flags(), *engine_flags("megatron")]
    assert {flag.first for flag in flags} == {"", *FIRST_PAGE}
    assert {*FIRST, *DOCS} <= {flag.dest for flag in engine_flags("megatron")}


def test_the_topics_of_the_groups_show_every_flag_of_slime_once() -> None:
    """Law: no group is without a topic, and a flag is on the page of one topic."""
    own = {group.topic for group in GROUPS}
    found = [name for topic in own for name in shown(topic)]
    assert sorted(found) == sorted(users(own_flags())) == sorted(shown("slime"))
    for topic in ("data", "reward", "rollout", "eval", "algorithm", "checkpoint", "placement", "agent", "async"):
        assert topic in own
    assert {"weight-sync", "observability"} <= own and "optimizer" in topics()


def test_all_shows_every_flag_of_every_owner_once() -> None:
    every = [*own_flags(), *(flag for owner in ENGINES for flag in engine_flags(owner))]
    assert sorted(shown("all")) == sorted(users(tuple(every)))
    for owner in ENGINES:
        assert shown(owner) == users(engine_flags(owner))


def test_the_settings_of_an_entry_are_with_the_setting_that_selects_it() -> None:
    assert {"--advantage-estimator", "--gamma", "--eps-clip"} <= {*shown("algorithm")}
    assert {"--update-weight-transport", "--update-weight-disk-dir"} <= {*shown("weight-sync")}


def test_the_topic_of_the_optimizer_has_its_rate_decay_and_muon() -> None:
    names = shown("optimizer")
    assert {"--lr", "--min-lr", "--lr-decay-style", "--weight-decay", "--adam-beta1", "--muon-tp-mode"} <= {*names}
    assert {*names} < {*shown("megatron")} and "--num-layers" not in names


def test_a_word_that_is_no_topic_is_searched() -> None:
    found = shown("clip")
    assert {"--eps-clip", "--clip-grad", "--tis-clip"} <= {*found} and all("clip" in name for name in found)
    assert shown("--clip-grad") == shown("--clip_grad") == ["--clip-grad"]
    assert shown("reasoning-gym") == ["--prompt-data"], "a word of a text only"
    assert "slime train --help reward" in help_text("rewards")


@pytest.mark.parametrize(
    ("word", "near"), [("rolout", "rollout"), ("checkpiont", "checkpoint"), ("observabilty", "observability")]
)
def test_a_wrong_topic_suggests_near_ones(word: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"has no topic {word}, and no flag has this word.*did you mean {near}"):
        help_text(word)
    with pytest.raises(ConfigError, match=r"choose from placement, rollout, .*all"):
        help_text("xyzzy")


def test_flags_beside_help_change_nothing() -> None:
    first = help_text("")
    assert help_or_version(["--help", "--lr", "3"]) == help_or_version(["--lr", "3", "--help"]) == first
    assert help_or_version(["--help", "--explain"]) == first
    assert help_or_version(["--lr", "3", "--help", "data"]) == help_text("data")


@pytest.mark.parametrize(
    ("started", "command", "shown_as"),
    [
        ("/usr/bin/slime", "train", "slime train"),
        ("/code/slime/__main__.py", "serve", "python -m slime serve"),
        ("/code/slime/cli/main.py", "", "python -m slime"),
        ("train.py", "train", "python train.py"),
        ("/code/train_async.py", "train-async", "python /code/train_async.py"),
        ("mine/loop.py", "train", "python mine/loop.py"),
    ],
)
def test_the_usage_names_the_command_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, started: str, command: str, shown_as: str
) -> None:
    monkeypatch.setattr(sys, "argv", [started, "--help"])
    assert program(command) == shown_as
    assert help_text("", program(command)).startswith(f"usage: {shown_as} --hf-checkpoint")


def resolved(args: Args, flag: Flag) -> tuple[object, str]:
    """The value of a setting in a run and where it came from."""
    if flag.owner == "slime":
        value = getattr(args, flag.dest) if hasattr(args, flag.dest) else args.components[flag.dest]
        return value, args.origins[flag.dest]
    of = args.megatron if flag.owner == "megatron" else args.sglang
    name = f"{flag.owner}.{flag.dest}"
    return of.get(flag.dest, flag.default), args.origins.get(name, "default of the engine")


def as_shown(flag: Flag, value: object) -> str:
    if flag.kind == "bool":
        return "on" if value else "off"
    return "none" if value is None else f"default {json_line(value)}"


def test_help_shows_the_defaults_of_a_plain_run(base: list[str]) -> None:
    """Law: the value that --help shows for a flag is that of a run without it. Where it is derived, --help says so."""
    args = parse_args(base)
    given = {name for name, origin in args.origins.items() if origin == "command line"}
    wrong = []
    for flag in (*own_flags(), *engine_flags("megatron"), *engine_flags("sglang")):
        name = flag.dest if flag.owner == "slime" else f"{flag.owner}.{flag.dest}"
        if flag.internal or name in given:
            continue
        told, (value, origin) = default_shown(flag), resolved(args, flag)
        if origin == "HF config":
            fine = told.startswith(("from the checkpoint", f"always {value}: "))
        elif origin.startswith("derived") or told == "":
            fine = flag.derived or "derived" in told
        elif told.startswith("always "):
            fine = told.startswith(f"always {as_shown(flag, value).removeprefix('default ')}: ")
        else:
            fine = told.startswith(("from the checkpoint", "derived")) or re.split("[,;] ", told)[0] == as_shown(
                flag, value
            )
        if not fine:
            wrong.append(f"{flag.names[0]} [{told}], but {value!r} ({origin})")
    assert not wrong, "\n".join(wrong)


def test_what_a_checkpoint_defines_has_no_default_in_help() -> None:
    """Law: `OF_CHECKPOINT` and the settings that slime fixes are all that the families of the models set."""
    names: set[str] = set()
    for config, _ in SYNCED.values():
        names |= architecture(text_config(config)).keys()
    assert names <= OF_CHECKPOINT | FIXED.keys(), names - OF_CHECKPOINT
    assert names >= OF_CHECKPOINT, "no family sets them"


def test_help_lists_the_values_that_the_optimizer_accepts() -> None:
    text = help_text("optimizer")
    for flag in engine_flags("megatron"):
        if flag.dest in OPTIMIZER_VALUES:
            assert f"{flag.names[0]} {{{'|'.join(OPTIMIZER_VALUES[flag.dest])}}}" in text
    assert 'Defaults to "blockwise"' not in text and "[default duplicated; Megatron's is blockwise]" in text
