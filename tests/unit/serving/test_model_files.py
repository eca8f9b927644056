"""Files of other models are left out of an engine; those of its own, and all in case of doubt, never are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.serving.server import LEAVE_OUT_ENV, ServerSpec, files_left_out, left_out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four files of models: `beta` uses `alpha`, and `gamma` names its class in a comment."""
    texts = {
        "alpha": "class AlphaForCausalLM(Module):\n    pass\nEntryClass = AlphaForCausalLM\n",
        "beta": "from alpha import AlphaForCausalLM\nclass BetaForCausalLM(AlphaForCausalLM):\n    pass\n",
        "gamma": "# class AlphaForCausalLM is elsewhere\nclass Gamma(Module): ...\n",
        "transformers": "class TransformersForCausalLM(Module): ...\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_only_the_file_that_defines_the_class_and_the_fallback_stay(folder: Path) -> None:
    assert left_out(["AlphaForCausalLM"], folder) == ["beta", "gamma"]
    assert left_out(["BetaForCausalLM", "Gamma"], folder) == ["alpha"]


def test_in_case_of_doubt_nothing_is_left_out(folder: Path) -> None:
    assert left_out(["DeltaForCausalLM"], folder) == []
    assert left_out(["AlphaForCausalLM", "DeltaForCausalLM"], folder) == []
    assert left_out([], folder) == []


def config_of(tmp_path: Path, architecture: str) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return str(tmp_path)


def test_the_installed_sglang_needs_one_file_for_qwen3(tmp_path: Path) -> None:
    names = files_left_out(config_of(tmp_path, "Qwen3ForCausalLM"), {})
    assert len(names) > 100 and not {"qwen3", "transformers"} & set(names)


@pytest.mark.parametrize("setting", ["speculative_algorithm", "model_impl", "quantization"])
def test_settings_that_may_choose_another_class_leave_all_files(tmp_path: Path, setting: str) -> None:
    assert files_left_out(config_of(tmp_path, "Qwen3ForCausalLM"), {setting: "x"}) == []


def test_a_list_of_the_users_own_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ServerSpec(model_path=config_of(tmp_path, "Qwen3ForCausalLM"), dtype="float32")
    assert LEAVE_OUT_ENV in spec.environment()
    monkeypatch.setenv(LEAVE_OUT_ENV, "gemma")
    assert LEAVE_OUT_ENV not in spec.environment()
