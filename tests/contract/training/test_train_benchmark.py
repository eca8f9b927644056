"""`benchmarks/train.py` with a tiny shape: a rank in the test process; the command, with ranks of its own. And
`benchmarks/prefix_sharing.py`."""

from __future__ import annotations

import gc
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prefix_sharing, train
from benchmarks.training.rank import Rank
from benchmarks.training.tree import PHASES, load
from slime.training.parallel import destroy_process_groups
from slime.weights.rendezvous import listen_on

FIGURES = ("median_s", "tflops", "tokens_per_s", "matrix_tflops", "share_of_matrix")
PARTS = {*PHASES} - {"log-probs before the update"} | {"whole call"}
"""With one optimizer step the pass that is trained gives the log-probs."""


def check(length: dict[str, Any], *, num_samples: int, mean: int, calls: int) -> None:
    """What a measured length says."""
    assert length["samples"] == num_samples and len(length["calls"]) == calls
    assert all(length[name] > 0 for name in FIGURES) and length["mfu"] is None, "a CPU has no peak"
    assert length["passes_of_warm_up"]["with_gradients"] > 0 == length["passes_of_warm_up"]["without"]
    for call in (length["warm_up"], *length["calls"]):
        assert call["tokens"] == num_samples * mean and call["flops"] > 0 and math.isfinite(call["loss"])
        assert call["tflops"] * call["seconds"] <= call["flops"] / 1e12 * (1 + 1e-9)


@pytest.mark.slow
def test_a_rank_measures_every_length_and_profiles_it(tmp_path: Path) -> None:
    words = "--shape tiny-moe --device cpu --calls 2 --tokens 512 --max-tokens 256 --mean-length 16 --mean-length 64"
    options = train.options_of([*words.split(), "--profile", str(tmp_path / "profile")])
    (spec,) = train.combinations(options)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(spec["model"]))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "unused", "label": "unused"}\n')
    listener = listen_on("127.0.0.1")
    port = listener.getsockname()[1]
    whole = {**spec, "folder": str(tmp_path), "port": port, "listener_fd": listener.detach()}
    try:
        rank = Rank(load(train.HERE), whole, 0)
        rank.run()
        rank.backend.close()
        del rank
    finally:
        destroy_process_groups()
        gc.collect()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["versions"]["torch"] and result["parameters_of_rank"] > 0 and result["build_s"] > 0
    told = list(train.lines_of({**spec, **result, "error": "a reason"}))
    assert len(told) == 3 and "mean 64" in told[1] and told[2].endswith("a reason")
    for length, (mean, num_samples) in zip(result["lengths"], ((16, 32), (64, 8)), strict=True):
        check(length, num_samples=num_samples, mean=mean, calls=2)
        profile = length["profile"]
        assert set(profile["parts"]) == PARTS, "a part of the call has another name; see benchmarks/training/tree.py"
        assert profile["host_calls"]["aten::item"] > 0 and len(profile["by_host_time"]) == 40
        assert profile["device_idle_share"] is None and profile["waits_of_host"] == {}
        assert "aten::mm" in (tmp_path / "profile" / f"{spec['name']}-{mean}.txt").read_text()


@pytest.mark.slow
def test_shared_prefixes_are_measured_beside_whole_samples(tmp_path: Path) -> None:
    """Law: both train the same batch of every round; only what is computed differs."""
    words = "--device cpu --shape tiny --prompt 64 --own 16 --samples 4 --rounds 1 --out"
    record = prefix_sharing.run(prefix_sharing.options_of([*words.split(), str(tmp_path / "all.json")]))
    assert record == json.loads((tmp_path / "all.json").read_text())
    assert [(size["max_tokens"], size["rounds"][0]["whole"]["micro_batches"]) for size in record["sizes"]] == [
        (159, 4),
        (320, 1),
    ]
    for size in record["sizes"]:
        assert len(size["rounds"]) == len(size["ratios"]) == 1 and size["largest_difference_of_gradient_norms"] < 1e-4
        for calls in (size["warm_up"], *size["rounds"]):
            assert calls["shared"]["micro_batches"] == 1 and calls["whole"]["shared_tokens"] == 0.0
            assert calls["shared"]["shared_tokens"] == pytest.approx(3 * 64 / 320)
            assert calls["shared"]["entropy"] == pytest.approx(calls["whole"]["entropy"], rel=1e-5)


@pytest.mark.slow
def test_the_command_measures_two_ranks_and_tells_what_failed(tmp_path: Path) -> None:
    """Law: a failed combination is a record with an error and an exit code, and the others are measured."""
    words = "--shape tiny --device cpu --calls 1 --tokens 512 --max-tokens 256 --mean-length 64"
    words += " --layout ep2 --layout pp2 --out"
    command = [sys.executable, "-m", "benchmarks.train", *words.split(), str(tmp_path / "all.json")]
    done = subprocess.run(command, cwd=train.HERE, capture_output=True, text=True, check=False)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert records == json.loads((tmp_path / "all.json").read_text()), "stdout is for the records alone"
    refused, *measured = records
    assert done.returncode == 1 and "0 experts" in refused["error"] and refused["lengths"] == []
    for record in measured:
        assert record["error"] is None and record["world_size"] == 2, done.stderr[-2000:]
        check(record["lengths"][0], num_samples=8, mean=64, calls=1)
