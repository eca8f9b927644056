"""Loads each user function of a rollout once, passes it the arguments it accepts, and validates its result."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from slime.buffer.groups import flatten
from slime.core.errors import HookError
from slime.core.files import ImageFolder
from slime.core.sample import Sample
from slime.rollout.context import current
from slime.rollout.generate import generate as default_generate
from slime.rollout.guard import run_in_thread, supervised
from slime.rollout.transcript import TRANSCRIPT
from slime.rollout.types import DynamicFilterOutput
from slime.settings import Args, for_hook
from slime.settings.groups.hooks import HookSettings
from slime.settings.hook_contracts import accepts_keyword, is_async, load_hook

Hook = Callable[..., Any]
T = TypeVar("T")
IMAGE_ATTRIBUTES = ("multimodal_inputs", "multimodal_train_inputs", "multimodal_train_input_id")
"""Attributes in which public plugins store images and patches. The trainer makes patches from `Sample.images`."""


def load(path: str | None, kind: str) -> Hook | None:
    """Loads the function at an import path; returns None for None. Raises `HookError`."""
    return None if path is None else _load(path, kind)


@functools.cache
def _load(path: str, kind: str) -> Hook:
    return load_hook(path, kind)


@dataclass(frozen=True, slots=True)
class RolloutHooks:
    """The user functions of a run; None if the setting is not set."""

    generate: Hook
    dynamic_filter: Hook | None = None
    sample_filter: Hook | None = None
    all_samples: Hook | None = None

    @classmethod
    def load(cls, args: HookSettings) -> RolloutHooks:
        """Loads the functions. Raises `HookError`."""
        return cls(
            generate=load(args.custom_generate_function_path, "generate") or default_generate,
            dynamic_filter=load(args.dynamic_sampling_filter_path, "dynamic_filter"),
            sample_filter=load(args.rollout_sample_filter_path, "sample_filter"),
            all_samples=load(args.rollout_all_samples_process_path, "all_samples"),
        )


@contextlib.contextmanager
def reachable(args: T) -> Iterator[T]:
    """Yields the settings for one call of a user's function. Their router address is the one at which its HTTP clients
    reach the engines (`loopback_router`).
    """
    own = for_hook(args)
    try:
        loopback = current().loopback
    except HookError:
        loopback = None
    with loopback.addressed(own) if loopback is not None else contextlib.nullcontext():
        yield own


async def call_generate(
    hook: Hook, args: HookSettings, sample: Sample, params: dict[str, Any], *, evaluation: bool
) -> list[Sample]:
    """Calls a generate function. Returns a flat list of samples that carry the execution's indices.

    Raises `HookError` unless the function returns a `Sample`, or distinct samples in nested lists.
    """
    group_index, index = sample.group_index, sample.index
    extra = {"evaluation": evaluation} if accepts_keyword(hook, "evaluation") else {}
    own_code = hook is not default_generate
    if shows := own_code and bool(sample.images):
        sample = sample.copy()  # images cannot be saved, and the group may be at any time
        sample.multimodal_inputs = {"images": _opened(sample.images)}  # type: ignore[attr-defined]
    with reachable(args) if own_code else contextlib.nullcontext(args) as own:
        result = await hook(own, sample, params, **extra)
    samples = flatten([result])
    if not samples or not all(isinstance(s, Sample) for s in samples):
        kinds = sorted({type(s).__name__ for s in samples}) or ["nothing"]
        raise HookError(
            f"{name_of(hook)} returned {', '.join(kinds)}; a generate function must return a Sample or a list of them"
        )
    if len({id(s) for s in samples}) < len(samples):
        raise HookError(f"{name_of(hook)} returned the same Sample object twice; create siblings with copy.deepcopy")
    for sibling in samples:
        sibling.group_index, sibling.index = group_index, index
        _complete(sibling, had_images=shows)
    return samples


async def call_sample_hooks(args: HookSettings, sample: Sample, *, rollout_id: int | None, evaluation: bool) -> Sample:
    """Calls the functions of `--rollout-sample-hook-path` in order, and preserves the sample's indices.

    Raises `HookError` if a function returns anything but a `Sample` or None.
    """
    group_index, index = sample.group_index, sample.index
    for path in args.rollout_sample_hook_path:
        hook = _load(path, "sample_hook")
        given = {"rollout_id": rollout_id, "evaluation": evaluation}
        given = {name: value for name, value in given.items() if accepts_keyword(hook, name)}
        with reachable(args) as own:
            result = await (hook(own, sample, **given) if is_async(hook) else in_thread(hook, own, sample, **given))
        if not isinstance(result, Sample | None):
            raise HookError(
                f"{name_of(hook)} returned {type(result).__name__}; a sample hook must return a Sample or None"
            )
        sample = sample if result is None else result
        sample.group_index, sample.index = group_index, index
        _complete(sample)
    return sample


def _opened(digests: Sequence[str]) -> list[Any]:
    """Returns images of the run as PIL images, which read their pixels on first use."""
    from PIL import Image

    folder = ImageFolder.of_run(current().args.run_dir)
    return [Image.open(io.BytesIO(folder.read(digest))) for digest in digests]


def _complete(sample: Sample, *, had_images: bool = False) -> None:
    """Fills in what user code omitted, drops images that the run already stores, and validates the sample.

    `had_images`: the execution's prompt has images, though this sample's conversation may have left them out.
    """
    transcript = TRANSCRIPT.get()
    if transcript is not None:
        transcript.complete(sample)
    for name in IMAGE_ATTRIBUTES if sample.images or had_images else ():
        sample.attributes.pop(name, None)
    sample.validate()


async def in_thread(hook: Hook, *args: Any, **kwargs: Any) -> Any:
    """Calls a synchronous function in a thread (`run_in_thread`)."""
    return await run_in_thread(name_of(hook), hook, *args, **kwargs)


async def in_time(limit_s: float, hook: Hook, *args: Any) -> Any:
    """Like `in_thread`, with a limit on the time without progress (`--execution-timeout-s`; 0: no limit).

    Raises `DeadlineExceeded` at the limit and leaves the thread behind.
    """
    return await supervised(in_thread(hook, *args), what=name_of(hook), limit_s=limit_s)


async def keep_group(hook: Hook, args: Args, samples: list[Sample]) -> DynamicFilterOutput:
    """Calls a dynamic filter. Raises `HookError` unless the filter returns a bool or a `DynamicFilterOutput`."""
    verdict = await in_time(args.execution_timeout_s, hook, for_hook(args), samples)
    if isinstance(verdict, bool):
        return DynamicFilterOutput(keep=verdict)
    if hasattr(verdict, "keep"):
        anyway = bool(getattr(verdict, "keep_when_insufficient", False))
        return DynamicFilterOutput(bool(verdict.keep), getattr(verdict, "reason", None), anyway)
    raise HookError(
        f"{name_of(hook)} returned {type(verdict).__name__}; a filter must return a bool or a DynamicFilterOutput"
    )


async def is_logged_by_user(limit_s: float, path: str | None, kind: str, *given: Any) -> bool:
    """Calls the user's log function, if any, within `limit_s` (see `in_time`). Returns whether it replaces the default
    logging.
    """
    log = load(path, kind)
    return log is not None and bool(await in_time(limit_s, log, *given))


def name_of(hook: Hook) -> str:
    """Returns a function's name for use in messages."""
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', hook)}"
