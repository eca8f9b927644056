"""Loads user hooks by path and checks their signatures against contracts.

A path is `pkg.mod:fn`, `pkg.mod.fn` or `path/to/file.py:fn`. Loading a hook imports the user's module, so hooks are
never loaded while the command line is parsed. `check_hooks` loads all of them before the run starts any process, and
`load_hook` loads one where it is used.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from slime.core.errors import HookError
from slime.core.registry import LoadingFailed, load_object
from slime.settings.all_flags import components, entries_named_in
from slime.settings.args import Args
from slime.settings.eval_config import eval_datasets


@dataclass(frozen=True, slots=True)
class HookContract:
    """How slime calls a hook."""

    flag: str
    """The setting that names the hook."""
    positional: tuple[str, ...]
    """Passed by position, in this order; the hook may use other parameter names."""
    keywords: tuple[str, ...] = ()
    """Always passed by keyword."""
    optional_keywords: tuple[str, ...] = ()
    """Passed by keyword if the hook accepts them."""
    mode: Literal["sync", "async", "either"] = "sync"
    is_class: bool = False
    methods: tuple[str, ...] = ()
    """Methods that the class must define."""

    @property
    def shape(self) -> str:
        """Returns the contract as a signature, for messages."""
        keywords = (*(f"{k}=..." for k in self.keywords), *(f"[{k}=...]" for k in self.optional_keywords))
        parts = ", ".join((*self.positional, *keywords))
        if self.is_class:
            return f"class({parts}) with {', '.join(self.methods)}"
        how = {"sync": "def fn", "async": "async def fn", "either": "[async] def fn"}[self.mode]
        return f"{how}({parts})"

    def refused(self, wrong: str) -> HookError:
        """Returns the error for a hook that breaks the contract. `wrong` is the hook's path and the problem."""
        return HookError(f"--{self.flag.replace('_', '-')} {wrong}; write {self.shape}")


