"""What a stock engine reports for truncated sampling, and that it samples from the top-p set that the trainer finds.

SGLang 0.5.16: `output_token_logprobs` are those of the whole distribution after temperature, also under top-p and
top-k. With a finite top_k, `return_sampling_mask` adds `output_token_sampling_logprobs` (renormalised over the kept
set) and the ids of the set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from slime.training.model.log_probs import TokenScores, VocabShard, score_tokens

NUM_PROMPTS, LENGTH = 24, 48


def _answers(url: str, temperature: float, top_p: float, top_k: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    rng = np.random.default_rng(11)
    prompts = [rng.integers(3, 100, int(rng.integers(2, 30))).tolist() for _ in range(NUM_PROMPTS)]
    params = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_new_tokens": LENGTH, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True, "return_sampling_mask": top_k > 0}
    answers = httpx.post(f"{url}/generate", json=body, timeout=200).raise_for_status().json()
    return prompts, [answer["meta_info"] for answer in answers]


def _scores(model: Any, prompt: list[int], tokens: list[int], **cut: Any) -> TokenScores:
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt + tokens])).last_hidden_state[0, len(prompt) - 1 : -1]
    weight = model.lm_head.weight.detach()
    return score_tokens(hidden, weight, torch.tensor(tokens), VocabShard(0, weight.size(0), None), **cut)


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 0.9, -1), (0.5, 0.8, -1), (0.5, 0.8, 20), (1, 1, 5)])
def test_the_engine_samples_from_our_top_p_set(
    engine_server: Any, tiny_model_path: Path, temperature: float, top_p: float, top_k: int
) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).eval()
    prompts, answers = _answers(engine_server.url, temperature, top_p, top_k)
    outside, full_mismatch, unlike, sizes = 0, 0.0, 0, []
    for prompt, answer in zip(prompts, answers, strict=True):
        reported, tokens, _ = map(list, zip(*answer["output_token_logprobs"], strict=True))
        scores = _scores(model, prompt, tokens, temperature=temperature, top_p=top_p, top_k=top_k)
        outside += int(scores.outside.sum())
        full_mismatch = max(full_mismatch, float((scores.full_log_probs - torch.tensor(reported)).abs().max()))
        if top_k > 0:
            of_set = torch.tensor(answer["output_token_sampling_logprobs"])
            unlike += int(((scores.log_probs - of_set).abs() > 1e-5).sum())
            sizes += [len(ids) for ids in answer["output_token_sampling_mask"]]
    assert outside <= 0.001 * NUM_PROMPTS * LENGTH, f"{outside} sampled tokens outside the top-p set"
    assert full_mismatch <= 1e-5, "the engine's log-probs are those of the whole distribution after temperature"
    assert unlike <= 0.001 * NUM_PROMPTS * LENGTH, f"{unlike} tokens whose kept set is another: more than ties explain"
    assert all(size <= top_k for size in sizes), "the engine keeps at most top_k"
