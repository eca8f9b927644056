"""Law: a user's function may write into its `args`, and nothing else sees what it wrote."""

from __future__ import annotations

import asyncio
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.manager import RolloutManager
from slime.settings import for_hook
from tests.support.fake_engine import FakeEngine
from tests.support.rollout import rollout_args, with_manager

EDITS = """
import copy
from slime.utils.http_utils import post
from slime.rollout.sglang_rollout import GenerateState

async def generate(args, sample, sampling_params):
    assert not hasattr(args, "results") and args.rollout_temperature == 1.0
    state = GenerateState(args)
    args.results, args.sampling_params, args.rollout_max_response_len = {"tried": []}, sampling_params, 3
    short = GenerateState(args)
    assert short.semaphore is state.semaphore and short.tokenizer is state.tokenizer is not None
    assert (state.sampling_params["max_new_tokens"], short.sampling_params["max_new_tokens"]) == (8, 3)
    agent = copy.deepcopy(args)
    agent.sample = sample
    assert agent.results is not args.results and agent.rollout_max_response_len == 3 and not hasattr(args, "sample")
    sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": sample.tokens, "sampling_params": short.sampling_params, "return_logprob": True}
    output = await post(url, payload)
    pairs = output["meta_info"]["output_token_logprobs"]
    ids, log_probs = [item[1] for item in pairs], [item[0] for item in pairs]
    sample.append_response_tokens(
        args, tokens=ids, log_probs=log_probs, trainable=True, meta_info=output["meta_info"], text=output["text"]
    )
    return sample

def reward(args, sample):
    assert not hasattr(args, "results")
    args.results = 1
    return float(args.results)

def spread(args, samples):
    args.rollout_batch_size = 77
    return [1.0] * len(samples), [float(number) for number, _ in enumerate(samples)]

def log(rollout_id, args, samples, extra, seconds):
    assert args.rollout_batch_size == 4 and not hasattr(args, "results")
    args.seen = True
    return False
"""


def test_what_a_function_sets_counts_for_its_call_alone(tmp_path: Path) -> None:
    file = tmp_path / "edits.py"
    file.write_text(EDITS)
    args = rollout_args(
        tmp_path,
        *("--custom-generate-function-path", f"{file}:generate", "--custom-rm-path", f"{file}:reward"),
        *("--custom-reward-post-process-path", f"{file}:spread", "--custom-rollout-log-function-path", f"{file}:log"),
    )
    before = pickle.dumps(args)

    async def work(manager: RolloutManager) -> Any:
        return [await manager.generate(step) for step in range(2)]

    made = asyncio.run(with_manager(args, FakeEngine(), work))
    assert all(sample.response_length == 3 for batch, _ in made for sample in batch.samples)
    assert pickle.dumps(args) == before and not hasattr(args, "results")


def test_functions_read_the_attributes_of_the_public_slime(tmp_path: Path) -> None:
    """Law: what plugins read from `args` has its public meaning, and what is unset the default of its owner."""
    flags = ("--sglang-context-length", "512", "--router-policy", "round_robin", "--actor-num-gpus-per-node", "2")
    own: Any = for_hook(rollout_args(tmp_path, *flags, "--rollout-num-gpus-per-engine", "1"))
    told = {
        **{"rollout_global_dataset": True, "rollout_external": False, "use_critic": False, "eval_datasets": []},
        **{"world_size": 2, "rank": 0, "sglang_tp_size": 1, "sglang_dp_size": 1, "sglang_mem_fraction_static": None},
        **{"sglang_context_length": 512, "sglang_router_policy": "round_robin", "router_policy": "round_robin"},
        **{"sglang_router_request_timeout_secs": 1800, "sglang_tool_call_parser": None, "num_experts": None},
        **{"sglang_reasoning_parser": None, "sglang_speculative_algorithm": None, "ref_ckpt_step": None},
        **{"use_distributed_post": False, "sglang_enable_deterministic_inference": False},
    }
    assert {name: getattr(own, name) for name in told} == told
    for name in ("sglang_no_such_field", "router_no_such_field", "no_such_field"):
        assert not hasattr(own, name)


def test_a_copy_is_settable_and_the_settings_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = rollout_args(tmp_path)
    own: Any = for_hook(args)
    own.lr, own.micro_batch_size, own.notes = 0.5, 3, ["x"]
    other = pickle.loads(pickle.dumps(copy.deepcopy(own)))
    other.notes += "y"
    assert (own.lr, own.micro_batch_size, own.notes, other.notes) == (0.5, 3, ["x"], ["x", "y"])
    assert (args.lr, hasattr(args, "notes"), isinstance(own, type(args))) == (rollout_args(tmp_path).lr, False, True)
    assert [record.message for record in caplog.records if "args.lr" in record.message] == [
        "a function set args.lr; the new value applies only to that call of the function"
    ]
    del own.notes
    with pytest.raises(AttributeError, match="no attribute 'notes' of its own"):
        del own.notes
    with pytest.raises(AttributeError, match="no setting 'notes'"):
        _ = own.notes
    with pytest.raises(AttributeError, match="cannot assign"):
        args.lr = 0.5
    assert for_hook(None) is None
