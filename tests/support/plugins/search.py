"""Search: turns with retrieved passages between them, by posted token ids (`generate`) or by posted text."""

from __future__ import annotations

import asyncio
import copy
import re

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

SETTINGS = {"max_turns": 2, "topk": 3, "concurrency": 4, "query_tokens": 2, "return_logprob": True}
SLOTS = asyncio.Semaphore(SETTINGS["concurrency"])


async def search(query):
    async with SLOTS:
        await asyncio.sleep(0)
        return f"\n<info>{len(query)}</info>\n"


def postprocess(text):
    """Ends at a call or an answer, as the prompt asks for."""
    found = re.search(r"^.*?</(search|answer)>", text, re.S)
    return found.group(0) if found else text


async def generate(args, sample, sampling_params):
    """By token ids: what is trained is what was sampled."""
    return await _generate(args, sample, sampling_params, by_ids=True)


async def generate_by_text(args, sample, sampling_params):
    """By text, which the engine reads anew in each turn."""
    return await _generate(args, sample, copy.deepcopy(sampling_params), by_ids=False)


async def generate_and_encode_again(args, sample, sampling_params):
    """By token ids, but then trains the whole text of the conversation, passages included."""
    sample = await _generate(args, sample, sampling_params, by_ids=True)
    if sample.status != Sample.Status.ABORTED:
        ids = GenerateState(args).tokenizer(sample.response, add_special_tokens=False)["input_ids"]
        sample.tokens = sample.tokens[: len(sample.tokens) - sample.response_length] + ids
        sample.response_length, sample.loss_mask = len(ids), [1] * len(ids)
        sample.rollout_log_probs = None
    return sample


async def _generate(args, sample, sampling_params, by_ids):
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    text = sample.prompt
    prompt_ids = state.tokenizer(text, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_mask, log_probs = "", [], [], []
    last = SETTINGS["max_turns"] - 1
    for turn in range(SETTINGS["max_turns"]):
        if not by_ids:  # a short query; of a long one by a random model no text reads as what was sampled
            sampling_params["max_new_tokens"] = (
                SETTINGS["query_tokens"] if turn < last else args.rollout_max_response_len
            )
        asked = {"input_ids": prompt_ids + response_ids} if by_ids else {"text": text + response}
        output = await post(url, {**asked, "sampling_params": sampling_params, "return_logprob": True})
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        pairs = output["meta_info"]["output_token_logprobs"]
        response_ids += [pair[1] for pair in pairs]
        log_probs += [pair[0] for pair in pairs]
        loss_mask += [1] * len(pairs)
        response += postprocess(output["text"])
        if turn < last:
            passage = await search(response)
            passage_ids = state.tokenizer(passage, add_special_tokens=False)["input_ids"]
            response += passage
            response_ids += passage_ids
            log_probs += [0.0] * len(passage_ids)
            loss_mask += [0] * len(passage_ids)
    sample.tokens = prompt_ids + response_ids
    sample.response_length, sample.response, sample.loss_mask = len(response_ids), response, loss_mask
    if SETTINGS["return_logprob"]:
        sample.rollout_log_probs = log_probs
    sample.prompt = text
    ended = output["meta_info"]["finish_reason"]["type"]
    sample.status = Sample.Status.TRUNCATED if ended == "length" else Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    targets = sample.label["ground_truth"]["target"] if isinstance(sample.label, dict) else [sample.label]
    if any(target in sample.response for target in targets):
        return 1.0
    return sum(character.isdigit() for character in sample.response) / max(1, len(sample.response))
