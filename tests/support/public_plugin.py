"""A plugin written for the public slime, by its names alone: two turns by `post`, a reward, a filter, a conversion.

Nothing here knows of engine clients, weight versions, or records of this package.
"""

from __future__ import annotations

import asyncio

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.rm_hub import async_rm
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

HINT = "+1="
"""What the second turn begins with; nobody sampled it."""


class Counter(metaclass=SingletonMeta):
    """Of calls, wherever they come from."""

    def __init__(self):
        self.calls = 0


async def generate(args, sample, sampling_params):
    """Asks twice; what stands between is masked."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_mask, log_probs = "", [], [], []
    for turn in range(2):
        payload = {
            "input_ids": prompt_ids + response_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new_ids = [item[1] for item in meta["output_token_logprobs"]]
        response += output["text"]
        response_ids += new_ids
        loss_mask += [1] * len(new_ids)
        log_probs += [item[0] for item in meta["output_token_logprobs"]]
        if turn == 0:
            hint = state.tokenizer(HINT, add_special_tokens=False)["input_ids"]
            response += HINT
            response_ids += hint
            loss_mask += [0] * len(hint)
            log_probs += [0.0] * len(hint)
    Counter().calls += 1
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    sample.rounds = 2
    sample.status = Sample.Status.TRUNCATED if meta["finish_reason"]["type"] == "length" else Sample.Status.COMPLETED
    return sample


async def generate_by_text(args, sample, sampling_params):
    """Two turns. Every fourth sample posts text that reads almost as the conversation: its engine reads other ids."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    text = sample.prompt
    for _ in range(2):
        asked = {"input_ids": sample.tokens}
        if sample.response_length and sample.index % 4 == 0:
            asked = {"text": text.replace("+", "-")}
        output = await post(url, {**asked, "sampling_params": sampling_params, "return_logprob": True})
        meta, text = output["meta_info"], text + output["text"]
        pairs = meta["output_token_logprobs"]
        ids, log_probs = [item[1] for item in pairs], [item[0] for item in pairs]
        sample.append_response_tokens(args, tokens=ids, log_probs=log_probs, trainable=True, meta_info=meta)
    return sample


async def generate_appending(args, sample, sampling_params):
    """The same in one turn, by the method of the sample."""
    state = GenerateState(args)
    sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    output = await post(
        f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
        {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True},
    )
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in pairs],
        log_probs=[item[0] for item in pairs],
        trainable=True,
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample


async def reward_func(args, sample, **kwargs):
    """Digits in the answer, and what the built-in grader of exact answers says."""
    assert sample.rounds == 2, "attributes of the plugin's own come along"
    exact = await async_rm(args, sample)
    return {"score": sum(c.isdigit() for c in sample.response) / max(1, len(sample.response)), "exact": exact}


def check_something_differs(args, samples, **kwargs):
    """Drops groups without a difference."""
    scores = {sample.get_reward_value(args) for sample in samples}
    return DynamicFilterOutput(keep=len(scores) > 1, reason=None if len(scores) > 1 else "all_alike")


def convert(args, samples):
    """Columns, with rewards that are compared within a group here."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    by_group = {}
    for sample, reward in zip(samples, rewards, strict=True):
        by_group.setdefault(sample.group_index, []).append(reward)
    means = {group: sum(values) / len(values) for group, values in by_group.items()}
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [reward - means[s.group_index] for s, reward in zip(samples, rewards, strict=True)],
        "raw_reward": rewards,
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.index for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


def eval_rollout(args, rollout_id, data_source, evaluation=False):
    """An evaluation of its own, as a dict."""
    assert evaluation
    return {"own": {"rewards": [0.25, 0.75], "truncated": [False, True], "samples": []}}


def postprocess(args, rollout_id, rollout_data):
    """A column of its own beside the known ones."""
    rollout_data["rounds"] = [2] * len(rollout_data["tokens"])


def own_rollout(args, rollout_id, data_source, evaluation=False):
    """A rollout function with a loop of its own."""
    from slime.rollout.base_types import RolloutFnTrainOutput
    from slime.rollout.sglang_rollout import generate_and_rm_group
    from slime.utils.async_utils import run

    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            sample.generate_function_path = f"{__name__}.generate"

    async def all_groups():
        params = GenerateState(args).sampling_params
        return await asyncio.gather(*(generate_and_rm_group(args, group, dict(params)) for group in groups))

    return RolloutFnTrainOutput(run(all_groups()), {"rollout/own": 1.0})


class KeptWorker:
    """A thread with a loop of its own, which generates groups from the first step on, also between steps."""

    def __init__(self, args, data_source):
        import queue
        import threading

        self.args, self.data_source, self.finished = args, data_source, queue.Queue()
        self.state, self.failure, self.goes_on = GenerateState(args), None, True
        self.thread = threading.Thread(target=lambda: asyncio.run(self.work()), daemon=True)
        self.thread.start()

    async def work(self):
        from slime.rollout.sglang_rollout import generate_and_rm_group

        running = set()
        while self.goes_on:
            while len(running) + self.finished.qsize() < 6:
                (group,) = self.data_source.get_samples(1)
                params = dict(self.state.sampling_params)
                running.add(asyncio.create_task(generate_and_rm_group(self.args, group, params, evaluation=False)))
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                try:
                    self.finished.put(task.result())
                except Exception as error:
                    self.failure = error
                    return


WORKERS = []


def kept_worker(args, rollout_id, data_source, evaluation=False):
    """A rollout function as fully asynchronous plugins are."""
    from slime.utils.async_utils import run

    async def take():
        if not WORKERS:
            WORKERS.append(KeptWorker(args, data_source))
        groups = []
        while len(groups) < args.rollout_batch_size:
            if WORKERS[0].failure is not None:
                raise WORKERS[0].failure
            if WORKERS[0].finished.empty():
                await asyncio.sleep(0.01)
            else:
                groups.append(WORKERS[0].finished.get())
        return sorted(groups, key=lambda group: group[0].index)

    return run(take())
