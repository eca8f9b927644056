"""A task by its number: an agent talks to a simulated user, and tokens are the differences of renderings."""

from __future__ import annotations

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

TASKS = [f"return order {number}" for number in range(64)]
MAX_TURNS = 2


class Environment:
    """Answers to what an agent says, and when the task is over."""

    def __init__(self, index):
        self.task, self.num_said = TASKS[index], 0

    def reset(self):
        return f"please {self.task}"

    async def step(self, args, action):
        self.num_said += 1
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        asked = {"text": f"user: {action[:5]}", "sampling_params": {"temperature": 0.0, "max_new_tokens": 3}}
        said = (await post(url, asked))["text"]
        digits = sum(character.isdigit() for character in action) / max(1, len(action))
        return f"ok {''.join(c for c in said if c.isalnum())}", digits, self.num_said >= MAX_TURNS


async def generate(args, sample, sampling_params):
    assert isinstance(sample.prompt, int), f"the number of a task, not {sample.prompt!r}"
    state, environment = GenerateState(args), Environment(sample.prompt)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    messages = [{"role": "user", "content": environment.reset()}]
    text = state.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    sample.tokens = state.tokenizer(text, add_special_tokens=False)["input_ids"]
    sample.loss_mask, sample.rollout_log_probs, reward = [], [], 0.0
    prompt_length, done = len(sample.tokens), False
    while not done:
        payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        pairs = output["meta_info"]["output_token_logprobs"]
        sample.tokens = sample.tokens + [pair[1] for pair in pairs]
        sample.rollout_log_probs += [pair[0] for pair in pairs]
        sample.loss_mask += [1] * len(pairs)
        answer, reward, done = await environment.step(args, output["text"])
        if not done:
            before = state.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            more = [*messages, {"role": "user", "content": answer}]
            after = state.tokenizer.apply_chat_template(more, tokenize=False, add_generation_prompt=True)
            shared = len(before) - len(before.lstrip()) if not after.startswith(before) else len(before)
            ids = state.tokenizer(after[shared:], add_special_tokens=False)["input_ids"]
            sample.tokens = sample.tokens + ids
            sample.rollout_log_probs += [0.0] * len(ids)
            sample.loss_mask += [0] * len(ids)
            messages = more
    sample.response_length = len(sample.tokens) - prompt_length
    sample.response = state.tokenizer.decode(sample.tokens[prompt_length:])
    sample.reward = reward
    sample.metadata.update({"task": environment.task, "turns": environment.num_said})
    sample.status = Sample.Status.COMPLETED
    return sample
