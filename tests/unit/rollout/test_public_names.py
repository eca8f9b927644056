"""Law: what plugins of the public slime import is there, and does for them what they expect."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from slime.core.batch import TrainBatch
from slime.core.engine_interface import TOKEN_VERSIONS_KEY
from slime.core.errors import DataError, HookError
from slime.core.sample import NOT_SAMPLED, Sample, Status
from slime.data.dataset import load_prompts
from slime.data.first_rows import data_problems
from slime.public.names import ALIASES
from slime.rollout.context import num_threads_asking
from slime.rollout.factories import load_tokenizer
from slime.rollout.manager import RolloutManager
from slime.settings.hook_contracts import load_hook
from tests.support import public_plugin
from tests.support.fake_engine import FakeEngine
from tests.support.loopback import served
from tests.support.rollout import rollout_args, with_manager, write_prompts

PLUGIN = "tests.support.public_plugin"
NAMES = {
    "slime.utils.types": ("Sample", "SpecInfo", "PrefixCacheInfo"),
    "slime.utils.http_utils": ("post",),
    "slime.utils.misc": ("load_function", "SingletonMeta"),
    "slime.utils.async_utils": ("run",),
    "slime.utils.mask_utils": ("MultiTurnLossMaskGenerator",),
    "slime.utils.processing_utils": (
        *("load_tokenizer", "load_processor", "build_processor_kwargs", "encode_image_for_rollout_engine"),
    ),
    "slime.utils.external_utils.command_utils": ("execute_train",),
    "slime.rollout.sglang_rollout": (
        *("GenerateState", "generate", "generate_and_rm", "generate_and_rm_group", "generate_rollout"),
    ),
    "slime.rollout.sglang_streaming_rollout": ("generate_streaming",),
    "slime.rollout.sleep_rollout": ("sleep",),
    "slime.rollout.sft_rollout": ("generate_rollout",),
    "slime.rollout.fully_async_rollout": ("generate_rollout_fully_async",),
    "slime.rollout.base_types": ("RolloutFnTrainOutput", "RolloutFnEvalOutput", "call_rollout_fn"),
    "slime.rollout.data_source": ("RolloutDataSource", "RolloutDataSourceWithBuffer", "pop_first"),
    "slime.rollout.on_policy_distillation": ("reward_func", "post_process_rewards"),
    "slime.rollout.filter_hub.base_types": ("DynamicFilterOutput",),
    "slime.rollout.filter_hub.dynamic_sampling_filters": ("check_reward_nonzero_std",),
    "slime.rollout.rm_hub": (
        *("async_rm", "batched_async_rm", "get_deepscaler_rule_based_reward", "grade_answer_verl"),
    ),
    "slime.rollout.rm_hub.deepscaler": ("get_deepscaler_rule_based_reward",),
    "slime.rollout.rm_hub.math_dapo_utils": ("compute_score", "math_dapo_compute_score"),
    "slime.rollout.rm_hub.math_utils": ("extract_answer", "extract_boxed_answer", "grade_answer_verl"),
    "slime.agent.adapters": ("AnthropicAdapter", "OpenAIAdapter"),
    "slime.agent.adapters.common": ("BaseAdapter", "flatten_content"),
    "slime.agent.aiohttp_threaded": ("run_app_in_thread",),
    "slime.agent.harness": ("ClaudeCodeHarness", "CodexHarness"),
    "slime.agent.sandbox": ("Sandbox", "E2BSandbox", "exec_and_wait"),
    "slime.backends.megatron_utils.cp_utils": ("all_gather_with_cp", "slice_log_prob_with_cp"),
}
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name_is_there(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


def test_the_docs_list_the_public_names() -> None:
    text = (ROOT / "docs" / "migration.md").read_text()
    assert [m for m, names in NAMES.items() if f"`{m}`" not in text or not all(f"`{n}`" in text for n in names)] == []


def test_nothing_of_ours_imports_the_public_names() -> None:
    """They are a table, made into modules when a plugin asks; what stands behind them is imported then."""
    assert not [module for module in ALIASES if (ROOT / Path(*module.split("."))).with_suffix(".py").exists()]
    ours = [
        p for p in (ROOT / "slime").rglob("*.py") if "public" not in p.parts and p != ROOT / "slime" / "__init__.py"
    ]
    pattern = "|".join(map(re.escape, (*ALIASES, "slime.public.names")))
    assert not [p for p in ours if re.search(rf"^\s*(from|import) ({pattern})\b", p.read_text(), re.M)]


def test_an_import_of_slime_imports_no_public_name() -> None:
    code = "import sys, slime; print(sorted(m for m in sys.modules if m.split('.')[0] in ('slime', 'torch', 'numpy')))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['slime', 'slime.public', 'slime.public.names']"


def a_step(args: Any, engine: FakeEngine | None = None, step: int = 0) -> tuple[TrainBatch, dict[str, float]]:
    async def work(manager: RolloutManager) -> Any:
        return await manager.generate(step)

    found: tuple[TrainBatch, dict[str, float]] = asyncio.run(with_manager(args, engine or FakeEngine(), work))
    return found


def plugin_args(tmp_path: Path, *flags: str) -> Any:
    own = ("--custom-generate-function-path", f"{PLUGIN}.generate")
    return rollout_args(tmp_path, *own, *flags)


class RenewedEngine(FakeEngine):
    """Gets new weights before a second turn and, where requests live through that, behind the fifth token of each."""

    in_place = False

    def versions(self, body: dict[str, Any]) -> list[int]:
        """Of the tokens that it samples; only a second turn has so long a prompt."""
        first = 4 if len(body["input_ids"]) > 10 else 3
        return [first] * 5 + [first + self.in_place] * 3

    def _event(
        self, body: dict[str, Any], new: list[int], sent: int, told: int, whole: dict[str, Any] | None, *, last: bool
    ) -> dict[str, Any]:
        event = super()._event(body, new, sent, told, whole, last=last)
        labels = self.versions(body)[sent : sent + len(new)]
        event["meta_info"] |= {TOKEN_VERSIONS_KEY: labels, "weight_version": str(max(labels))}
        return event


@pytest.mark.parametrize("mode", ["abort", "in_place"])
@pytest.mark.parametrize(("function", "turns"), [("generate", 2), ("generate_appending", 1)])
def test_tokens_of_a_plugin_have_the_versions_that_sampled_them(
    tmp_path: Path, function: str, turns: int, mode: str
) -> None:
    """Law: each token that it posted for has its own, log-prob and mask as well, and what it put between has none."""
    flags = ("--fully-async", "--pause-generation-mode", "in_place") if mode == "in_place" else ()
    hook = ("--custom-generate-function-path", f"{PLUGIN}.{function}")
    engine = RenewedEngine()
    engine.in_place = mode == "in_place"
    batch, _ = a_step(rollout_args(tmp_path, *hook, *flags, synchronous=not flags), engine)
    asked = engine.versions({"input_ids": [0] * 5}), [NOT_SAMPLED] * 3, engine.versions({"input_ids": [0] * 16})
    versions = [version for part in asked[: 2 * turns - 1] for version in part]
    log_probs = np.asarray([-0.5 - i / 1000 for i in range(8)], np.float32)
    for sample in batch.samples:
        assert sample.token_versions.tolist() == versions and sample.truncated
        assert [bool(m) for m in sample.loss_mask] == [version != NOT_SAMPLED for version in versions]
        assert sample.rollout_log_probs is not None
        assert np.array_equal(sample.rollout_log_probs[sample.loss_mask > 0], np.tile(log_probs, turns))


def test_reward_filter_and_conversion_of_a_plugin(tmp_path: Path) -> None:
    flags = (
        *("--custom-rm-path", f"{PLUGIN}.reward_func", "--reward-key", "score", "--rm-type", "exact_match"),
        *("--custom-convert-samples-to-train-data-path", f"{PLUGIN}.convert"),
        *("--dynamic-sampling-filter-path", f"{PLUGIN}.check_something_differs"),
    )
    engine = FakeEngine(tick_s=0.001)
    engine.stops.extend([3, 9, 5, 2, 8, 1] * 40)
    args = plugin_args(tmp_path, *flags)
    assert args.rewards_normalization is False, "the conversion's rewards are trained as they are"
    batch, _ = a_step(args, engine)
    by_group: dict[int, list[float]] = {}
    for sample in batch.samples:
        by_group.setdefault(sample.group_index, []).append(sample.reward)
    assert all(abs(sum(rewards)) < 1e-6 and any(rewards) for rewards in by_group.values())
    assert all((s.token_versions[s.loss_mask > 0] == 1).all() for s in batch.samples), "versions come along"


def test_a_dict_whose_rewards_would_be_normalised_again_is_refused(tmp_path: Path) -> None:
    flags = ("--custom-convert-samples-to-train-data-path", f"{PLUGIN}.convert", "--rewards-normalization")
    with pytest.raises(HookError, match="would normalise them again"):
        a_step(plugin_args(tmp_path, *flags))


def test_a_rollout_function_with_a_loop_of_its_own(tmp_path: Path) -> None:
    args = rollout_args(tmp_path, "--rollout-function-path", f"{PLUGIN}.own_rollout", "--execution-timeout-s", "60")
    batch, metrics = a_step(args)
    assert len(batch.samples) == 8 and metrics["rollout/own"] == 1.0
    assert all(set(s.token_versions) == {1, NOT_SAMPLED} for s in batch.samples)


def test_a_thread_of_a_rollout_function_generates_on_between_steps(tmp_path: Path) -> None:
    """Law: a thread with a loop of its own, kept from step to step, trains what it generates, and nothing is lost."""
    public_plugin.WORKERS.clear()
    hooks = ("--rollout-function-path", f"{PLUGIN}.kept_worker")
    hooks += ("--custom-generate-function-path", f"{PLUGIN}.generate")

    async def work(manager: RolloutManager) -> None:
        for step in range(3):
            batch, _ = await manager.generate(step)
            assert len(batch.samples) == 8
            assert all(set(s.token_versions) == {1, NOT_SAMPLED} for s in batch.samples)
            ledger = manager.commit(step)
            assert ledger["data/trained"] == 4 * (step + 1) and ledger["data/filtered"] == 0
            await manager.pause(hand_back=False)
            manager.resume()
        assert public_plugin.WORKERS[0].thread.is_alive()
        public_plugin.WORKERS[0].goes_on = False
        await asyncio.to_thread(public_plugin.WORKERS[0].thread.join, 10)

    args = rollout_args(tmp_path, *hooks, synchronous=False)
    asyncio.run(with_manager(args, FakeEngine(), work))
    assert num_threads_asking() == 0, "a closed run offers nothing"


def test_an_evaluation_function_may_return_its_data_alone(tmp_path: Path) -> None:
    held = write_prompts(tmp_path / "held.jsonl", 2)
    flags = ("--eval-function-path", f"{PLUGIN}.eval_rollout", "--eval-interval", "1", "--eval-prompt-data", str(held))

    async def work(manager: RolloutManager) -> Any:
        return await manager.evaluate(0)

    metrics = asyncio.run(with_manager(rollout_args(tmp_path, *flags), FakeEngine(), work))
    assert metrics["eval/own"] == 0.5


def test_a_data_source_of_the_public_name_serves_what_came_back_first(tmp_path: Path) -> None:
    from slime.rollout.data_source import RolloutDataSourceWithBuffer

    built_in = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
    assert rollout_args(tmp_path, "--data-source-path", built_in).data_source == "prompt_data"
    args = rollout_args(tmp_path, "--save", str(tmp_path / "save"))
    source = RolloutDataSourceWithBuffer(args)
    first = source.get_samples(2)
    assert len(first) == 2 and len(first[0]) == 2 and first[0][0].index is None and len(source) == 40
    for number, group in enumerate(first):
        for sample in group:
            sample.group_index = number
    source.add_samples(first[:1])
    source.update_metadata({"round": 2})
    assert source.get_buffer_length() == 1
    source.save(3)
    assert [g[0].prompt for g in source.get_samples(2)] == [first[0][0].prompt, "2+2="]
    again = RolloutDataSourceWithBuffer(args.replace(load=args.save))
    again.load(3)
    assert again.get_metadata() == {"round": 2} and again.get_buffer_length() == 1
    assert [g[0].prompt for g in again.get_samples(2)] == [first[0][0].prompt, "2+2="], "its buffer, and the next row"


def test_the_buffer_of_a_derived_source_is_served_through_the_filter(tmp_path: Path) -> None:
    """Law: --buffer-filter-path chooses from the buffer of a public data source too, which the run then accepts."""
    (tmp_path / "own.py").write_text(
        "from slime.rollout.data_source import RolloutDataSourceWithBuffer\n"
        "class Own(RolloutDataSourceWithBuffer):\n"
        "    pass\n"
        "def newest(args, rollout_id, buffer, num_samples):\n"
        "    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]\n"
    )
    words = ("--data-source-path", f"{tmp_path}/own.py:Own", "--buffer-filter-path", f"{tmp_path}/own.py:newest")
    source = load_hook(words[1], "data_source")(rollout_args(tmp_path, *words))
    first = source.get_samples(2)
    source.add_samples(list(first))
    assert [id(group) for group in source.get_samples(2)] == [id(first[1]), id(first[0])]
    batch, _ = a_step(plugin_args(tmp_path, *words))
    assert len({s.group_index for s in batch.samples}) == 4


def test_the_third_argument_for_all_samples_returns_groups(tmp_path: Path) -> None:
    """Law: a hook of the public form calls its third argument, and the groups that it gets are accounted for."""
    (tmp_path / "own.py").write_text(
        "SEEN = []\n"
        "def see(args, all_groups, get_samples):\n"
        "    (group,) = get_samples(1)\n"
        "    SEEN.append((len(all_groups), len(group), group[0].prompt))\n"
    )
    path = f"{tmp_path}/own.py:see"
    batch, _ = a_step(plugin_args(tmp_path, "--rollout-all-samples-process-path", path))
    assert len({s.group_index for s in batch.samples}) == 4
    seen = load_hook(path, "all_samples").__globals__["SEEN"]
    assert seen == [(4, 2, "4+4=")]


def test_a_rollout_function_may_leave_the_status(tmp_path: Path) -> None:
    """Law: as in the public slime's fine-tuning, a returned sample with response and reward is complete."""
    (tmp_path / "own.py").write_text(
        "def rollout(args, rollout_id, data_buffer, evaluation=False):\n"
        "    groups = data_buffer.get_samples(args.rollout_batch_size)\n"
        "    for sample in (sample for group in groups for sample in group):\n"
        "        sample.tokens, sample.response_length, sample.loss_mask = [5, 6, 7, 8], 3, [0, 1, 1]\n"
        "        sample.reward = 0\n"
        "    return groups\n"
    )
    own = ("--rollout-function-path", f"{tmp_path}/own.py:rollout", "--train-unsampled-tokens")
    batch, _ = a_step(rollout_args(tmp_path, *own))
    assert [s.loss_mask.tolist() for s in batch.samples] == [[0, 1, 1]] * 8
    assert not any(s.truncated for s in batch.samples)


