"""What a generate function, a hook or a user's rollout function can reach: the context of the rollout that runs it.

    from slime.rollout.context import current
    generation = await current().client.generate(ids, sampling_params)

The context travels with asyncio tasks and with `asyncio.to_thread`, as context variables do; nothing is global.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.core.errors import HookError
from slime.core.files import ImageFolder
from slime.core.hf_config import read_hf_config
from slime.rewards.pool import GraderPool
from slime.rollout.client.call import Pictures
from slime.rollout.client.client import EngineClient
from slime.rollout.client.teacher_client import TeacherClient
from slime.rollout.types import Progress
from slime.settings import Args

if TYPE_CHECKING:
    from slime.rollout.workers.here import Episodes


class Models(dict[str, EngineClient]):
    """Clients by the names of their models. Raises `HookError` for one that is not served."""

    def __missing__(self, name: str) -> EngineClient:
        known = ", ".join(self) or "none"
        raise HookError(f"got a call to model {name!r}, which no engine serves; served are {known} (--sglang-config)")


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Shared by all tasks of one manager."""

    args: Args
    client: EngineClient | None
    """Of the policy's engines. None where no engine runs (SFT, replay)."""
    tokenizer: Any
    """The HF tokenizer of `--hf-checkpoint`; None where the data brings ids."""
    graders: GraderPool | None
    progress: Progress
    """What the driver shows while it waits."""
    loop: asyncio.AbstractEventLoop
    """The manager's event loop; a user function in a thread schedules coroutines on it."""
    teacher: TeacherClient | None = None
    """The server of `--opd-teacher-url`."""
    rollout_id: int | None = None
    """The step that is generated or evaluated."""
    models: Mapping[str, EngineClient] = field(default_factory=Models)
    """Clients of all models by their names in `--sglang-config`, the policy's among them; without it, "default"."""
    eval_datasets: tuple[Any, ...] = ()
    """`slime.rollout.evaluate.EvalDataset` records."""
    workers: Episodes | None = None
    """Who works on groups; None: this process itself."""

    def pictures(self, digests: Sequence[str]) -> Pictures:
        """The images of a sample (`Sample.images`), for `EngineClient.generate`. Raises `DataError` without them."""
        token_id = int(read_hf_config(self.args.hf_checkpoint)["image_token_id"])
        return Pictures.of(digests, ImageFolder.of_run(self.args.run_dir), token_id)

    def engine(self) -> EngineClient:
        """The client. Raises `HookError` where no engine runs."""
        if self.client is None:
            raise HookError(
                "got a generate call, but no engine runs, because this rollout function works without engines"
            )
        return self.client


_CURRENT: ContextVar[RolloutContext | None] = ContextVar("slime_rollout_context", default=None)


def current() -> RolloutContext:
    """The context of the running rollout. Raises `HookError` outside one."""
    context = _CURRENT.get()
    if context is None:
        raise HookError("got a call to slime.rollout.context.current() outside a rollout; call it from a hook")
    return context


@contextlib.contextmanager
def use(context: RolloutContext) -> Iterator[RolloutContext]:
    """Makes `context` the current one for the block and for the tasks created in it."""
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)
