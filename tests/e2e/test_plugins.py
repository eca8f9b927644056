"""Law: a plugin written for the public slime, by its names alone, imports, is accepted and trains two real steps.

Each kind of plugin is a file of `tests/support/plugins`. Its samples are the ones that it should give, tokens as they
were sampled; what one of them re-encodes otherwise is refused sample by sample, and ends no run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.core.sample import NOT_SAMPLED, Sample
from slime.observability.sinks import read_jsonl
from tests.support.e2e import Flags, RealRun, recorded_groups, started_and_finished
from tests.support.vision import write_colours, write_vision_model

pytestmark = pytest.mark.slow
NUM_STEPS, PER_STEP, PER_PROMPT, LIMIT = 2, 4, 4, 1e-3
"""`LIMIT`: worst gap of a log-prob between engine and trainer, in float32."""


@dataclass(frozen=True)
class Case:
    flags: tuple[str, ...]
    holds: Callable[[list[Sample]], Any]
    """Of the samples of one execution."""
    script: str = "train.py"
    prompt: Callable[[int], Any] = lambda row: f"{row}+{row}="
    label: Callable[[int], Any] = lambda row: str(2 * row)
    config: str = ""
    """Settings of the plugin's own, as YAML."""


def plugin(name: str, *more: str, function: str = "generate") -> tuple[str, ...]:
    return ("--custom-generate-function-path", f"tests.support.plugins.{name}.{function}", *more)


def reward_of(name: str) -> tuple[str, ...]:
    return ("--custom-rm-path", f"tests.support.plugins.{name}.reward_func")


def num_turns(sample: Sample) -> int:
    """Of runs of trained tokens."""
    mask = [0, *(sample.loss_mask or [1] * sample.response_length)]
    return sum(1 for before, now in itertools.pairwise(mask) if now and not before)


