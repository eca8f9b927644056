"""The user's functions inside the trainer, and the weights that it starts from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny import write_tiny_model
from tests.support.training import random_batch

HERE = __name__
CALLS: list[tuple[Any, ...]] = []
EXAMPLE = "examples.megatron_hooks"


def initialize(args: Any) -> None:
    import torch.distributed as dist

    CALLS.append(("init", dist.is_initialized()))


def before_log_prob(args: Any, model: list[Any], store_prefix: str) -> None:
    CALLS.append(("log_prob", len(model), store_prefix))


def before_step(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
    zero = not any(p.main_grad.any() for p in model[0].parameters() if hasattr(p, "main_grad"))
    CALLS.append(("step", rollout_id, step_id, zero, optimizer.param_groups[0]["lr"] > 0, opt_param_scheduler))


def test_functions_around_the_passes_are_called_in_their_places(
    tiny_qwen3: Path, make_backend: Callable[..., Any]
) -> None:
    CALLS.clear()
    batch = random_batch(seed=1)
    backend = make_backend(
        tiny_qwen3,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        global_batch_size=batch.num_executions // 2,
        custom_megatron_init_path=f"{HERE}:initialize",
        custom_megatron_before_log_prob_hook_path=f"{HERE}:before_log_prob",
        custom_megatron_before_train_step_hook_path=f"{HERE}:before_step",
    )
    assert CALLS == [("init", True)]
    backend.train(batch)
    kinds = [call[:3] for call in CALLS[1:]]
    assert kinds[:2] == [("log_prob", 1, ""), ("log_prob", 1, "ref_")], "the policy's own pass, then the reference's"
    assert kinds[2:] == [("step", batch.rollout_id, 0), ("step", batch.rollout_id, 1)]
    assert all(call[3:5] == (True, True) for call in CALLS[3:]), "gradients are zero, and there is a rate"


def test_the_example_makes_the_first_steps_smaller(tiny_qwen3: Path, make_backend: Callable[..., Any]) -> None:
    batch = random_batch(seed=2)

    def moved(**settings: Any) -> float:
        backend = make_backend(tiny_qwen3, **settings)
        before = backend.log_probs(batch)
        backend.train(batch)
        return float(sum(np.abs(a - b).sum() for a, b in zip(before, backend.log_probs(batch), strict=True)))

    slowly = moved(custom_megatron_before_train_step_hook_path=f"{EXAMPLE}:warm_up_again")
    assert 0 < slowly < 0.8 * moved()


@pytest.mark.parametrize("name", ["load", "ref_load"])
def test_the_trainer_starts_from_what_load_or_ref_load_names(
    name: str, tiny_qwen3: Path, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    other = write_tiny_model(tmp_path / "other", "qwen3", seed=5)
    batch = random_batch(seed=3)
    expected = make_backend(other).log_probs(batch)
    found = make_backend(tiny_qwen3, **{name: str(other)}).log_probs(batch)
    plain = make_backend(tiny_qwen3).log_probs(batch)
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(expected, plain, strict=True))
