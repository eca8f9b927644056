"""Harnesses: agent programs that run in a sandbox and connect to an adapter.

    result = await ClaudeCodeHarness().run(sandbox, "Fix the bug.", url=adapter_url, key=key, folder="/work")

A harness defines the package to install, the files and environment variables that restrict the program to the adapter,
and the command line for a prompt. Harnesses have no access to sessions or samples. There are harnesses for Claude
Code, Codex, opencode, and any other command line.
"""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from slime.core.errors import SlimeError

__all__ = [
    "MODEL",
    "ClaudeCodeHarness",
    "CodexHarness",
    "CommandHarness",
    "Harness",
    "HarnessFailed",
    "HarnessResult",
    "OpenCodeHarness",
    "Place",
    "Shell",
]

MODEL = "slime"
"""The model name that programs send in their requests."""


class Shell(Protocol):
    """The methods of a sandbox that a harness uses."""

    async def exec(self, command: str, *, env: Mapping[str, str] | None = None, timeout_s: float = ...) -> Any: ...

    async def write_file(self, path: str, content: str | bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a program runs, and which adapter, session and model it uses."""

    url: str
    """The adapter's URL as seen from the sandbox, without a path."""
    key: str
    """The session's API key."""
    home: str
    """Home directory for the program's settings."""
    folder: str
    """The working directory."""
    model: str = MODEL


@dataclass(frozen=True, slots=True)
class HarnessResult:
    code: int
    output: str
    timed_out: bool


class HarnessFailed(SlimeError):
    """A program could not be installed or started."""


class Harness(ABC):
    name: ClassVar[str]
    package: ClassVar[str | None] = None
    """npm package and version; None if there is nothing to install."""

    @abstractmethod
    def command(self, prompt: str, place: Place) -> Sequence[str]:
        """Returns the command that runs the program on `prompt` without asking for confirmation, and then exits."""

    def files(self, place: Place) -> Mapping[str, str]:
        """Returns the program's settings files: absolute path -> content."""
        return {}

    def environment(self, place: Place) -> Mapping[str, str]:
        """Returns the program's environment variables, except HOME."""
        return {}

    async def install(self, sandbox: Shell, *, prefix: str = "/opt/agents", limit_s: float = 600.0) -> None:
        """Installs the program in a sandbox that has access to npm. Raises `HarnessFailed`."""
        if self.package is None:
            return
        done = await sandbox.exec(f"npm install --prefix {prefix} {self.package}", timeout_s=limit_s)
        if done.code:
            raise HarnessFailed(f"npm install {self.package} exited with {done.code}: {done.stderr[-500:]}")

    async def install_cli(self, sandbox: Shell, **given: Any) -> None:
        """The public slime's name for `install`."""
        await self.install(sandbox, **given)

    async def write_config(
        self, sandbox: Shell, *, url: str, key: str, folder: str = "/work", home: str = "/root", model: str = MODEL
    ) -> None:
        """Writes the program's settings files."""
        for file, text in self.files(Place(url, key, home, folder, model)).items():
            await sandbox.write_file(file, text)

    async def run(
        self,
        sandbox: Shell,
        prompt: str,
        *,
        url: str,
        key: str,
        folder: str,
        home: str = "/root",
        model: str = MODEL,
        path: str | None = None,
        flags: Sequence[str] = (),
        timeout_s: float = 1800.0,
    ) -> HarnessResult:
        """Writes the settings files, and runs the program on a prompt until it exits, for at most `timeout_s`.

        `path`: replaces the sandbox's PATH. `flags`: extra arguments at the end of the command line.
        """
        await self.write_config(sandbox, url=url, key=key, folder=folder, home=home, model=model)
        place = Place(url, key, home, folder, model)
        env = {"HOME": home, "TERM": "dumb", **self.environment(place)}
        if path is not None:
            env["PATH"] = path
        command = f"cd {shlex.quote(folder)} && {shlex.join([*self.command(prompt, place), *flags])} </dev/null"
        done = await sandbox.exec(command, env=env, timeout_s=timeout_s)
        return HarnessResult(done.code, done.stdout + done.stderr, done.timed_out)


class ClaudeCodeHarness(Harness):
    """Claude Code from npm, using Anthropic's Messages API. Confirmations, telemetry and updates are disabled."""

    name = "claude_code"
    package = "@anthropic-ai/claude-code@2.1.330"

    def command(self, prompt: str, place: Place) -> Sequence[str]:
        flags = ("--model", place.model, "--dangerously-skip-permissions", "--output-format", "json")
        return ("claude", "-p", prompt, *flags)

    def environment(self, place: Place) -> Mapping[str, str]:
        return {
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_AUTH_TOKEN": place.key,
            "ANTHROPIC_SMALL_FAST_MODEL": place.model,
            "IS_SANDBOX": "1",  # otherwise Claude Code refuses to skip confirmations as root
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
        }


KEY = "SLIME_SESSION_KEY"


class CodexHarness(Harness):
    """Codex from npm, using OpenAI's Responses API. Its approvals and sandbox are off; slime has its own sandbox."""

    name = "codex"
    package = "@openai/codex@0.169.0"

    def command(self, prompt: str, place: Place) -> Sequence[str]:
        return ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt)

    def files(self, place: Place) -> Mapping[str, str]:
        lines = [
            f'model = "{place.model}"',
            'model_provider = "slime"',
            "[model_providers.slime]",
            'name = "slime"',
            f'base_url = "{place.url}/v1"',
            f'env_key = "{KEY}"',
            'wire_api = "responses"',
        ]
        return {f"{place.home}/.codex/config.toml": "\n".join(lines) + "\n"}

    def environment(self, place: Place) -> Mapping[str, str]:
        return {KEY: place.key}


class OpenCodeHarness(Harness):
    """opencode from npm, using OpenAI's Chat Completions API. Sharing and updates are disabled."""

    name = "opencode"
    package = "opencode-ai@1.18.33"

    def command(self, prompt: str, place: Place) -> Sequence[str]:
        return ("opencode", "run", "--model", f"slime/{place.model}", prompt)

    def files(self, place: Place) -> Mapping[str, str]:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "slime",
            "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
            "models": {place.model: {"name": place.model}},
        }
        model = f"slime/{place.model}"
        settings = {"provider": {"slime": provider}, "model": model, "small_model": model}
        return {
            f"{place.home}/.config/opencode/opencode.json": json.dumps(
                {**settings, "autoupdate": False, "share": "disabled"}
            )
        }


@dataclass(frozen=True)
class CommandHarness(Harness):
    """Any command line that reads a base URL and a key from the environment, as the SDKs do.

    `words`: the command and its arguments. The prompt replaces `{prompt}` in an argument, or is appended at the end.
    """

    name = "command"
    words: tuple[str, ...] = ()

    def command(self, prompt: str, place: Place) -> Sequence[str]:
        if any("{prompt}" in word for word in self.words):
            return tuple(word.replace("{prompt}", prompt) for word in self.words)
        return (*self.words, prompt)

    def environment(self, place: Place) -> Mapping[str, str]:
        return {
            "OPENAI_BASE_URL": f"{place.url}/v1",
            "OPENAI_API_KEY": place.key,
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_API_KEY": place.key,
            "SLIME_MODEL": place.model,
        }
