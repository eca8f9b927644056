"""`--custom-generate-function-path`: a coding agent repairs a repository. Its program needs no changes for training.

    first sandbox  ── the repository; the agent's program, which can reach only the adapter
    second sandbox ── the resulting files, and the calls of the hidden tests

Consumes: a row of `tasks.py`. Produces: the samples of one execution with their reward, and in
`metadata["coding"]` how the agent ended and, in `graded`, how the hidden tests did. Waits for: one of
`coding_max_sandboxes` sandboxes, then the agent, at most `coding_time_limit_s`. Ended by: cancellation, which also ends
the sandboxes.

Invariants
1. If an agent runs out of time, its files are graded as they are, and its samples are TRUNCATED.
2. A failure outside the agent (no sandbox, no program, no response at all) is FAILED and never a reward.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from slime.agent.execution import Execution, execution
from slime.agent.harness import ClaudeCodeHarness, CodexHarness, CommandHarness, Harness, HarnessResult, OpenCodeHarness
from slime.agent.sandbox import SANDBOXES, CommandFailed, Sandbox
from slime.core.errors import ConfigError, Unconfined
from slime.core.sample import Sample, Status

from . import grading
from .grading import SAID

SMALL_AGENT = "small_agent"
PROGRAMS: dict[str, Harness] = {h.name: h for h in (ClaudeCodeHarness(), CodexHarness(), OpenCodeHarness())}
NEEDS = {"memory_bytes": 8 << 30, "processes": 512}
"""Defaults for the sandbox of npm programs, whose runtimes reserve more addresses than they use."""
PATH = "/usr/local/bin:/usr/bin:/bin"
_PLACES: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def places(args: Any) -> asyncio.Semaphore:
    """Returns the semaphore that limits the sandboxes on this event loop."""
    return _PLACES.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(int(args.coding_max_sandboxes)))


def sandbox_of(args: Any, **more: Any) -> Sandbox:
    """Returns a sandbox of the run's kind, not yet started.

    The run's settings take precedence over `more`; what is `readable` adds up.
    """
    kind: Any = SANDBOXES.get(args.coding_sandbox)
    own = dict(args.coding_sandbox_settings)
    if readable := (*more.get("readable", ()), *map(Path, own.get("readable", ()))):
        own["readable"] = readable
    try:
        made: Sandbox = kind(**{**more, **own})
    except TypeError as error:
        raise ConfigError(f"coding_sandbox_settings do not fit the sandbox {args.coding_sandbox}: {error}") from error
    return made


def program_folder(args: Any, name: str) -> Path:
    """Returns the folder in which `prepare` installed an npm program."""
    folder = Path(args.coding_programs, name).absolute()
    if not folder.is_dir():
        raise ConfigError(f"harness {name} is not in {folder}; prepare the recipe with HARNESS={name}")
    return folder


async def work(args: Any, sample: Sample, agent: Execution) -> tuple[HarnessResult, dict[str, bytes]]:
    """Runs the agent; returns how the agent ended, and the resulting files."""
    name, issue = str(sample.metadata.get("harness", SMALL_AGENT)), _issue(sample)
    reach = urlsplit(agent.url)
    more: dict[str, Any] = {"reach": (reach.hostname, reach.port)}
    path = PATH
    if name != SMALL_AGENT:
        folder = program_folder(args, name)
        more = {**more, **NEEDS, "readable": (folder,)}
        path = f"{folder}/node_modules/.bin:{PATH}"
    async with sandbox_of(args, **more) as sandbox:
        repository, home = await grading.lay_out(sandbox, sample.metadata["files"]), f"{sandbox.folder}/home"
        program = f"{home}/{SMALL_AGENT}.py"
        await sandbox.write_file(program, Path(__file__).with_name(f"{SMALL_AGENT}.py").read_text())
        harness = PROGRAMS.get(name) or CommandHarness(words=("python3", program))
        ended = await harness.run(
            sandbox,
            issue,
            url=agent.url,
            key=agent.key,
            folder=repository,
            home=home,
            path=path,
            flags=[str(flag) for flag in getattr(args, "coding_program_flags", None) or ()],
            timeout_s=float(args.coding_time_limit_s),
        )
        return ended, await grading.files_of(sandbox, sample.metadata["files"])


def _issue(sample: Sample) -> str:
    prompt = sample.prompt
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def failed(sample: Sample, why: str) -> Sample:
    """Marks the execution as failed, so that it is retried."""
    sample.status, sample.failure = Status.FAILED, why
    return sample


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample | list[Sample]:
    """Runs one execution."""
    most = int(args.coding_max_context_tokens)
    async with places(args), execution(sampling_params, max_context_tokens=most) as agent:
        try:
            ended, files = await work(args, sample, agent)
            if agent.adapter.session(agent.key).aborted:
                return agent.samples(sample)
            async with sandbox_of(args) as fresh:
                reward, graded = await grading.grade(fresh, files, sample.metadata["hidden"])
        except (Unconfined, CommandFailed, OSError) as problem:
            return failed(sample, f"sandbox: {problem}")
        coding = {"graded": graded, "code": ended.code, "timed_out": ended.timed_out, "said": ended.output[-SAID:]}
        samples = agent.samples(sample, reward=reward, metadata={"coding": coding})
    if samples[0].status is Status.FAILED:
        return failed(sample, f"the agent got no answer (status {ended.code}): {ended.output[-300:]}")
    for one in samples:
        one.status = Status.TRUNCATED if ended.timed_out and one.status is Status.COMPLETED else one.status
    return samples