def test_what_old_rollout_functions_return_is_wrapped() -> None:
    from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn

    def fn(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        return {"own": {"rewards": [0.5]}} if evaluation else data_source

    groups = [[Sample()]]
    assert call_rollout_fn(fn, None, 0, groups, evaluation=False) == RolloutFnTrainOutput(groups)
    assert call_rollout_fn(fn, None, 0, RolloutFnTrainOutput([]), evaluation=False) == RolloutFnTrainOutput([])
    assert call_rollout_fn(fn, None, 0, None, evaluation=True) == RolloutFnEvalOutput({"own": {"rewards": [0.5]}})


def test_a_loss_mask_says_where_the_response_begins() -> None:
    from slime.utils.mask_utils import MultiTurnLossMaskGenerator

    assert MultiTurnLossMaskGenerator.get_response_lengths([[0, 1, 0, 1], [0, 0], []]) == [3, 0, 0]


def test_a_data_source_that_derives_from_it_is_behind_the_buffer(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from slime.rollout.data_source import RolloutDataSourceWithBuffer\n"
        "class Own(RolloutDataSourceWithBuffer):\n"
        "    def get_samples(self, num_samples):\n"
        "        groups = super().get_samples(num_samples)\n"
        "        for group in groups:\n"
        "            for sample in group: sample.hard = True\n"
        "        return groups\n"
    )
    batch, _ = a_step(plugin_args(tmp_path, "--data-source-path", f"{tmp_path}/own.py:Own"))
    assert len({s.group_index for s in batch.samples}) == 4


def test_distillation_by_its_public_names_asks_the_teacher(tmp_path: Path) -> None:
    base = "slime.rollout.on_policy_distillation"
    names = ("--custom-rm-path", f"{base}.reward_func", "--custom-reward-post-process-path")
    url = ("--rm-url", "http://10.0.0.1:13141/generate", "--use-opd", "--opd-type", "sglang")
    flags = (*names, f"{base}.post_process_rewards", *url)
    args = rollout_args(tmp_path, *flags, "--strict")
    assert (args.opd_teacher_url, args.custom_rm_path) == ("http://10.0.0.1:13141", None)
    assert args.rollout_sample_hook_path == ("slime.rollout.workflows.teacher.judge",)


def test_public_spellings_of_rollout_functions_are_ours(tmp_path: Path) -> None:
    default = rollout_args(tmp_path).rollout_function_path
    said = ("--rollout-function-path", "slime.rollout.sglang_rollout.generate_rollout")
    assert rollout_args(tmp_path, *said).rollout_function_path == default
    said = ("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--loss-type", "sft_loss")
    assert rollout_args(tmp_path, *said).debug_train_only
    said = ("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async")
    assert rollout_args(tmp_path, *said, synchronous=False).fully_async


@pytest.mark.parametrize("prompt", [7, 2.5, {"task": "retail", "index": 3}, [1, 2], [{"task": 1}]])
def test_any_prompt_reaches_a_generate_function_as_it_is(tmp_path: Path, prompt: Any) -> None:
    """Law: what turns into tokens in a function of the user, nothing else has to understand."""
    rows = "".join(json.dumps({"input": prompt, "label": str(number)}) + "\n" for number in range(9))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "own.py").write_text(
        "import json\n"
        "from slime.rollout.sglang_rollout import GenerateState, generate as of_text\n"
        "async def generate(args, sample, sampling_params):\n"
        f"    assert sample.prompt == {prompt!r}, sample.prompt\n"
        "    sample.tokens = GenerateState(args).tokenizer.encode(f'{sample.label}+1=')\n"
        "    return await of_text(args, sample, sampling_params)\n"
    )
    hook = ("--custom-generate-function-path", f"{tmp_path}/own.py:generate")
    args = rollout_args(tmp_path, *hook, "--prompt-data", str(tmp_path / "rows.jsonl"))
    assert data_problems(args) == []
    batch, _ = a_step(args)
    assert len(batch.samples) == 8
    nobody = rollout_args(tmp_path, "--prompt-data", str(tmp_path / "rows.jsonl"))
    assert "none of its 9 rows can be used" in data_problems(nobody)[0]


