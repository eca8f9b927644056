"""Multi-turn vision: an environment answers with another picture, which is sent along with all earlier ones."""

from __future__ import annotations

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.processing_utils import encode_image_for_rollout_engine
from slime.utils.types import Sample

SIZE, NUM_TOKENS = (24, 16), 6
"""A token of the tiny checkpoint stands for a square of eight pixels."""
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


class Environment:
    """Shows the picture again, smaller, until two turns are over."""

    def __init__(self, sample):
        self.images, self.num_turns = list(sample.multimodal_inputs["images"]), 0

    def step(self, text):
        self.num_turns += 1
        self.images.append(self.images[0].resize(SIZE))
        return f"{MARK}look at {len(text)}", self.num_turns >= 2


async def generate(args, sample, sampling_params):
    state, environment = GenerateState(args), Environment(sample)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = list(sample.tokens)
    response_ids, loss_mask, log_probs, done = [], [], [], False
    while not done:
        payload = {
            "input_ids": prompt_ids + response_ids,
            "image_data": [encode_image_for_rollout_engine(image) for image in environment.images],
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        pairs = output["meta_info"]["output_token_logprobs"]
        response_ids += [pair[1] for pair in pairs]
        log_probs += [pair[0] for pair in pairs]
        loss_mask += [1] * len(pairs)
        observation, done = environment.step(output["text"])
        if not done:
            ids = state.tokenizer(observation, add_special_tokens=False)["input_ids"]
            at = ids.index(state.tokenizer.convert_tokens_to_ids("<|image_pad|>"))
            ids[at : at + 1] = [ids[at]] * NUM_TOKENS
            response_ids += ids
            log_probs += [0.0] * len(ids)
            loss_mask += [0] * len(ids)
    sample.tokens, sample.response_length = prompt_ids + response_ids, len(response_ids)
    sample.loss_mask, sample.rollout_log_probs = loss_mask, log_probs
    sample.response = state.tokenizer.decode(response_ids)
    sample.multimodal_train_inputs = {"pixel_values": object()}  # tensors of a processor, in a real plugin
    ended = output["meta_info"]["finish_reason"]["type"]
    sample.status = Sample.Status.TRUNCATED if ended == "length" else Sample.Status.COMPLETED
    return sample
