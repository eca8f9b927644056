"""The benchmark of the training call: what it measures is what it says, before anything is measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import train
from benchmarks.training.profile import _by_kind, _union_s
from benchmarks.training.shapes import GROUP_SIZE, SHAPES, lengths, samples


@given(
    num_samples=st.integers(8, 256),
    mean=st.sampled_from([64, 1024, 4096]),
    room=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 99),
)
def test_lengths_have_the_mean_that_was_asked_for(num_samples: int, mean: int, room: int, seed: int) -> None:
    """Law: the mean is exact, none is longer than the limit, and the longest tenth holds more than its share."""
    found = lengths(num_samples, mean, longest=room * mean, seed=seed)
    assert found.sum() == num_samples * mean and found.max() <= room * mean and found.min() >= 16
    assert np.array_equal(found, lengths(num_samples, mean, longest=room * mean, seed=seed))
    if num_samples >= 64:
        assert np.sort(found)[-num_samples // 10 :].sum() > 0.15 * found.sum()


def test_samples_of_a_batch_are_groups_of_one_prompt_that_an_engine_sampled() -> None:
    made = samples(32, 64, longest=256, vocab_size=100, version=3, seed=0)
    assert [s["group_index"] for s in made] == [i // GROUP_SIZE for i in range(32)]
    for s in made:
        response = len(s["loss_mask"])
        assert 0 < response < len(s["tokens"]) and s["tokens"].max() < 100
        assert len(s["rollout_log_probs"]) == len(s["token_versions"]) == response and set(s["token_versions"]) == {3}


@pytest.mark.parametrize(
    ("text", "world_size", "flags"),
    [
        ("one", 1, ""),
        ("tp2", 2, "--tensor-model-parallel-size 2"),
        ("dp2", 2, ""),
        ("ep2", 2, "--expert-model-parallel-size 2"),
        ("tp2-ep2", 2, "--tensor-model-parallel-size 2 --expert-model-parallel-size 2"),
        ("pp2-ep2", 4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
    ],
)
def test_layouts_take_as_many_gpus_as_they_need(text: str, world_size: int, flags: str) -> None:
    assert train.layout_of(text) == (world_size, flags.split())


def test_a_layout_or_tree_that_is_none_is_refused() -> None:
    for call, given_text in ((train.layout_of, "xp2"), (train.tree_of, "/nowhere")):
        with pytest.raises(SystemExit, match=given_text):
            call(given_text)


def test_trees_alternate() -> None:
    """Law: what is compared is measured in turns."""
    words = ["--shape", "tiny", "--layout", "tp2", "--layout", "cp2", "--rounds", "2"]
    words += [word for label in ("new", "old") for word in ("--tree", f"{label}={train.HERE}")]
    found = list(train.combinations(train.options_of([*words, "--device", "cpu"])))
    assert [(c["layout"], c["round"], c["label"]) for c in found] == [
        (layout, turn, label) for layout in ("tp2", "cp2") for turn in (0, 1) for label in ("new", "old")
    ]
    assert len({c["name"] for c in found}) == len(found)


def test_the_mixture_with_six_layers_has_the_experts_of_the_whole_one() -> None:
    shape = SHAPES["30b-a3b-6l"]
    assert (shape["num_hidden_layers"], shape["num_experts"], shape["num_experts_per_tok"]) == (6, 128, 8)


def test_idle_time_is_what_no_kernel_covers() -> None:
    work = [("gemm", 0, 10), ("Memcpy HtoD (Pageable -> Device)", 5, 20), ("nvjet_x", 30, 40), ("inside", 31, 35)]
    assert _union_s(work) == pytest.approx(30e-9)
    kinds = _by_kind(work)
    assert kinds["matrix products"] == {"seconds": pytest.approx(20e-9), "times": 2.0}
    assert kinds["copies"]["times"] == kinds["other"]["times"] == 1.0