# --- a sample -------------------------------------------------------------------------------------------------------


def test_a_limit_on_the_context_drops_no_messages_that_a_function_renders(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: a prompt limit that slime derives is not applied where no template gives a length; one that is set is an
    error.
    """
    data = tmp_path / "talks.jsonl"
    talks = [[{"role": "user", "content": "1" * (1 + 99 * i)}] for i in range(4)]
    data.write_text("".join(json.dumps({"input": talk, "label": "2"}) + "\n" for talk in talks))
    flags = ("--prompt-data", str(data), "--custom-generate-function-path", f"{PLUGIN}.generate")
    args = rollout_args(tmp_path, *flags, "--rollout-max-context-len", "20")
    args = args.replace(prompt_data=str(data))
    assert data_problems(args) == []
    dataset = load_prompts(args, load_tokenizer(args), max_prompt_tokens=args.rollout_max_prompt_len)
    assert dataset is not None and len(dataset) == 4 and "none of them is dropped" in caplog.text
    limited = rollout_args(tmp_path, *flags, "--rollout-max-prompt-len", "20").replace(prompt_data=str(data))
    assert "rollout_max_prompt_len 20 cannot be applied" in data_problems(limited)[0]


def test_a_custom_tis_function_of_the_public_name_weighs_and_cuts() -> None:
    """Law: weights are ratios of probabilities, and 0 outside the bounds."""
    import torch

    from slime.backends.megatron_utils.loss import icepop_function  # type: ignore[import-not-found]

    trainer, engine = torch.tensor([0.0, 1.0, -3.0]), torch.zeros(3)
    args = type("Args", (), {"tis_clip": 2.0, "tis_clip_low": 0.5})()
    masks = [torch.ones(2), torch.ones(1)]
    loss, kept, metrics = icepop_function(
        args,
        pg_loss=torch.tensor([2.0, 2.0, 2.0]),
        train_log_probs=trainer.split([2, 1]),
        rollout_log_probs=engine.split([2, 1]),
        loss_masks=masks,
        total_lengths=[3, 2],
        response_lengths=[2, 1],
    )
    assert loss.tolist() == [2.0, 0.0, 0.0] and kept is masks and metrics["tis_clipfrac"].tolist() == [0.0, 1.0, 1.0]


def test_a_span_of_the_public_name_is_a_block() -> None:
    from slime.utils.trace_utils import trace_span  # type: ignore[import-not-found]

    with trace_span(Sample(), "tool", attrs={"query": 1}):
        pass


def test_a_sample_takes_attributes_which_live_as_long_as_it_does() -> None:
    from slime.utils.types import Sample as PublicSample

    sample = PublicSample(tokens=[1, 2])
    sample.rollout_id, sample.trace = 7, {"turns": [1]}
    assert Sample.from_dict(json.loads(sample.to_json())) == sample == sample.copy()
    assert sample.copy().trace["turns"] is not sample.trace["turns"]
    del sample.trace
    assert not hasattr(sample, "trace") and PublicSample.Status.COMPLETED is Status.COMPLETED
    with pytest.raises(AttributeError, match="no attribute 'reponse'"):
        _ = sample.reponse


def test_a_sample_has_the_public_fields() -> None:
    """Law: those that it has no field for are attributes, with the public value while they are unset."""
    given = {"rollout_id": 3, "train_metadata": {"a": 1}, "non_generation_time": 0.5}
    given |= {"rollout_top_p_token_ids": [5], "rollout_top_p_token_offsets": [0, 1], "multimodal_inputs": {"k": 1}}
    sample = Sample(tokens=[1], **given)
    assert {name: getattr(sample, name) for name in given} == given == sample.attributes
    assert Sample.from_dict(json.loads(sample.to_json())) == sample
    fresh = Sample()
    fresh.non_generation_time += 2.0
    assert (fresh.rollout_id, fresh.multimodal_inputs, fresh.non_generation_time) == (None, None, 2.0)
    with pytest.raises(TypeError, match="respnse"):
        Sample(respnse="x")  # type: ignore[call-arg]


def test_weight_versions_may_be_set_and_tokens_know_better() -> None:
    """Law: a plugin may set what an engine reported, as long as the tokens do not have versions of their own."""
    sample = Sample(tokens=[1, 2], response_length=1, weight_versions=["default", "3"])  # type: ignore[call-arg]
    assert sample.weight_versions == [0, 3]
    sample.token_versions = [7]
    sample.weight_versions = ["9"]
    assert sample.weight_versions == [7]


def test_an_engine_without_a_weight_sync_has_version_0() -> None:
    sample, meta = Sample(tokens=[1]), {"weight_version": "default", "finish_reason": {"type": "stop"}}
    sample.append_response_tokens(None, tokens=[2], log_probs=[-1.0], trainable=True, meta_info=meta)
    assert (sample.token_versions, sample.status) == ([0], Status.COMPLETED)


def test_counters_of_an_engine_add_up_and_live_as_long_as_the_sample() -> None:
    from slime.utils.types import PrefixCacheInfo, SpecInfo

    counts = {"spec_accept_token_num": 2, "spec_draft_token_num": 8, "spec_verify_ct": 2, "completion_tokens": 4}
    meta = {"weight_version": "1", "cached_tokens": 3, "prompt_tokens": 6, **counts}
    sample = Sample(tokens=[1])
    for _ in range(2):
        sample.append_response_tokens(None, tokens=[2], log_probs=[-1.0], trainable=True, meta_info=meta)
    again = Sample.from_dict(json.loads(sample.to_json()))
    assert (again.spec_info.spec_accept_token_num, again.spec_info.spec_accept_rate) == (4, 0.25)
    assert (again.spec_info.spec_accept_length, again.prefix_cache_info.prefix_cache_hit_rate) == (2.0, 0.5)
    assert again.prefix_cache_info.to_dict() == {"cached_tokens": 6, "total_prompt_tokens": 12}
    assert isinstance(again.spec_info, Sample.SpecInfo) and Sample.SpecInfo is SpecInfo  # type: ignore[attr-defined]
    assert SpecInfo.from_dict({"spec_verify_ct": 1}).completion_token_num == 0
    assert PrefixCacheInfo().prefix_cache_hit_rate == 0.0


def test_the_settings_may_stand_for_the_reward_key(tmp_path: Path) -> None:
    args = rollout_args(tmp_path, "--reward-key", "acc")
    assert Sample(reward={"acc": 0.5, "b": 1}).get_reward_value(args) == 0.5
    assert Sample(reward=2.0).get_reward_value(args) == 2.0


def test_tokens_that_are_trained_have_log_probs_and_others_have_none() -> None:
    with pytest.raises(DataError, match="trainable=True without log-probs"):
        Sample(tokens=[1]).append_response_tokens(None, tokens=[2], trainable=True)
    with pytest.raises(DataError, match="trainable=False with log-probs"):
        Sample(tokens=[1]).append_response_tokens(None, tokens=[2], log_probs=[-1.0], trainable=False)


# --- requests -------------------------------------------------------------------------------------------------------


def test_requests_that_would_be_answered_otherwise_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "from slime.utils.http_utils import post\n"
        "async def generate(args, sample, sampling_params):\n"
        "    url = f'http://{args.sglang_router_ip}:{args.sglang_router_port}/generate'\n"
        "    await post(url, {'input_ids': [2], 'sampling_params': sampling_params, 'lora_path': 'x'})\n"
    )
    with pytest.raises(HookError, match=r"does not support lora_path = '.*' for /generate"):
        a_step(rollout_args(tmp_path, "--custom-generate-function-path", f"{tmp_path}/odd.py:generate"))


def test_a_plugin_is_held_to_the_limits_of_its_execution(tmp_path: Path) -> None:
    """Its first answer takes 8 tokens; of the second one, which asks for as many, the rest is left, or nothing."""
    for limits, wanted in (
        (("--rollout-max-total-response-len", "10"), [8, 2]),
        (("--rollout-max-total-response-len", "8"), [8]),
        (("--rollout-max-context-len", "17"), [8, 2]),  # of them 4 are the prompt, and 3 what was said between
    ):
        engine = FakeEngine()
        hook = ("--custom-generate-function-path", f"{PLUGIN}:generate", "--rollout-batch-size", "1")
        one = ("--n-samples-per-prompt", "1", "--disable-rewards-normalization")
        args = rollout_args(tmp_path, *hook, *one, *limits)

        async def work(manager: RolloutManager) -> Any:
            return (await manager.generate(0))[0]

        [sample] = asyncio.run(with_manager(args, engine, work)).samples
        assert [r["sampling_params"]["max_new_tokens"] for r in engine.requests] == wanted, limits
        assert int(sample.loss_mask.sum()) == sum(wanted)


def test_posts_to_others_are_tried_again_and_a_mistake_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.utils.http_utils import post

    monkeypatch.setattr("slime.public.http.PAUSE_S", 0.001)
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.path)
        if request.path == "/wrong":
            return web.Response(status=400)
        is_down = len(seen) < 3 or request.path == "/down"
        return web.json_response({"got": await request.json()}, status=503 if is_down else 200)

    async def main() -> Any:
        app = web.Application()
        app.router.add_post("/{any}", answer)
        async with served(app) as url:
            found = await post(f"{url}/search", {"q": "x"})
            with pytest.raises(Exception, match="400"):
                await post(f"{url}/wrong", {})
            with pytest.raises(Exception, match="503"):
                await post(f"{url}/down", {}, 2)
        return found

    assert asyncio.run(main()) == {"got": {"q": "x"}} and seen == ["/search"] * 3 + ["/wrong"] + ["/down"] * 2


# --- small things ---------------------------------------------------------------------------------------------------


def test_small_names_do_what_they_are_for(tmp_path: Path) -> None:
    from slime.rollout.rm_hub import get_deepscaler_rule_based_reward, grade_answer_verl
    from slime.rollout.rm_hub.math_dapo_utils import compute_score
    from slime.rollout.rm_hub.math_utils import extract_answer
    from slime.utils.async_utils import run
    from slime.utils.mask_utils import MultiTurnLossMaskGenerator
    from slime.utils.misc import load_function

    async def four() -> int:
        return 4

    assert run(four()) == 4
    assert load_function(f"{PLUGIN}.convert") is public_plugin.convert
    assert public_plugin.Counter() is public_plugin.Counter()
    assert extract_answer("so \\boxed{4}") == "4" and grade_answer_verl("so \\boxed{2+2}", "4")
    assert not grade_answer_verl("so 4", "4") and not grade_answer_verl("\\boxed{5}", "\\boxed{4}")
    assert get_deepscaler_rule_based_reward("<think>a</think> \\boxed{4}", "4") == 1.0
    assert compute_score("Answer: 4", "4") == {"score": 1.0, "acc": 1.0, "pred": "4"}
    args = rollout_args(tmp_path)
    generator = MultiTurnLossMaskGenerator(_tokenizer(args.hf_checkpoint), "qwen3")
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    ids, mask = generator.get_loss_mask(messages)
    assert len(ids) == len(mask) and "2" in generator.get_text_from_loss_mask(ids, mask)[0]


def _tokenizer(path: str) -> Any:
    from slime.utils.processing_utils import load_tokenizer

    tokenizer = load_tokenizer(path)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


def test_graders_may_be_asked_where_a_reward_function_runs(tmp_path: Path) -> None:
    """In a process of its own, without a rollout."""
    from slime.rollout.rm_hub import async_rm, batched_async_rm

    args = rollout_args(tmp_path, "--rm-type", "exact_match")
    right = Sample(response="4", label="4")
    assert asyncio.run(async_rm(args, right)) == 1.0
    by_row = Sample(response="\\boxed{5}", label="4", metadata={"rm_type": "math"})
    assert asyncio.run(batched_async_rm(args, [right, by_row])) == [1.0, 0.0]


def test_images_are_what_engines_and_processors_take() -> None:
    import base64

    from PIL import Image

    from slime.data.images import as_png
    from slime.utils.processing_utils import build_processor_kwargs, encode_image_for_rollout_engine

    head, _, body = encode_image_for_rollout_engine(Image.new("RGBA", (3, 2))).partition(",")
    assert head == "data:image/png;base64" and as_png(base64.b64decode(body))[1] == (3, 2)
    given = build_processor_kwargs({"images": [1]})
    assert given["images"] == [1] and given["images_kwargs"] == {"return_tensors": "pt"}
    assert given["text_kwargs"]["return_tensors"] is None, "ids stay lists"


def test_content_of_messages_is_flattened_to_text() -> None:
    from slime.agent.adapters.common import flatten_content

    assert flatten_content(None) == "" and flatten_content("a") == "a"
    assert flatten_content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"


def test_an_application_is_served_beside_the_code_that_starts_it() -> None:
    """Law: a blocking client in the thread that started it gets its answer."""
    import urllib.request

    from slime.agent.aiohttp_threaded import run_app_in_thread

    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    served = run_app_in_thread(app)
    assert urllib.request.urlopen(served.url, timeout=10).read() == b"hello"
    served.stop()


def test_a_rollout_that_sleeps_waits_until_it_is_ended() -> None:
    from slime.rollout.sleep_rollout import sleep

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sleep(None, 0, None), timeout=0.05)

    asyncio.run(main())


def test_sandboxes_and_harnesses_take_the_public_arguments(tmp_path: Path) -> None:
    """Law: commands run under either spelling, and results unpack to code, stdout and stderr."""
    from slime.agent.harness import ClaudeCodeHarness
    from slime.agent.sandbox import Command, ExecResult, Sandbox, exec_and_wait

    class Here(Sandbox):
        name, folder = "here", str(tmp_path)

        async def __aenter__(self) -> Here:
            self.sandbox_id = "here"
            return self

        async def __aexit__(self, *error: object) -> None: ...

        async def _exec(self, command: Command) -> ExecResult:
            if command.line.startswith("npm "):
                return ExecResult(0, command.line, "")
            done = subprocess.run(["sh", "-c", command.line], cwd=tmp_path, capture_output=True, text=True)
            return ExecResult(done.returncode, done.stdout, done.stderr)

        async def write_file(self, path: str, content: bytes | str) -> None: ...

        async def read_file(self, path: str) -> bytes:
            return Path(path).read_bytes()

    async def main() -> None:
        async with Here() as sb:
            code, out, err = await sb.exec(cmd="echo a; echo b >&2; exit 3", timeout=5)
            assert (code, out, err) == (3, "a\n", "b\n")
            code, out, _ = await exec_and_wait(sb, cmd="echo done", timeout=20, poll_s=0.01)
            assert (code, out) == (0, "done\n")
            assert (await exec_and_wait(sb, cmd="sleep 60", timeout=0.3, poll_s=0.01)).code == -1
            await ClaudeCodeHarness().install_cli(sb)

    asyncio.run(main())


def test_an_adapter_is_built_from_a_tokenizer(tmp_path: Path) -> None:
    """Law: an agent behind an adapter of the public form trains what the run's engines sampled."""
    (tmp_path / "own.py").write_text(ADAPTER_PLUGIN)
    hook = ("--custom-generate-function-path", f"{tmp_path}/own.py:generate")
    batch, _ = a_step(rollout_args(tmp_path, *hook))
    assert len(batch.samples) == 8 and all(s.loss_mask.sum() == 8 for s in batch.samples)
    assert all((s.token_versions[s.loss_mask > 0] == 1).all() for s in batch.samples)


ADAPTER_PLUGIN = """
import aiohttp
from slime.agent.adapters import AnthropicAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.misc import SingletonMeta

class Served(metaclass=SingletonMeta):
    def __init__(self, args):
        tokenizer = GenerateState(args).tokenizer
        tokenizer.chat_template = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        own = {"tool_parser": "qwen25", "reasoning_parser": "qwen3", "max_turns_per_sid": 3}
        self.adapter = AnthropicAdapter(tokenizer=tokenizer, sglang_url=url, fork_threshold_tokens=8, **own)
        self.served = run_app_in_thread(self.adapter.app, "127.0.0.1", 0)

async def generate(args, sample, sampling_params):
    one, sid = Served(args), f"session-{sample.index}"
    one.adapter.open_session(sid, sampling_params, max_context_tokens=200)
    body = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": sample.prompt}]}
    async with aiohttp.ClientSession(headers={"x-api-key": sid}) as client:
        async with client.post(f"{one.served.url}/v1/messages", json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert (await answer.json())["role"] == "assistant"
    await one.adapter.shutdown_session(sid)
    [found] = one.adapter.finish_session(sid, base_sample=sample, extra_metadata={"agent": "own"})
    return found
"""


def test_an_adapter_says_what_it_does_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from slime.agent.adapters import AnthropicAdapter

    def outside() -> Any:
        raise HookError("no rollout is running")

    monkeypatch.setattr("slime.agent.adapters.current", outside)
    own = {"reasoning_parser": "qwen3", "fork_threshold_tokens": 8, "debug_callback": print}
    with pytest.raises(HookError):
        AnthropicAdapter(tokenizer=object(), **own)
    assert [name for name in own if f"{name} has no effect" not in caplog.text] == []


def test_whole_responses_are_what_context_parallel_ranks_have() -> None:
    import torch

    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp

    whole = torch.arange(3.0)
    assert all_gather_with_cp(whole, 5, 3) is whole and slice_log_prob_with_cp(whole, 5, 3) is whole
    with pytest.raises(ValueError, match="expected one value per token"):
        all_gather_with_cp(whole[:2], 5, 3)


def test_a_program_starts_a_run_by_the_words_of_a_script(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from slime.utils.external_utils.command_utils import execute_train

    execute_train("--version", num_gpus_per_node=8, megatron_model_type="qwen3-4B", extra_env_vars={"A": "b"})
    assert "slime" in capfd.readouterr().out
    with pytest.raises(Exception, match=r"must be one of train\.py"):
        execute_train("--version", train_script="other.py")