_SAMPLE = ("args", "sample")
CONTRACTS: dict[str, HookContract] = {
    "rollout": HookContract(
        "rollout_function_path", ("args", "rollout_id", "data_source"), keywords=("evaluation",), mode="either"
    ),
    "eval": HookContract(
        "eval_function_path", ("args", "rollout_id", "data_source"), keywords=("evaluation",), mode="either"
    ),
    "generate": HookContract(
        "custom_generate_function_path", (*_SAMPLE, "sampling_params"), optional_keywords=("evaluation",), mode="async"
    ),
    "sample_hook": HookContract(
        "rollout_sample_hook_path", _SAMPLE, optional_keywords=("rollout_id", "evaluation"), mode="either"
    ),
    "custom_rm": HookContract("custom_rm_path", _SAMPLE, mode="either"),
    "group_rm": HookContract("custom_rm_path", ("args", "samples"), mode="either"),
    "dynamic_filter": HookContract("dynamic_sampling_filter_path", ("args", "samples")),
    "buffer_filter": HookContract("buffer_filter_path", ("args", "rollout_id", "buffer", "num_samples")),
    "sample_filter": HookContract("rollout_sample_filter_path", ("args", "groups")),
    "all_samples": HookContract("rollout_all_samples_process_path", ("args", "all_groups", "data_source")),
    "reward_post_process": HookContract("custom_reward_post_process_path", ("args", "samples")),
    "convert_samples": HookContract("custom_convert_samples_to_train_data_path", ("args", "samples")),
    "advantage": HookContract("custom_advantage_function_path", ("args", "rollout_data")),
    "data_postprocess": HookContract("rollout_data_postprocess_path", ("args", "rollout_id", "rollout_data")),
    "loss": HookContract("custom_loss_function_path", ("args", "batch", "log_probs", "sum_of_sample_mean")),
    "tis": HookContract(
        "custom_tis_function_path",
        (),
        keywords=(
            *("args", "pg_loss", "train_log_probs", "rollout_log_probs"),
            *("loss_masks", "total_lengths", "response_lengths"),
        ),
    ),
    "pg_loss_reducer": HookContract(
        "custom_pg_loss_reducer_function_path",
        ("total_lengths", "response_lengths", "masks", "calculate_per_token_loss"),
    ),
    "megatron_init": HookContract("custom_megatron_init_path", ("args",)),
    "before_log_prob": HookContract("custom_megatron_before_log_prob_hook_path", ("args", "model", "store_prefix")),
    "before_train_step": HookContract(
        "custom_megatron_before_train_step_hook_path",
        ("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
    ),
    "post_write": HookContract("custom_update_weight_post_write_path", ("args", "version_dir", "rollout_engines")),
    "pre_read": HookContract("custom_pull_weights_pre_read_path", ("source_dir", "target_version")),
    "rollout_log": HookContract(
        "custom_rollout_log_function_path", ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time")
    ),
    "eval_log": HookContract("custom_eval_rollout_log_function_path", ("rollout_id", "args", "data", "extra_metrics")),
    "data_source": HookContract(
        "data_source_path", ("args",), is_class=True, methods=("get_samples", "add_samples", "save", "load", "__len__")
    ),
}
"""Kind -> contract."""


def load_hook(path: str, kind: str) -> Callable[..., Any]:
    """Returns the function or class at `path`.

    Raises `HookError` if it cannot be loaded, or does not match the contract of `kind` (a key of `CONTRACTS`).
    """
    assert kind in CONTRACTS, f"unknown hook kind {kind!r}; choose from {sorted(CONTRACTS)}"
    contract = CONTRACTS[kind]
    hook = _find(path, contract)
    if contract.is_class:
        _check_class(hook, path, contract)
    else:
        _check_mode(hook, path, contract)
    _check_signature(hook, path, contract)
    result: Callable[..., Any] = hook
    return result


def accepts_keyword(hook: Callable[..., Any], name: str) -> bool:
    """Returns whether `hook` accepts the keyword argument `name`."""
    parameters = inspect.signature(hook).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def is_async(hook: Any) -> bool:
    """Returns whether calls to `hook` must be awaited."""
    plain = inspect.isroutine(hook) or inspect.isclass(hook) or isinstance(hook, functools.partial)
    call = hook if plain else type(hook).__call__
    return inspect.iscoroutinefunction(inspect.unwrap(call))


def _configured(args: Args) -> list[tuple[str, str]]:
    wanted = []
    for kind, contract in CONTRACTS.items():
        given = getattr(args, contract.flag)
        if contract.flag != "custom_rm_path" or (kind == "group_rm") == args.group_rm:
            wanted += [(path, kind) for path in (given if isinstance(given, tuple) else (given,))]
    for data in eval_datasets(args):
        wanted += [(data.custom_generate_function_path, "generate"), (data.custom_rm_path, "custom_rm")]
    return [(path, kind) for path, kind in wanted if path is not None]


def runs_user_code(args: Args) -> bool:
    """Returns whether a hook or a chosen registry entry is user code: any import path outside slime."""
    chosen = {c.setting: getattr(args, c.setting) for c in components().choosers}
    entries = [path for paths in entries_named_in(chosen, components()).values() for path in paths]
    return any(not path.startswith("slime.") for path in [*entries, *(path for path, _ in _configured(args))])


def check_hooks(args: Args) -> None:
    """Loads every configured hook once. Raises one `HookError` that lists all problems."""
    problems = []
    for path, kind in _configured(args):
        try:
            hook = load_hook(path, kind)
        except HookError as error:
            problems.append(str(error))
            continue
        if kind == "loss" and not args.custom_loss_logits and "logits" in inspect.signature(hook).parameters:
            problems.append(
                f"--custom-loss-function-path {path} has a parameter named logits, but a loss gets log-probs by "
                "default; add --custom-loss-logits, or name the parameter log_probs (docs/migration.md, row "
                "--custom-loss-function-path)"
            )
    if problems:
        raise HookError("\n  ".join(problems) if len(problems) == 1 else "\n  " + "\n  ".join(problems))


def _find(path: str, contract: HookContract) -> Any:
    try:
        target = load_object(path)
    except LoadingFailed as error:
        raise HookError(f"--{contract.flag.replace('_', '-')} {path}: {error}") from error
    if not callable(target):
        raise contract.refused(f"{path} is a {type(target).__name__}")
    return target


def _check_mode(hook: Any, path: str, contract: HookContract) -> None:
    waits = is_async(hook)
    if waits != {"sync": False, "async": True}.get(contract.mode, waits):
        raise contract.refused(f"{path} is {'async' if waits else 'not async'}")


def _check_class(hook: Any, path: str, contract: HookContract) -> None:
    if not inspect.isclass(hook):
        raise contract.refused(f"{path} is a function")
    missing = [m for m in contract.methods if not callable(getattr(hook, m, None))]
    if missing:
        raise contract.refused(f"{path} does not define {', '.join(missing)}")


def _check_signature(hook: Any, path: str, contract: HookContract) -> None:
    try:
        signature = inspect.signature(hook)
    except ValueError:  # some builtins have no signature; a wrong call fails later
        return
    accepted = [name for name in contract.optional_keywords if accepts_keyword(hook, name)]
    try:
        signature.bind(*contract.positional, **dict.fromkeys((*contract.keywords, *accepted)))
    except TypeError as error:
        raise contract.refused(f"{path}{signature} cannot be called ({error})") from None
