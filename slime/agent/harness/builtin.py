"""The built-in harnesses: Claude Code, Codex, opencode, and any command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime.agent.harness import Harness, Place


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
