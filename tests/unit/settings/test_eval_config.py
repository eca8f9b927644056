"""Evaluation datasets from a file: entry before defaults before command line, and nothing that is not meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.core.errors import ConfigError, HookError
from slime.rollout.generate import eval_sampling_params
from slime.settings import check_hooks
from slime.settings.eval_config import eval_datasets
from tests.support.rollout import rollout_args, write_prompts


def parsed(tmp_path: Path, content: Any, *flags: str) -> Any:
    file = tmp_path / "eval.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return rollout_args(tmp_path, "--eval-interval", "1", "--eval-config", str(file), *flags)


def test_an_entry_wins_over_the_defaults_and_they_over_the_command_line(tmp_path: Path) -> None:
    data = str(write_prompts(tmp_path / "held.jsonl", 2))
    entries = {"a": {"path": data, "temperature": 0, "stop": ["x"]}, "b": {"path": data, "top_k": 3}}
    defaults = {"temperature": 0.6, "n_samples_per_eval_prompt": 4}
    args = parsed(tmp_path, {"eval": {"defaults": defaults, "datasets": entries}}, "--eval-top-p", "0.9")
    a, b = eval_datasets(args)
    assert (a.name, a.temperature, a.n_samples_per_eval_prompt, a.label_key) == ("a", 0.0, 4, "label")
    assert (b.temperature, b.top_k, b.stop, b.max_response_len) == (0.6, 3, None, 8)
    recorded = json.loads(json.dumps(args.to_json_dict()))["eval_datasets"]
    assert [(one["name"], one["path"], one["temperature"]) for one in recorded] == [("a", data, 0.0), ("b", data, 0.6)]
    assert eval_sampling_params(a) == {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": -1,
        "skip_special_tokens": False,
        "stop": ["x"],
        "max_new_tokens": 8,
    }


def test_pairs_on_the_command_line_are_datasets_with_its_settings(tmp_path: Path) -> None:
    data = str(write_prompts(tmp_path / "held.jsonl", 2))
    args = rollout_args(tmp_path, "--eval-interval", "1", "--eval-prompt-data", "a", data, "--eval-temperature", "0")
    (one,) = eval_datasets(args)
    assert (one.name, one.path, one.temperature, one.rm_type) == ("a", data, 0.0, None)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("eval: [", "is not YAML"),
        ({"datasets": []}, "unknown key 'datasets'"),
        ({"eval": {}}, "no eval.datasets"),
        ({"eval": {"datasets": [{"name": "a"}]}}, "no name or no path"),
        ({"eval": {"datasets": [{"name": "a", "path": "D", "temprature": 1}]}}, "did you mean temperature"),
        ({"eval": {"datasets": [{"name": "a", "path": "D", "top_k": "all"}]}}, "but must be an integer"),
        ({"eval": {"datasets": [{"name": "a", "path": "D"}, {"name": "a", "path": "D"}]}}, "are named 'a'"),
        ({"eval": {"defaults": {"path": "D"}, "datasets": [{"name": "a", "path": "D"}]}}, "unknown key 'path'"),
        ({"eval": {"datasets": [{"name": "a", "path": "missing.jsonl"}]}}, "does not exist"),
        ({"eval": {"datasets": [{"name": "a", "path": "D", "rm_type": "maths"}]}}, "maths"),
        (
            {"eval": {"datasets": [{"name": "a", "path": "D", "temperature": -1}]}},
            ".temperature is -1.0, but must be at least 0",
        ),
        (
            {"eval": {"datasets": [{"name": "a", "path": "D", "n_samples_per_eval_prompt": 0}]}},
            "n_samples_per_eval_prompt is 0, but must be at least 1",
        ),
        (
            {"eval": {"datasets": [{"name": "a", "path": "D", "max_total_response_len": 0}]}},
            "max_total_response_len is 0, but must be at least 1",
        ),
        ({"eval": {"datasets": [{"name": "a", "path": "D", "eval_task_timeout": 0}]}}, "eval_task_timeout is 0.0, but"),
        ({"eval": {"datasets": [{"name": "a", "path": "D", "min_eval_samples": 0}]}}, "min_eval_samples is 0, but"),
        ({"eval": {"datasets": [{"name": "a", "path": "D", "max_context_len": 9, "max_prompt_len": 9}]}}, "no token"),
        ({"eval": {"datasets": [{"name": "a", "path": "D", "max_context_len": 5000}]}}, "at most 1024 tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, content: Any, told: str) -> None:
    data = write_prompts(tmp_path / "held.jsonl", 2)
    text = content if isinstance(content, str) else yaml.safe_dump(content).replace("path: D", f"path: {data}")
    with pytest.raises(ConfigError, match=told):
        parsed(tmp_path, text)


def test_a_key_that_nothing_reads_is_listed(tmp_path: Path) -> None:
    data = str(write_prompts(tmp_path / "held.jsonl", 2))
    content = {"eval": {"defaults": {"owner": "x"}, "datasets": {"a": {"path": data, "licence": "free"}}}}
    args = parsed(tmp_path, content)
    assert args.idle["eval_config.licence"] == "free, which nothing reads" and "eval_config.owner" in args.idle
    with pytest.raises(ConfigError, match="licence"):
        parsed(tmp_path, content, "--strict")
    content["eval"]["datasets"]["a"]["temprature"] = 1.0
    with pytest.raises(ConfigError, match="did you mean temperature"):
        parsed(tmp_path, content)


def test_two_sources_of_datasets_are_refused(tmp_path: Path) -> None:
    data = str(write_prompts(tmp_path / "held.jsonl", 2))
    with pytest.raises(ConfigError, match="set only one of them"):
        parsed(tmp_path, {"eval": {"datasets": {"a": {"path": data}}}}, "--eval-prompt-data", "a", data)


def test_functions_of_datasets_are_checked_with_all_others(tmp_path: Path) -> None:
    data = str(write_prompts(tmp_path / "held.jsonl", 2))
    entry = {"path": data, "custom_rm_path": "os:getcwd", "custom_generate_function_path": "no.such:thing"}
    args = parsed(tmp_path, {"eval": {"datasets": {"a": entry}}})
    with pytest.raises(HookError, match=r"no.such[\s\S]*getcwd"):
        check_hooks(args)


def test_a_replay_does_not_evaluate_because_it_has_no_engines(tmp_path: Path) -> None:
    data = ("--eval-prompt-data", "held", str(write_prompts(tmp_path / "held.jsonl", 2)))
    replay = ("--load-debug-rollout-data", str(tmp_path / "{rollout_id}.jsonl.zst"))
    args = rollout_args(tmp_path, "--eval-interval", "1", *data, *replay)
    assert args.eval_interval is None and "which needs engines" in args.idle["eval_interval"]
