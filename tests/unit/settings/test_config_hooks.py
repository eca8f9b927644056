"""Laws of hooks: found by any spelling of a path, and refused before the run if slime could not call them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.core.errors import HookError
from slime.settings.args import Args
from slime.settings.hook_contracts import CONTRACTS, accepts_keyword, check_hooks, load_hook

SOURCE = """
async def good_generate(args, sample, sampling_params, evaluation=False): return sample
async def short_generate(args, sample): return sample
def sync_generate(args, sample, sampling_params): return sample
def reward(args, sample, **kw): return 1.0
async def async_reward(args, sample): return 1.0
def rollout(args, rollout_id, data_source): return []
def keep(args, samples, **kw): return True
class Source:
    def __init__(self, args): pass
    def get_samples(self, n): pass
    def add_samples(self, groups): pass
    def save(self, rollout_id): pass
    def load(self, rollout_id=None): pass
    def __len__(self): return 0
class Half:
    def __init__(self, args): pass
    def get_samples(self, n): pass
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_hooks.py"
    path.write_text(SOURCE)
    return str(path)


def test_the_three_spellings_find_the_same(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_hook("my_hooks:reward", "custom_rm") is load_hook("my_hooks.reward", "custom_rm")
    assert load_hook(f"{file}:reward", "custom_rm")(None, None) == 1.0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("good_generate", "generate"),
        ("reward", "custom_rm"),
        ("async_reward", "custom_rm"),
        ("keep", "dynamic_filter"),
        ("Source", "data_source"),
    ],
)
def test_what_slime_can_call_is_accepted(file: str, name: str, kind: str) -> None:
    assert load_hook(f"{file}:{name}", kind).__name__ == name


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("short_generate", "generate", "args, sample, sampling_params"),
        ("sync_generate", "generate", "not async"),
        ("rollout", "rollout", "evaluation"),
        ("async_reward", "dynamic_filter", "is async"),
        ("Half", "data_source", "does not define add_samples, save, load, __len__"),
        ("reward", "data_source", "a function"),
        ("number", "custom_rm", "is a int"),
        ("rewrad", "custom_rm", "it defines"),
    ],
)
def test_what_slime_cannot_call_is_refused_and_told_what_is_expected(
    file: str, name: str, kind: str, said: str
) -> None:
    with pytest.raises(HookError) as error:
        load_hook(f"{file}:{name}", kind)
    assert said in str(error.value)


@pytest.mark.parametrize("path", ["nothing", "no.such.module:fn", "missing_file.py:fn"])
def test_a_path_to_nowhere_is_refused(path: str) -> None:
    with pytest.raises(HookError):
        load_hook(path, "custom_rm")


def test_every_contract_belongs_to_a_setting() -> None:
    assert all(c.flag in Args.__dataclass_fields__ for c in CONTRACTS.values())


def test_all_configured_hooks_are_checked_at_once(file: str) -> None:
    args = Args(
        rollout_function_path=f"{file}:rollout",
        custom_generate_function_path=f"{file}:sync_generate",
        custom_rm_path=f"{file}:reward",
    )
    with pytest.raises(HookError) as error:
        check_hooks(args)
    assert "rollout-function-path" in str(error.value) and "custom-generate-function-path" in str(error.value)
    assert "custom-rm-path" not in str(error.value)


def test_optional_keywords_are_seen(file: str) -> None:
    assert accepts_keyword(load_hook(f"{file}:good_generate", "generate"), "evaluation")
