"""The servers that agents connect to: a common core (`adapter.py`), and one file per wire format."""

from __future__ import annotations

from slime.agent.adapters.adapter import Adapter
from slime.agent.adapters.anthropic import Messages
from slime.agent.adapters.openai_chat import ChatCompletions
from slime.agent.adapters.openai_responses import Responses

__all__ = ["Adapter", "AgentAdapter", "AnthropicAdapter", "OpenAIAdapter"]


class OpenAIAdapter(Adapter):
    """Serves OpenAI's Chat Completions and Responses APIs."""

    wires = (ChatCompletions, Responses)


class AnthropicAdapter(Adapter):
    """Serves Anthropic's Messages API."""

    wires = (Messages,)


class AgentAdapter(Adapter):
    """Serves all supported APIs."""

    wires = (ChatCompletions, Responses, Messages)
