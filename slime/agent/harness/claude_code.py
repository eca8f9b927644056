"""Claude Code, by npm's `@anthropic-ai/claude-code`. It speaks Anthropic's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime.agent.harness import Harness, Place


class ClaudeCodeHarness(Harness):
    """Without questions, telemetry or updates; with the tools that it has."""

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
            "IS_SANDBOX": "1",  # it refuses to skip questions as root elsewhere
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
