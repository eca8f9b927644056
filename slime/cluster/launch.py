"""From settings to a running run, and back to nothing.

Order: preflight -> run folder -> guardian -> views (W&B has a process of its own) -> Ray -> other hosts, each with a
guardian (`hosts`) -> placement group, engines, trainers, router (`start`). The `with` block ends them in the opposite
order, whatever ends the block: the views are closed when nothing of the run computes any more, and before the guardian
ends what is left. This module imports no Ray: Ray reads its environment when it is imported, and the environment is
made here.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime.cluster.environment import prepare_environment
from slime.cluster.guarded_hosts import GuardedHosts, OwnGuardian
from slime.cluster.hosts import hosts_of_run, plan_here
from slime.cluster.memory_watch import MemoryWatch
from slime.cluster.placement import PlacementPlan
from slime.cluster.preflight import preflight
from slime.cluster.restarting import this_restart
from slime.cluster.resuming import how_to_resume
from slime.core.blame import one_line
from slime.core.errors import ActorDied, ActorFailed, LoopStalled, Terminated
from slime.core.lease import FILE_NAME, Lease
from slime.observability.logs import FILE_ONLY, setup_logging
from slime.observability.progress import StartUp
from slime.observability.run_folder import RunFolder
from slime.observability.spans import start_recording
from slime.observability.tracker import Tracker, Views
from slime.rollout.guard import LAST_WORDS, last_words
from slime.settings import Args
from slime.settings.hooks import check_hooks

if TYPE_CHECKING:
    from slime.cluster.run import Run

T = TypeVar("T")
logger = logging.getLogger(__name__)

DRIVER_LOG = "driver.log"
ORDERLY_END_S, HASTY_END_S = 20.0, 2.0
"""How long the processes may take to stop by themselves; after an error or Ctrl-C the cluster ends them soon."""


@contextmanager
def launch(args: Args) -> Iterator[Run]:
    """Starts everything that `args` asks for, yields the verbs, and leaves nothing behind."""
    began_s = time.monotonic()
    prepare_environment(args.run_id, ray_address=args.ray_address)  # before any user code: a hook may import Ray
    check_hooks(args)
    preflight(args)
    with ExitStack() as leases:
        for lease in _leases(args):
            leases.enter_context(lease)
        yield from _launched(args, began_s)


def _leases(args: Args) -> Iterator[Lease]:
    """Of the folders that two runs must not write into at a time."""
    folder = Path(args.run_dir).resolve()
    yield Lease(folder, args.run_id, flag="--run-dir", file=folder.with_name(f".{folder.name}{FILE_NAME}"))
    if args.save is not None:
        yield Lease(Path(args.save), args.run_id, flag="--save")


def _launched(args: Args, began_s: float) -> Iterator[Run]:
    run_id, settings = args.run_id, args.to_json_dict()
    folder = RunFolder.create(
        Path(args.run_dir).resolve(),
        run_id=run_id,
        args=settings,
        command=args.command,
        without_effect=settings["idle"],
    )
    setup_logging(folder.logs / DRIVER_LOG)
    if (restart := this_restart()) is not None:
        logger.warning("%s", restart)
        folder.note("restart", restart.facts())
    if args.idle:
        told = "\n".join(f"  {name} {text}" for name, text in settings["idle"].items())
        logger.warning("settings that were given and have no effect (--strict refuses them):\n%s", told)
    from slime.cluster.session import guarded
    from slime.cluster.start import start

    spans = start_recording("driver", folder.traces)
    startup = StartUp(began_s)
    try:
        with (
            guarded(run_id, log_path=folder.logs / "guardian.log", own_ray=args.ray_address is None) as guardian,
            MemoryWatch(run_id) as memory,
            Tracker.with_views(_views(args, settings), folder) as tracker,
        ):
            try:
                with _placed(args, startup, folder, guardian) as (plan, hosts):
                    with _explained(memory, folder):
                        run = start(args, plan, hosts, folder, tracker, startup)
                    yield from _used(run, memory, folder)
            except BaseException as error:  # after the end of a save in the background
                if told := how_to_resume(args, stopped=isinstance(error, KeyboardInterrupt | Terminated)):
                    error.add_note(told)
                raise
    except Exception:  # the console gets one message, from `run_or_exit`
        logger.error("the run failed", exc_info=True, extra=FILE_ONLY)
        raise
    finally:
        spans.close()
        folder.write_report()


@contextmanager
def _placed(
    args: Args, startup: StartUp, folder: RunFolder, guardian: OwnGuardian
) -> Iterator[tuple[PlacementPlan, GuardedHosts]]:
    """The block has a Ray cluster, and hosts that can hold the run; how long that took are phases of the start."""
    from slime.cluster.session import JoinedRay, RaySession, store_bytes_for

    if args.ray_address is None:
        plan = plan_here(args)
        num_gpus = plan.num_slots if args.device == "cuda" else 0
        session = RaySession(
            args.run_id, num_cpus=plan.num_slots + 2, num_gpus=num_gpus, store_bytes=store_bytes_for(args)
        )
        with _timed(startup, "ray", "Ray is up", session):
            yield plan, GuardedHosts(guardian)
        return
    with (
        _timed(startup, "ray", f"the run has joined {args.ray_address}", JoinedRay(args)),
        _timed(startup, "hosts", "the hosts are ready", hosts_of_run(args, folder, guardian)) as placed,
    ):
        yield placed


@contextmanager
def _timed(startup: StartUp, phase: str, line: str, block: AbstractContextManager[T]) -> Iterator[T]:
    """`block`, whose beginning is a phase of the start."""
    with ExitStack() as stack:
        with startup.phase(phase, line):
            entered = stack.enter_context(block)
        yield entered


def _used(run: Run, memory: MemoryWatch, folder: RunFolder) -> Iterator[Run]:
    """Gives the verbs to the loop, and ends the actors in order, whatever ends the loop."""
    try:
        with _explained(memory, folder), _blamed(run, folder):
            run.tell_addresses()
            yield run
    except BaseException as error:
        if isinstance(error, Exception):  # Ctrl-C ends a save, too
            _rescue(run)
        _end(run, limit_s=HASTY_END_S)
        raise
    _end(run, limit_s=ORDERLY_END_S)


@contextmanager
def _blamed(run: Run, folder: RunFolder) -> Iterator[None]:
    """An error that the end of a process made in another one is that end: who is dead ends the block.

    One that ended itself has left word of the reason.
    """
    try:
        yield
    except Exception as error:
        death = error if isinstance(error, ActorDied) else run.death(one_line(error))
        if death is not None and (said := last_words(folder.logs / LAST_WORDS)) is not None:
            raise LoopStalled(said) from death
        if death is not None and death is not error:
            raise death from error
        raise


@contextmanager
def _explained(memory: MemoryWatch, folder: RunFolder) -> Iterator[None]:
    """Notes to an error that ends the block, while the others still live: was it memory, and where its trace is."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ActorDied) or memory.was_killed_for_memory():
            error.add_note(memory.report())
        if isinstance(error, ActorFailed | ActorDied):
            error.add_note(f"the trace is in {folder.logs / DRIVER_LOG}")
        raise


def _views(args: Args, settings: dict[str, Any]) -> Views:
    """What the settings ask to see beside the record."""
    names = {field.name for field in dataclasses.fields(Views)} - {"settings"}
    return Views(**{name: getattr(args, name) for name in names}, settings=settings)


def _rescue(run: Run) -> None:
    """A checkpoint that was being written when training failed is the one that is wanted next. Never raises."""
    try:
        run.finish_save(limit_s=run.args.save_timeout_s)
    except Exception as error:  # with a dead rank there is nothing to save
        logger.warning("the checkpoint under way was not finished: %s", str(error).splitlines()[:1] or repr(error))


def _end(run: Run, *, limit_s: float) -> None:
    """Never raises: the error that ended the run, if any, is the one to tell."""
    try:
        run.close(limit_s=limit_s)
    except Exception as error:  # the cluster's end ends what did not stop by itself
        logger.warning("an actor did not stop cleanly: %s", str(error).splitlines()[0] if str(error) else repr(error))
        logger.info("in full", exc_info=True, extra=FILE_ONLY)
