"""Topologies as the docs write them: the YAML of a page starts, and serves what it says."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

import pytest

from slime.rollout.recordings import load_rollout
from tests.support.e2e import ROOT, Flags, RealRun, started_and_finished
from tests.support.engines import needs_pairs
from tests.support.faults import SERVER, hit, victim_of

pytestmark = pytest.mark.slow
ENGINES_LIMIT_S = 300.0

SERVING = re.compile(r"serving at actor at (http://\S+), judge at (http://\S+) \(")


def documented(page: str, folder: Path, judge: Path) -> Path:
    """The first YAML block of a page of the docs, with a judge that exists."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.S)
    file = folder / f"documented_{page}.yaml"
    file.write_text(blocks[0].replace("/models/judge", str(judge)))
    return file


@pytest.fixture(scope="module")
def judge(runs: Path, tiny_qwen3: Path) -> Path:
    """Another checkpoint folder; its weights are the policy's before training."""
    return Path(shutil.copytree(tiny_qwen3, runs / "judge", dirs_exist_ok=True))


def test_hooks_ask_a_judge_that_training_leaves_as_it_is(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path, judge: Path
) -> None:
    """Law: a frozen model answers what its checkpoint says, in every step, whatever the policy has learned."""
    config = documented("serving_topology", runs, judge)
    flags: Flags = [
        *digits(tiny_qwen3),
        *("--sglang-config", config, "--num-rollout", "3", "--lr", "2e-2", "--lr-decay-style", "constant"),
        *("--custom-generate-function-path", "tests.support.judged:generate"),
        *("--save-debug-rollout-data", runs / "judged" / "{rollout_id}"),
    ]
    run = started_and_finished(runs / "judged-run", flags)
    assert sorted(run.metrics("train")) == [0, 1, 2]
    verdicts: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for step in range(3):
        _, groups = load_rollout(runs / "judged" / str(step))
        for sample in (sample for group in groups for sample in group):
            assert len(sample.metadata["verdict"]) == 8 and sample.metadata["version"] == 0
            verdicts.setdefault(tuple(sample.tokens[:3]), set()).add(tuple(sample.metadata["verdict"]))
    assert verdicts and all(len(found) == 1 for found in verdicts.values())
    logs = sorted(path.name for path in (run.run_dir / "logs").glob("router*.log"))
    assert logs == ["router.log", "router_judge.log"]
    served = (run.run_dir / "logs" / "engine_1.log").read_text()
    assert "--max-running-requests 8" in served
    assert not re.search(r'/update_weights\S* HTTP/1.1" 200', served), "somebody gave the judge weights"


def test_the_file_alone_is_served(runs: Path, tiny_qwen3: Path, judge: Path) -> None:
    """Law: `slime serve FILE` is the fleet of the file: each model behind a router of its own."""
    flags: Flags = [
        *("--sglang-config", documented("serving_topology", runs, judge), "--hf-checkpoint", tiny_qwen3, "--no-bf16"),
        *("--debug-rollout-only", "--num-rollout", "0", "--rollout-batch-size", "1"),
    ]
    with RealRun(runs / "served", flags) as run:
        run.wait_until("word of the routers", lambda: SERVING.search(run.output) is not None)
        found = SERVING.search(run.output)
        assert found is not None
        key = (run.run_dir / "router_key").read_text()
        answers = [ask(url, key) for url in found.groups()]
        assert answers[0]["output_ids"] == answers[1]["output_ids"], "the same checkpoint answers the same"
        run.require_closed()
        assert run.interrupt() == 130, run.tail
        assert run.left() == []


@needs_pairs
def test_pairs_train_and_go_on_when_either_half_is_killed(
    runs: Path, digits: Callable[[Path], Flags], tiny_qwen3: Path
) -> None:
    """Law: a run whose prompts are read by one engine and sampled by another trains as any does: requests go on through
    weight syncs and through the end of either, every token is trained once, and both have the trainer's weights.
    """
    flags: Flags = [
        *digits(tiny_qwen3),
        *("--sglang-config", documented("prefill_decode", runs, runs), "--fully-async", "--max-weight-staleness", "2"),
        *("--num-rollout", "100000", "--lr", "1e-3", "--lr-decay-style", "constant"),
    ]
    run_dir = runs / "pairs"
    with RealRun(run_dir, flags, script="train_async.py") as run:

        def steps() -> int:
            return max(run.metrics("train"), default=-1) if (run_dir / "metrics.jsonl").exists() else -1

        run.wait_until("step 1", lambda: steps() >= 1)
        for half in (0, 1):
            hit(victim_of(run, SERVER, half), signal.SIGKILL)
            lost, back = f"engine {half} was lost", f"engine {half} serves again"
            run.wait_until("word of the loss", lambda said=lost: said in run.output)  # type: ignore[misc]
            run.wait_until("it to serve again", lambda said=back: said in run.output)  # type: ignore[misc]
            after = steps()
            run.wait_until("two steps more", lambda least=after + 2: steps() >= least)  # type: ignore[misc]
        assert run.interrupt() == 130, run.tail
        assert run.left() == []
    for step, row in run.metrics("train").items():
        assert row["data/failed"] == 0, (step, row)
        assert row.get("train/train_rollout_logprob_abs_diff_current", 0.0) < 1e-4, (step, row)
    logs = run_dir / "logs"
    assert "--disaggregation-mode prefill" in (logs / "engine_0_1.log").read_text()
    assert "--disaggregation-mode decode" in (logs / "engine_1_1.log").read_text()


def ask(url: str, key: str) -> dict[str, list[int]]:
    """A greedy answer of a router, which on a busy machine hears of its engines after it says where it serves."""
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}
    request = urllib.request.Request(
        f"{url}/generate",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + ENGINES_LIMIT_S
    while True:
        try:
            with opener.open(request, timeout=120) as response:
                answer: dict[str, list[int]] = json.loads(response.read())
                return answer
        except urllib.error.HTTPError as refusal:
            if refusal.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                raise
            time.sleep(1)