DIGITS = ("--custom-rm-path", "recipes.tiny.tasks:digit_fraction")
CASES = {
    "python tool": Case(
        plugin("python_tool", *reward_of("python_tool"), "--reward-key", "score"),
        lambda found: len(found) == 1 and num_turns(found[0]) >= 2 and "tool_call_count" in found[0].attributes,
    ),
    "search by ids": Case(
        plugin("search", *reward_of("search")),
        lambda found: len(found) == 1 and num_turns(found[0]) == 2,
        label=lambda row: {"ground_truth": {"target": [str(2 * row)]}, "style": "rule"},
    ),
    "judge": Case(reward_of("judge"), lambda found: num_turns(found[0]) == 1 and found[0].reward is not None),
    "search by text": Case(
        plugin("search", *reward_of("search"), "--rollout-skip-special-tokens", function="generate_by_text"),
        lambda found: found[0].unscored.startswith("not as sampled") or num_turns(found[0]) >= 1,
    ),
    "multi-agent": Case(
        plugin("multi_agent", *DIGITS, "--rm-type", "random"),
        lambda found: len(found) == 5 and len({*map(id, found)}) == 5,
    ),
    "user simulator": Case(
        plugin("user_simulator"),
        lambda found: len(found) == 1 and isinstance(found[0].prompt, int) and found[0].metadata["turns"] == 2,
        prompt=lambda row: row,
    ),
    "own HTTP client": Case(plugin("own_client", *DIGITS), lambda found: num_turns(found[0]) == 2),
    "black-box agent": Case(
        plugin("coding_agent", "--rollout-max-context-len", "200"), lambda found: found[0].metadata["solved"] is True
    ),
    "own weights": Case(
        (*DIGITS, "--use-tis", "--custom-tis-function-path", "tests.support.plugins.mismatch.compute_weights"),
        lambda found: num_turns(found[0]) == 1,
        config="use_rs: true\nrs_lower_bound: 0.5\nrs_upper_bound: 2.0\ntis_lower_bound: 0.5\ntis_upper_bound: 2.0\n",
    ),
    "fully async": Case(
        (
            *("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
            *plugin("search", *reward_of("search")),
        ),
        lambda found: num_turns(found[0]) == 2,
        script="train_async.py",
    ),
    "rollout buffer": Case(
        ("--rollout-function-path", "tests.support.plugins.rollout_buffer.generate_rollout", "--rm-type", "random"),
        lambda found: num_turns(found[0]) == 1,
    ),
}


def test_a_public_plugin_shows_pictures_in_later_turns(tmp_path: Path) -> None:
    """What an environment adds is trained on as the engine saw it."""
    model, data = write_vision_model(tmp_path / "model"), write_colours(tmp_path / "data")
    recorded = str(tmp_path / "rollouts" / "{rollout_id}.jsonl")
    flags: Flags = [
        *("--hf-checkpoint", model, "--prompt-data", data, "--input-key", "problem", "--label-key", "answer"),
        *("--multimodal-keys", '{"image": "images"}', "--apply-chat-template", "--no-bf16", *DIGITS),
        *("--rollout-batch-size", str(PER_STEP), "--n-samples-per-prompt", "2", "--num-rollout", str(NUM_STEPS)),
        *("--lr", "1e-3", "--rollout-max-response-len", "8", "--save-debug-rollout-data", recorded),
        *plugin("vision"),
    ]
    run = started_and_finished(tmp_path / "run", flags)
    groups = [group for step in range(NUM_STEPS) for group in recorded_groups(recorded, step)]
    found = [sample for group in groups for sample in group if sample.reward is not None]
    assert len(found) > NUM_STEPS * PER_STEP and all(num_turns(one) == 2 and len(one.images) >= 2 for one in found)
    assert max(run.series("train", "train/train_rollout_logprob_abs_diff_max")) < LIMIT and run.left() == []


@pytest.mark.parametrize("name", CASES)
def test_a_public_plugin_trains_as_it_is(name: str, tmp_path: Path, tiny_qwen3: Path) -> None:
    case = CASES[name]
    run, executions = trained(case, tmp_path, tiny_qwen3)
    assert len(run.series("train", "train/loss")) == NUM_STEPS and run.left() == []
    assert len(executions) == NUM_STEPS * PER_STEP * PER_PROMPT
    for found in executions:
        assert case.holds(found), found
    trained_samples = [one for found in executions for one in found if one.reward is not None]
    assert trained_samples
    for one in trained_samples:
        versions, mask = one.token_versions or [], one.loss_mask or [1] * one.response_length
        assert len(versions) == one.response_length == len(mask)
        assert all((version != NOT_SAMPLED) or not trains for version, trains in zip(versions, mask, strict=True))
    if case.script == "train.py":
        assert max(run.series("train", "train/train_rollout_logprob_abs_diff_max")) < LIMIT


def test_a_plugin_that_trains_no_sampled_token_ends_no_run(tmp_path: Path, tiny_qwen3: Path) -> None:
    """Law: a step whose samples are all refused trains nothing, weight decay included, and says so; the run goes on."""
    exported = tmp_path / "exported"
    flags = ("--save-hf", str(exported), "--save-interval", str(NUM_STEPS), "--weight-decay", "0.5")
    case = Case(
        plugin("search", *reward_of("search"), *flags, function="generate_and_encode_again"),
        lambda found: len(found) == 1 and found[0].unscored.startswith("not as sampled"),
    )
    run, executions = trained(case, tmp_path, tiny_qwen3)
    assert run.left() == [] and len(executions) == NUM_STEPS * PER_STEP * PER_PROMPT
    assert all(case.holds(found) for found in executions)
    rows, num_samples = read_jsonl(run.run_dir / "metrics.jsonl"), PER_STEP * PER_PROMPT
    said = {
        name: [row[name] for row in rows if name in row]
        for name in ("rollout/num_unscored_samples", "rollout/num_refused_samples", "train/num_updates")
    }
    assert said["rollout/num_unscored_samples"] == [num_samples] * NUM_STEPS
    assert min(said["rollout/num_refused_samples"]) >= num_samples and said["train/num_updates"] == [0.0] * NUM_STEPS
    assert run.output.count("TRAINS NOTHING") == NUM_STEPS
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_qwen3, exported))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def trained(case: Case, tmp_path: Path, model: Path) -> tuple[RealRun, list[list[Sample]]]:
    """A finished run, and the samples of each execution."""
    rows = [{"prompt": case.prompt(row), "label": case.label(row)} for row in range(32)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.yaml").write_text(case.config)
    recorded = str(tmp_path / "rollouts" / "{rollout_id}.jsonl")
    flags: Flags = [
        *("--hf-checkpoint", model, "--ref-load", model, "--prompt-data", data, "--input-key", "prompt"),
        *("--label-key", "label", "--no-bf16", "--rollout-batch-size", str(PER_STEP)),
        *("--n-samples-per-prompt", str(PER_PROMPT), "--num-rollout", str(NUM_STEPS), "--lr", "1e-3"),
        *("--rollout-max-response-len", "12", "--save-debug-rollout-data", recorded, *case.flags),
        *(("--custom-config-path", tmp_path / "own.yaml") if case.config else ()),
    ]
    run = started_and_finished(tmp_path / "run", flags, script=case.script)
    executions: dict[int, list[Sample]] = {}
    for step in range(NUM_STEPS):
        for sample in (one for group in recorded_groups(recorded, step) for one in group):
            executions.setdefault(sample.index or 0, []).append(sample)
    return run, list(executions.values())
