"""`examples/one_file.py` learns, and trains what it sampled; a contract test compares its steps with the trainer's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from examples import one_file


@pytest.mark.slow
def test_the_printed_curve_rises(capsys: pytest.CaptureFixture[str]) -> None:
    curve = one_file.main(["--num-rollout", "12"])
    assert sum(curve[-4:]) > 1.5 * sum(curve[:4]), curve
    assert capsys.readouterr().out.count("reward") == 12


def test_sampled_log_probs_are_those_that_training_computes() -> None:
    """Law: with unchanged weights the ratio is 1, whatever the temperature, the cache or the padding."""
    torch.manual_seed(0)
    model, settings = one_file.tiny_model().eval(), one_file.Settings(rollout_temperature=0.7)
    answers = one_file.rollout(model, one_file.Characters(), [("max(1,2)=", "2"), ("max(3,3)=", "3")], settings)
    assert len({len(a.tokens) for a in answers}) > 1, "responses of several lengths"
    ends = [int(a.tokens[-1]) == one_file.Characters.eos_token_id for a in answers]
    assert all(end or len(a.mask) == settings.rollout_max_response_len for end, a in zip(ends, answers, strict=True))
    with torch.no_grad():
        again = one_file.log_probs(model, answers, settings.rollout_temperature)
    for answer, log_probs in zip(answers, again, strict=True):
        torch.testing.assert_close(log_probs, answer.old_log_probs, rtol=1e-5, atol=1e-5)


def test_the_gradient_does_not_depend_on_micro_batches() -> None:
    norms = []
    for size in (1, 5, 64):
        torch.manual_seed(0)
        model, settings = one_file.tiny_model().eval(), one_file.Settings(micro_batch_size=size)
        answers = one_file.rollout(model, one_file.Characters(), [("max(1,2)=", "2")], settings)
        answers = [dataclasses.replace(answer, reward=float(i % 3)) for i, answer in enumerate(answers)]
        norms.append(one_file.train(model, one_file.MasterAdamW(model, settings), answers, settings)[0]["grad_norm"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4) and norms[0] > 1e-3
