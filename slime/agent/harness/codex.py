"""Codex, by npm's `@openai/codex`. It speaks OpenAI's responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime.agent.harness import Harness, Place

KEY = "SLIME_SESSION_KEY"


class CodexHarness(Harness):
    """Without approvals; its own sandbox is off, for it runs in one."""

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
