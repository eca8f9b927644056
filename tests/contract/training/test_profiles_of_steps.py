"""The trainer's own steps in a trace: operations and the marks of their parts."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.training import random_batch


def test_a_traced_step_is_the_step_without_a_trace(
    tiny_qwen3: Path, make_backend: Callable[..., Any], tmp_path: Path
) -> None:
    """Law: the trace of a step has its passes, and changes no number of it."""

    def trained(**settings: Any) -> list[dict[str, float]]:
        backend = make_backend(tiny_qwen3, run_dir=str(tmp_path), num_rollout=3, num_steps_per_rollout=2, **settings)
        return [backend.train(dataclasses.replace(random_batch(seed=step), rollout_id=step)) for step in range(2)]

    asked = {"use_pytorch_profiler": True, "profile_step_start": 1, "profile_step_end": 2}
    assert trained(global_batch_size=4) == trained(global_batch_size=4, **asked)
    (path,) = (tmp_path / "profiles").iterdir()
    assert path.name == "step_1_train_overall_rank_0.json.gz"
    names = [str(event.get("name")) for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert {"train_log_probs", "train_actor", "aten::mm"} <= set(names)
    assert any("backward" in name.lower() for name in names), "the update is in it"
