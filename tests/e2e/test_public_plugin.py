"""A plugin written by the public names alone trains a real tiny model on real engines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from statistics import fmean

import pytest

from recipes.tiny.tasks import DIGITS_FILE
from slime.core.sample import NOT_SAMPLED
from slime.observability.sinks import read_jsonl
from slime.rollout.recordings import load_rollout
from tests.support.e2e import Flags, RealRun, started_and_finished
from tests.support.public_plugin import HINT

PLUGIN = "tests.support.public_plugin"
STEPS = 10
PROFILED = 4
"""The step of which traces are asked for."""
MIN_RISE = 0.07
"""Of 64 answers a tenth of whose characters are digits: three standard errors of the difference."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(runs: Path, tasks: Path, tiny_qwen3: Path) -> RealRun:
    """With the spelling of public scripts: flags that repeat the checkpoint, hooks by path, a dump named .pt."""
    flags: Flags = [
        *("--hf-checkpoint", tiny_qwen3, "--ref-load", tiny_qwen3, "--prompt-data", tasks / DIGITS_FILE),
        *("--input-key", "prompt", "--label-key", "label", "--apply-chat-template", "--no-bf16"),
        *("--use-rotary-position-embeddings", "--train-backend", "megatron", "--log-passrate"),
        *("--log-correct-samples", "--use-pytorch-profiler", "--profile-step-start", str(PROFILED)),
        *("--profile-step-end", str(PROFILED + 1), "--profile-target", "train_actor", "rollout"),
        *("--profile-engine-passes", "3"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--num-rollout", str(STEPS)),
        *("--rollout-max-response-len", "12", "--lr", "2e-2", "--lr-decay-style", "constant"),
        *("--custom-generate-function-path", f"{PLUGIN}.generate", "--rm-type", "exact_match"),
        *("--custom-rm-path", f"{PLUGIN}.reward_func", "--reward-key", "score"),
        *("--dynamic-sampling-filter-path", f"{PLUGIN}.check_something_differs"),
        *("--custom-convert-samples-to-train-data-path", f"{PLUGIN}.convert"),
        *("--rollout-data-postprocess-path", f"{PLUGIN}.postprocess"),
        *("--eval-function-path", f"{PLUGIN}.eval_rollout", "--eval-interval", "5", "--eval-prompt-data"),
        *("own", tasks / DIGITS_FILE, "--save-debug-rollout-data", runs / "plugin-dump" / "{rollout_id}.pt"),
    ]
    return started_and_finished(runs / "plugin", flags)


def test_the_plugin_learns(trained: RealRun) -> None:
    """Law: reward, filter and conversion of the plugin are what the policy follows."""
    reward = trained.series("rollout", "rollout/raw_reward")
    assert len(reward) == STEPS and fmean(reward[-3:]) > reward[0] + MIN_RISE, reward
    rows = read_jsonl(trained.run_dir / "metrics.jsonl")
    assert {row["eval/own"] for row in rows if "eval/own" in row} == {0.5}, "its evaluation is logged as it says"
    assert len(trained.series("rollout", "passrate/pass@1")) == STEPS


def test_what_it_asked_for_is_trained_with_its_versions(trained: RealRun, runs: Path) -> None:
    """Law: of what a plugin sampled by `post`, each trained token has the version of the weights that sampled it."""
    for step in range(STEPS):
        groups = load_rollout(runs / "plugin-dump" / f"{step}.jsonl.zst")[1]
        for sample in (s for group in groups for s in group):
            mask, versions = sample.loss_mask or [], sample.token_versions or []
            assert len(mask) == len(versions) and sample.attributes == {"rounds": 2} and HINT in sample.response
            assert all((v == step + 1) if m else v == NOT_SAMPLED for m, v in zip(mask, versions, strict=True))
    assert max(trained.series("train", "train/train_rollout_logprob_abs_diff_max")) < 1e-3


def test_trainer_and_engines_leave_traces_of_the_asked_step(trained: RealRun) -> None:
    """Law: the asked targets of the asked step have a trace that can be read, and nothing else has."""
    traces = {path.name: json.loads(gzip.decompress(path.read_bytes())) for path in trained.run_dir.glob("profiles/*")}
    names = {f"step_{PROFILED}_train_actor_rank_0.json.gz", f"step_{PROFILED}_engine_0-TP-0.trace.json.gz"}
    assert traces.keys() == names
    for trace in traces.values():
        assert any(str(event.get("name")).startswith("aten::") for event in trace["traceEvents"])
