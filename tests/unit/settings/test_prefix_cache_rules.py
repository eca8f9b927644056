"""Law: engines whose weights change have no cache that could give them what other weights have read."""

from __future__ import annotations

import pytest

from slime.settings import parse_args
from slime.settings.groups.engines import CPP_TREE_ENV
from tests.support.command_line import refused

STORES = (
    "--sglang-enable-hierarchical-cache --sglang-hicache-storage-backend file",
    "--sglang-disaggregation-decode-enable-offload-kvcache --sglang-hicache-storage-backend mooncake",
    "--sglang-enable-lmcache",
    "--sglang-enable-flexkv",
    "--sglang-radix-cache-backend flexkv",
)
UNDIVIDED = ("--sglang-enable-hierarchical-cache", "--sglang-enable-streaming-session")
MODES = ("abort", "retract", "in_place", "auto")


def paused(base: list[str], mode: str) -> list[str]:
    return [*base, "--fully-async", "--pause-generation-mode", mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flags", STORES)
def test_a_store_that_a_flush_does_not_empty_is_refused_however_engines_pause(
    base: list[str], flags: str, mode: str
) -> None:
    message = refused([*paused(base, mode), *flags.split()], synchronous=False)
    assert f"{flags[flags.rindex('--') :]} would serve prefixes of old weights" in message, message
    assert "survives a flush" in message and "drop it" in message


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flag", UNDIVIDED)
def test_what_is_flushed_and_not_divided_is_for_abort(base: list[str], flag: str, mode: str) -> None:
    flags = [*paused(base, mode), flag]
    if mode == "abort":
        parse_args(flags, synchronous=False)
    else:
        message = refused(flags, synchronous=False)
        for said in (f"{flag} would serve", "not keyed by weights", "--pause-generation-mode abort"):
            assert said in message


@pytest.mark.parametrize("mode", MODES)
def test_the_tree_in_cpp_is_for_abort(base: list[str], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = paused(base, mode)
    monkeypatch.setenv(CPP_TREE_ENV, "0")
    parse_args(flags, synchronous=False)
    monkeypatch.setenv(CPP_TREE_ENV, "True")
    if mode == "abort":
        parse_args(flags, synchronous=False)
    else:
        assert f"{CPP_TREE_ENV}=True in the environment" in refused(flags, synchronous=False)
        parse_args([*flags, "--sglang-disable-radix-cache"], synchronous=False)


def test_engines_whose_weights_stay_may_have_a_store(base: list[str]) -> None:
    parse_args([*base, "--debug-rollout-only", "--sglang-enable-lmcache"])
