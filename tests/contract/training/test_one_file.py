"""`examples/one_file.py` is an oracle: it shares no code with the trainer, and their steps are the same."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from examples import one_file
from slime.core.batch import TrainBatch
from tests.support.marks import quick
from tests.support.training import random_batch, with_samples
from tests.support.walks import ROOT, called_on, walks

SETTINGS = one_file.Settings(
    global_batch_size=4, micro_batch_size=3, rollout_temperature=0.8, lr=1e-3, weight_decay=0.1, clip_grad=0.05
)
"""Two optimizer steps for eight answers, micro-batches of unequal size, and a gradient that is clipped."""
PUBLIC: dict[str, Any] = {
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "rollout_temperature": 0.8,
    "eps_clip": SETTINGS.eps_clip,
    "eps_clip_high": SETTINGS.eps_clip_high,
    "megatron": {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "start_weight_decay": 0.1,
        "end_weight_decay": 0.1,
        "clip_grad": 0.05,
    },
}
"""The same for the trainer, which makes other micro-batches."""
WALK = "A sample, from the batch to the gradient"
"""The heading in docs/architecture.md."""


def answers_of(batch: TrainBatch) -> list[one_file.Answer]:
    """The recorded batch as the one file has it."""
    return [
        one_file.Answer(
            tokens=torch.from_numpy(s.tokens).long(),
            mask=torch.from_numpy(s.loss_mask),
            old_log_probs=torch.from_numpy(np.asarray(s.rollout_log_probs)),
            reward=s.reward,
            group=s.group_index,
        )
        for s in batch.samples
    ]


def recorded(model: Any) -> TrainBatch:
    """Answers whose log-probs are near the model's, so that the clip acts on some tokens of both signs."""
    batch, noise = random_batch(seed=2), np.random.default_rng(5)
    with torch.no_grad():
        own = one_file.log_probs(model, answers_of(batch), SETTINGS.rollout_temperature)
    return with_samples(
        batch,
        [
            dataclasses.replace(s, rollout_log_probs=x.numpy() + noise.normal(0, 0.3, len(x)).astype(np.float32))
            for s, x in zip(batch.samples, own, strict=True)
        ],
    )


@pytest.mark.parametrize("num_steps", quick([1, 2], 2))
@pytest.mark.parametrize("family", quick(["tiny_qwen3", "tiny_llama"], "tiny_qwen3"))
def test_a_step_of_the_trainer_is_that_of_the_one_file(
    family: str, num_steps: int, request: pytest.FixtureRequest, make_backend: Callable[..., Any]
) -> None:
    folder: Path = request.getfixturevalue(family)
    size = 8 // num_steps
    settings = dataclasses.replace(SETTINGS, global_batch_size=size)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = recorded(model)
    assert any((s.loss_mask == 0).any() for s in batch.samples), "masks take part"
    want = one_file.train(model, one_file.MasterAdamW(model, settings), answers_of(batch), settings)

    backend = make_backend(folder, **PUBLIC | {"global_batch_size": size}, use_rollout_logprobs=True)
    metrics = backend.train(batch)

    mean = {name: float(np.mean([step[name] for step in want])) for name in want[0]}
    assert metrics["train/loss"] == pytest.approx(mean["loss"], rel=1e-5, abs=1e-6)  # terms near 1 that cancel
    assert metrics["train/grad_norm"] == pytest.approx(mean["grad_norm"], rel=1e-5)
    assert metrics["train/pg_clipfrac"] > 0.05, "a clip that never acts proves nothing"
    assert all(step["grad_norm"] > settings.clip_grad for step in want), "nor does a gradient that is not clipped"
    moved = 0.0
    for name, got in backend.iter_hf_tensors():
        expected = model.state_dict()[name]
        moved = max(moved, float((expected - first[name]).abs().max()))
        off = (got - expected).abs() - 1e-5 * expected.abs()
        # Adam divides a gradient by its own size: where that is the error of rounding, a step may be any part of `lr`.
        assert float((off > num_steps * 1e-5).float().mean()) <= 1e-3, f"{name}: {float(off.max())}"
        assert float(off.max()) <= num_steps * settings.lr, f"{name}: {float(off.max())}"
    assert moved > 5e-4, "the weights took a whole step of Adam"


def test_the_walk_of_a_sample_is_walked(tiny_qwen3: Path, make_backend: Callable[..., Any]) -> None:
    """Law: what docs/architecture.md says to read from batch to gradient runs, and no file that it does not name."""
    backend, ran = make_backend(tiny_qwen3, **PUBLIC), set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            ran.add((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        backend.train(random_batch(seed=2))
    finally:
        sys.setprofile(None)
    names = {(Path(file), name) for file, name in ran if Path(file).is_relative_to(ROOT / "slime")}
    for stop in walks()[WALK]:
        for function in (name for name in stop.read if name.islower()):
            assert (ROOT / "slime" / stop.file, function) in names, f"{function} of {stop.file} never ran"
    named = {stop.file for stop in walks()[WALK]} | called_on(WALK)
    files = {file.relative_to(ROOT / "slime").as_posix() for file, _ in names}
    unnamed = {file for file in files if file not in named and not file.startswith("compat/")}
    assert not unnamed, f"docs/architecture.md names the files of a step, and not {sorted(unnamed)}"
