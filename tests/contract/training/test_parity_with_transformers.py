"""The Megatron model is the Hugging Face model: log-probs, entropy and gradients, float32, packed unequal lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open

from slime.core.batch import TrainBatch, TrainSample
from slime.core.sample import Sample
from slime.rollout.sft import fill, renderer
from tests.support.experts import by_checkpoint_name
from tests.support.families import LLAMA3
from tests.support.marks import quick
from tests.support.tiny import FORGETFUL_TEMPLATE, SHAPE, write_tiny_model, write_tokenizer
from tests.support.training import random_batch

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_tied": ("llama", {"tied": True}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3}),
    "qwen3": ("qwen3", {}),
    "qwen3_tied_wide_heads": ("qwen3", {"tied": True, "head_dim": 32, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe_plain_softmax": ("qwen3_moe", {"norm_topk_prob": False, "num_experts": 6, "num_experts_per_tok": 3}),
    "qwen3_moe_tied": ("qwen3_moe", {"tied": True}),
}
QUICK = ("qwen3_tied_wide_heads", "qwen3_moe_plain_softmax")


def _write(directory: Path, name: str) -> Path:
    family, options = MODELS[name]
    if family != "qwen2":
        return write_tiny_model(directory, family, **options)
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, tie_word_embeddings=False))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def _reference_log_probs(model: Any, batch: TrainBatch, temperature: float) -> list[torch.Tensor]:
    out = []
    for sample in batch.samples:
        tokens = torch.from_numpy(sample.tokens).long()
        log_probs = torch.log_softmax(model(tokens[None]).logits[0].float() / temperature, -1)
        first = sample.num_tokens - sample.response_length
        out.append(log_probs[first - 1 : -1].gather(1, tokens[first:, None]).squeeze(1))
    return out


@pytest.mark.parametrize("name", quick(MODELS, *QUICK))
def test_log_probs_and_gradient_equal_transformers(name: str, tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    checkpoint = _write(tmp_path / name, name)
    batch = random_batch(seed=3)
    backend = make_backend(checkpoint, loss_type="sft_loss", calculate_per_token_loss=True, micro_batch_size=3)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    want = _reference_log_probs(model, batch, 1.0)
    for got, reference in zip(backend.log_probs(batch), want, strict=True):
        assert np.abs(got - reference.detach().numpy()).max() < 1e-5

    masks = [torch.from_numpy(s.loss_mask) for s in batch.samples]
    loss = -sum((lp * m).sum() for lp, m in zip(want, masks, strict=True)) / sum(m.sum() for m in masks)
    loss.backward()
    gradients = backend.gradients(batch)
    named = by_checkpoint_name((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    assert gradients.keys() == named.keys()
    for parameter, gradient in gradients.items():
        exact = named[parameter]
        # Relative to the tensor's largest entry; tiny gradients (large biases saturate qwen2's attention) to 1e-3.
        assert float((gradient - exact).abs().max() / exact.abs().max().clamp_min(1e-3)) < 1e-5, parameter

    metrics = backend.train(batch)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    norm = torch.sqrt(sum(g.square().sum() for g in named.values()))
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)


ROWS = (("7+1=", "it is 8"), ("1 is which word?", "one", "2", "two or so", "3", "three"), ("12", "twelve", "13", "14"))
"""What user and assistant say in turn."""


def _losses_of_rows(model: Any, tokenizer: Any) -> list[list[torch.Tensor]]:
    """Of each row the loss of each token that an assistant says, behind the prompt that transformers writes."""
    found = []
    for texts in ROWS:
        talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        losses: list[torch.Tensor] = []
        for i in range(1, len(talk), 2):
            prompt = tokenizer.apply_chat_template(talk[:i], add_generation_prompt=True, tokenize=False)
            first = len(tokenizer(prompt)["input_ids"])
            ids = torch.tensor(tokenizer(f"{prompt}{texts[i]}<eos>")["input_ids"])
            log_probs = torch.log_softmax(model(ids[None]).logits[0], -1)[first - 1 : -1]
            losses += [-x for x in log_probs.gather(1, ids[first:, None])[:, 0]]
        found.append(losses)
    return found


@pytest.mark.parametrize(
    ("aggregation", "shares"),
    quick(
        [
            ("sequence_mean", False),
            ("sequence_mean", True),
            ("token_mean", False),
            ("sequence_sum", False),
            ("constant_length", False),
        ],
        ("sequence_mean", True),
    ),
)
def test_a_row_of_several_samples_weighs_as_one(
    aggregation: str, shares: bool, tmp_path: Path, make_backend: Callable[..., Any]
) -> None:
    """Law: under a template that rewrites history each turn is a sample of its own; loss and gradient of the step are
    those of rows.
    """
    checkpoint = write_tiny_model(tmp_path / "model")
    write_tokenizer(checkpoint, chat_template=FORGETFUL_TEMPLATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rows = [torch.stack(losses) for losses in _losses_of_rows(model, tokenizer)]
    loss = {
        "sequence_mean": sum(row.mean() for row in rows) / 3,
        "token_mean": sum(row.sum() for row in rows) / sum(len(row) for row in rows),
        "sequence_sum": sum(row.sum() for row in rows) / 3,
        "constant_length": sum(row.sum() for row in rows) / (3 * 16),
    }[aggregation]
    loss.backward()

    chat = renderer(str(checkpoint), tokenizer, None)
    samples = []
    for number, texts in enumerate(ROWS):
        talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        filled, _ = fill(Sample(group_index=number, index=number, prompt=talk), chat)
        samples += [TrainSample.from_sample(one, reward=0.0) for one in filled]
    assert [sample.index for sample in samples] == [0, 1, 1, 1, 2, 2]
    batch = TrainBatch(rollout_id=0, samples=tuple(samples))
    backend = make_backend(
        checkpoint,
        loss_type="sft_loss",
        loss_aggregation=aggregation,
        rollout_batch_size=3,
        n_samples_per_prompt=1,
        global_batch_size=3,
        use_prefix_sharing=shares,
        micro_batch_size=6,
    )
    named = by_checkpoint_name((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
    for parameter, gradient in backend.gradients(batch).items():
        exact = named[parameter]
        assert float((gradient - exact).abs().max() / exact.abs().max().clamp_min(1e-3)) < 1e-5, parameter
    metrics = backend.train(batch)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["train/num_updates"] == 1
    assert (metrics.get("train/shared_tokens", 0.0) > 0.0) == shares


def test_temperature_divides_the_logits(tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    checkpoint = write_tiny_model(tmp_path / "m", "qwen3")
    batch = random_batch(seed=4)
    backend = make_backend(checkpoint, rollout_temperature=0.6, use_dynamic_batch_size=True, max_tokens_per_gpu=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for got, want in zip(backend.log_probs(batch), _reference_log_probs(model, batch, 0.6), strict=True):
        assert np.abs(got - want.detach().numpy()).max() < 1e-5


@pytest.mark.parametrize("dtype", quick([None, torch.bfloat16], torch.bfloat16))
def test_save_hf_is_a_checkpoint_that_transformers_loads(
    dtype: torch.dtype | None, tmp_path: Path, make_backend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.training.state import hf_files

    monkeypatch.setattr(hf_files, "MAX_SHARD_BYTES", 100_000)  # several files and an index
    checkpoint = write_tiny_model(tmp_path / "m", "qwen3")
    backend = make_backend(checkpoint)
    batch = random_batch()
    backend.train(batch)
    backend.save_hf(tmp_path / "out", dtype)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == (dtype or torch.float32)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").encode("a+b")
    for name, tensor in backend.iter_hf_tensors(dtype):
        assert torch.equal(model.state_dict()[name], tensor), name
    if dtype is None:
        for got, want in zip(backend.log_probs(batch), _reference_log_probs(model, batch, 1.0), strict=True):
            assert np.abs(got - want.detach().numpy()).max() < 1e-5


def test_load_and_export_are_bitwise(tmp_path: Path, make_backend: Callable[..., Any]) -> None:
    checkpoint = write_tiny_model(tmp_path / "m", "llama", tied=True)
    exported = dict(make_backend(checkpoint).iter_hf_tensors())
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(exported)
        for name in file.keys():  # noqa: SIM118
            assert torch.equal(file.get_tensor(name), exported[name]), name
