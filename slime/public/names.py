"""Import paths of the public slime, mapped to the objects that implement them.

Plugins use imports like `from slime.utils.types import Sample`, but no such file exists. `ALIASES` lists the modules;
when a plugin imports one of them, a finder creates the module and resolves its names. The finder precedes all others,
because an updated checkout may still contain a folder of that name with stale compiled files.

Invariants
1. Nothing is imported until a plugin imports it. slime itself never imports these names.
2. An alias module only contains the names listed in `ALIASES`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

ALIASES: dict[str, dict[str, str]] = {
    "slime.agent.adapters.common": {
        "BaseAdapter": "slime.agent.adapters:RunAdapter",
        "flatten_content": "slime.agent.adapters.openai_chat:text_of",
    },
    "slime.agent.aiohttp_threaded": {
        "run_app_in_thread": "slime.public.http:run_app_in_thread",
    },
    "slime.backends": {},
    "slime.backends.megatron_utils": {},
    "slime.backends.megatron_utils.cp_utils": {
        "all_gather_with_cp": "slime.public.losses:all_gather_with_cp",
        "slice_log_prob_with_cp": "slime.public.losses:slice_log_prob_with_cp",
    },
    "slime.backends.megatron_utils.loss": {
        "icepop_function": "slime.public.losses:icepop_function",
    },
    "slime.rollout.base_types": {
        "RolloutFnEvalOutput": "slime.rollout.types:RolloutFnEvalOutput",
        "RolloutFnTrainOutput": "slime.rollout.types:RolloutFnTrainOutput",
        "call_rollout_fn": "slime.public.generation:call_rollout_fn",
    },
    "slime.rollout.data_source": {
        "RolloutDataSource": "slime.public.sources:RolloutDataSource",
        "RolloutDataSourceWithBuffer": "slime.public.sources:RolloutDataSourceWithBuffer",
        "pop_first": "slime.public.sources:pop_first",
    },
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {
        "DynamicFilterOutput": "slime.rollout.types:DynamicFilterOutput",
    },
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        "check_reward_nonzero_std": "slime.rollout.filters:check_reward_nonzero_std",
        "check_reward_nonzero_std_with_fallback": "slime.rollout.filters:check_reward_nonzero_std_with_fallback",
    },
    "slime.rollout.fully_async": {
        "generate_rollout_fully_async": "slime.public.generation:generate_rollout_fully_async",
    },
    "slime.rollout.fully_async_rollout": {
        "generate_rollout_fully_async": "slime.public.generation:generate_rollout_fully_async",
    },
    "slime.rollout.on_policy_distillation": {
        "post_process_rewards": "slime.rollout.workflows.teacher:post_process_rewards",
        "reward_func": "slime.rollout.workflows.teacher:reward_func",
    },
    "slime.rollout.progress": {
        "alive": "slime.rollout.guard:alive",
        "waiting": "slime.rollout.guard:waiting",
    },
    "slime.rollout.rm_hub": {
        "async_rm": "slime.public.generation:async_rm",
        "batched_async_rm": "slime.public.generation:batched_async_rm",
        "get_deepscaler_rule_based_reward": "slime.rewards.graders.answers:deepscaler_reward",
        "grade_answer_verl": "slime.rewards.graders.answers:boxed_equals",
    },
    "slime.rollout.rm_hub.deepscaler": {
        "get_deepscaler_rule_based_reward": "slime.rewards.graders.answers:deepscaler_reward",
    },
    "slime.rollout.rm_hub.math_dapo_utils": {
        "compute_score": "slime.rewards.graders.answers:dapo_score",
        "math_dapo_compute_score": "slime.rewards.graders.answers:dapo_score",
    },
    "slime.rollout.rm_hub.math_utils": {
        "extract_answer": "slime.rewards.graders.answers:last_boxed",
        "extract_boxed_answer": "slime.rewards.graders.answers:last_boxed",
        "grade_answer_verl": "slime.rewards.graders.answers:boxed_equals",
    },
    "slime.rollout.sft_rollout": {
        "generate_rollout": "slime.rollout.sft:generate_rollout",
    },
    "slime.rollout.sglang_rollout": {
        "GenerateState": "slime.public.generation:GenerateState",
        "generate": "slime.rollout.generate:generate",
        "generate_and_rm": "slime.public.generation:generate_and_rm",
        "generate_and_rm_group": "slime.public.generation:generate_and_rm_group",
        "generate_rollout": "slime.rollout.loop:generate_rollout",
    },
    "slime.rollout.sglang_streaming_rollout": {
        "generate_streaming": "slime.rollout.generate:generate",
    },
    "slime.rollout.sleep_rollout": {
        "sleep": "slime.public.generation:sleep",
    },
    "slime.rollout.turns": {
        "count_tool_call": "slime.rollout.sample_metrics:count_tool_call",
        "expect_tools": "slime.rollout.sample_metrics:expect_tools",
    },
    "slime.utils": {},
    "slime.utils.async_utils": {
        "run": "slime.rollout.loop:run",
    },
    "slime.utils.external_utils": {},
    "slime.utils.external_utils.command_utils": {
        "execute_train": "slime.settings.command_line:execute_train",
    },
    "slime.utils.http_utils": {
        "post": "slime.public.http:post",
    },
    "slime.utils.mask_utils": {
        "MultiTurnLossMaskGenerator": "slime.public.losses:MultiTurnLossMaskGenerator",
    },
    "slime.utils.misc": {
        "SingletonMeta": "slime.public.names:SingletonMeta",
        "load_function": "slime.core.registry:load_object",
    },
    "slime.utils.processing_utils": {
        "build_processor_kwargs": "slime.public.http:build_processor_kwargs",
        "encode_image_for_rollout_engine": "slime.public.http:encode_image_for_rollout_engine",
        "load_processor": "slime.rollout.factories:processor_of",
        "load_tokenizer": "slime.rollout.factories:tokenizer_of",
    },
    "slime.utils.trace_utils": {
        "trace_span": "slime.public.generation:trace_span",
    },
    "slime.utils.types": {
        "PrefixCacheInfo": "slime.core.sample:PrefixCacheInfo",
        "Sample": "slime.core.sample:Sample",
        "SpecInfo": "slime.core.sample:SpecInfo",
    },
}
"""Module -> public name -> `module:name` in this package."""
_OLD_PATHS = ("slime.rollout.fully_async", "slime.rollout.progress", "slime.rollout.turns")
"""Modules of earlier releases of this package."""
_MODULES: Mapping[str, tuple[str, ...]] = {
    "slime.agent.adapters": ("AnthropicAdapter", "OpenAIAdapter"),
    "slime.agent.harness": ("ClaudeCodeHarness", "CodexHarness"),
    "slime.agent.sandbox": ("E2BSandbox", "Sandbox", "exec_and_wait"),
}
"""Module of this package -> names that the public slime has at the same place."""
_NOTES: Mapping[str, str] = {
    "slime.agent.adapters": "built from `tokenizer` and `sglang_url`, or from an engine and a template",
    "slime.agent.harness": "with `install_cli`, `write_config` and `run`",
    "slime.agent.sandbox": "`cmd` and `timeout` are accepted, and results unpack to code, stdout and stderr",
    "slime.backends.megatron_utils.cp_utils": ("both return their input, because functions receive whole responses"),
    "slime.rollout.on_policy_distillation": "as flag values, they mean `--opd-teacher-url`",
    "slime.rollout.sglang_streaming_rollout": "the same as `generate`: every request streams",
    "slime.utils.http_utils": (
        "requests to the router's `/generate`, also with `image_data`, go through the run's engine client, all others "
        "over HTTP with retries"
    ),
    "slime.utils.mask_utils": (
        "the template determines which tokens are trained; for a conversation that becomes several samples, "
        "`get_loss_mask` raises an error, and `get_loss_masks` returns all masks"
    ),
    "slime.backends.megatron_utils.loss": "a value for `--custom-tis-function-path`",
    "slime.utils.trace_utils": "a span in the execution's trace, if it is traced",
    "slime.utils.types": "`Sample` has `Sample.Status`, custom attributes, and the public signatures of its methods",
}
"""Module -> what is different there."""


def public_names() -> dict[str, tuple[str, ...]]:
    """Returns the modules of the public slime that plugins can import, each with its names, in alphabetical order."""
    found: dict[str, tuple[str, ...]] = {
        module: tuple(names) for module, names in ALIASES.items() if names and module not in _OLD_PATHS
    }
    return dict(sorted((found | dict(_MODULES)).items()))


def names_table() -> str:
    """Returns a Markdown table of `public_names`, with what is different. docs/migration.md has it."""
    rows = ["| module | names |", "|---|---|"]
    for module, names in public_names().items():
        note = f": {_NOTES[module]}" if module in _NOTES else ""
        rows.append(f"| `{module}` | {', '.join(f'`{name}`' for name in names)}{note} |")
    return "\n".join(rows)


class PublicNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules in `ALIASES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in ALIASES:
            return None
        is_package = any(other.startswith(fullname + ".") for other in ALIASES)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        row = ALIASES[module.__name__]
        for name, place in row.items():
            where, _, own = place.partition(":")
            setattr(module, name, getattr(importlib.import_module(where), own))
        module.__dict__["__all__"] = sorted(row)


def keep_old_paths() -> None:
    """Installs the finder. Called when `slime` is imported."""
    if not any(isinstance(finder, PublicNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, PublicNames())


class SingletonMeta(type):
    """Metaclass for singletons. The first call creates the instance; later calls ignore their arguments."""

    _made: dict[type, Any] = {}  # noqa: RUF012 - shared by all classes
    _lock = threading.Lock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._made:
                SingletonMeta._made[cls] = super().__call__(*args, **kwargs)
            return SingletonMeta._made[cls]

    @staticmethod
    def clear_all_instances() -> None:
        """Discards all instances, for tests."""
        with SingletonMeta._lock:
            SingletonMeta._made.clear()
