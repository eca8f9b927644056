"""Laws of the non-finite dump: what was wrong can be read back, bounded, and writing it never hides the error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from slime.core.batch import TrainBatch, TrainSample
from slime.training.step.non_finite import MAX_OFFSETS, MAX_SAMPLES, dump_non_finite


def batch_of(num_samples: int, num_response: int = 4) -> TrainBatch:
    def sample(i: int) -> TrainSample:
        return TrainSample(
            tokens=np.arange(num_response + 2, dtype=np.int64) + 10 * i,
            loss_mask=np.array([1.0] * (num_response - 1) + [0.0], np.float32),
            rollout_log_probs=np.full(num_response, -1.0, np.float32) if i % 2 else None,
            token_versions=np.array([3] * (num_response - 1) + [-1], np.int32),
            reward=float(i),
            group_index=i // 2,
            index=100 + i,
            truncated=False,
        )

    return TrainBatch(rollout_id=7, samples=tuple(sample(i) for i in range(num_samples)))


def test_what_was_wrong_can_be_read_back(tmp_path: Path) -> None:
    log_probs = {1: np.array([-1.0, np.nan, -np.inf, np.nan], np.float32)}
    advantages = [np.full(4, 0.5)] * 3
    folder = dump_non_finite(
        tmp_path,
        batch_of(3),
        {1: [2, 1]},
        {"log_probs": log_probs, "advantages": advantages, "ref_log_probs": None},
        rank=2,
    )
    assert folder == tmp_path / "non_finite" / "step_7_rank_2"
    report = json.loads((folder / "samples.json").read_text())
    assert (report["rollout_id"], report["rank"], report["num_non_finite"]) == (7, 2, 1)
    (record,) = report["samples"]
    assert record["position"] == 1 and record["index"] == 101 and record["group_index"] == 0
    assert record["offsets"] == [1, 2] and record["weight_versions"] == [3] and record["first_token"] == 13
    assert record["first_values"] == {"rollout_log_probs": -1.0, "log_probs": "nan", "advantages": 0.5}
    # The masked NaN at the end is nobody's fault.
    assert record["num_not_finite"] == {"rollout_log_probs": 0, "log_probs": 2, "advantages": 0}
    tensors = load_file(folder / "tensors.safetensors")
    np.testing.assert_array_equal(tensors["0.tokens"], batch_of(3).samples[1].tokens)
    np.testing.assert_array_equal(tensors["0.log_probs"], log_probs[1])
    np.testing.assert_array_equal(tensors["0.offsets"], [1, 2])
    assert tensors["0.advantages"].dtype == np.float64


def test_a_number_that_only_some_samples_have_is_left_out_of_the_others(tmp_path: Path) -> None:
    folder = dump_non_finite(tmp_path, batch_of(2), {0: [0], 1: [0]}, {"log_probs": {1: np.zeros(4)}}, rank=0)
    assert folder is not None
    tensors = load_file(folder / "tensors.safetensors")
    assert "1.log_probs" in tensors and "0.log_probs" not in tensors and "0.rollout_log_probs" not in tensors


def test_it_is_bounded(tmp_path: Path) -> None:
    num_response = MAX_OFFSETS * 2
    offsets = {p: list(range(num_response)) for p in range(MAX_SAMPLES + 5)}
    folder = dump_non_finite(tmp_path, batch_of(MAX_SAMPLES + 5, num_response), offsets, {}, rank=0)
    assert folder is not None
    report = json.loads((folder / "samples.json").read_text())
    assert report["num_non_finite"] == MAX_SAMPLES + 5
    assert [s["position"] for s in report["samples"]] == list(range(MAX_SAMPLES))
    assert all(len(s["offsets"]) == MAX_OFFSETS and s["num_offsets"] == num_response for s in report["samples"])


def test_nothing_is_replaced_and_nothing_half_written_is_left(tmp_path: Path) -> None:
    folders = [dump_non_finite(tmp_path, batch_of(1), {0: [0]}, {}, rank=0) for _ in range(3)]
    names = ["step_7_rank_0", "step_7_rank_0.2", "step_7_rank_0.3"]
    assert [f.name for f in folders if f is not None] == names
    assert sorted(p.name for p in (tmp_path / "non_finite").iterdir()) == names


def test_a_rank_without_a_non_finite_loss_writes_nothing(tmp_path: Path) -> None:
    assert dump_non_finite(tmp_path, batch_of(1), {}, {}, rank=0) is None
    assert not list(tmp_path.iterdir())


def test_a_failure_to_write_is_logged_and_not_raised(tmp_path: Path, caplog) -> None:
    (tmp_path / "non_finite").write_text("a file where the folder should be")
    assert dump_non_finite(tmp_path, batch_of(1), {0: [0]}, {}, rank=0) is None
    assert "could not write" in caplog.text
