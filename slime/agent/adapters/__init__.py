"""The servers that agents talk to: one core (`adapter.py`), and a file per wire format."""

from __future__ import annotations

from slime.agent.adapters.adapter import Adapter
from slime.agent.adapters.anthropic import Messages
from slime.agent.adapters.openai_chat import ChatCompletions
from slime.agent.adapters.openai_responses import Responses

__all__ = ["Adapter", "AgentAdapter", "AnthropicAdapter", "OpenAIAdapter"]


class OpenAIAdapter(Adapter):
    """Speaks OpenAI's chat completions and responses."""

    wires = (ChatCompletions, Responses)


class AnthropicAdapter(Adapter):
    """Speaks Anthropic's messages."""

    wires = (Messages,)


class AgentAdapter(Adapter):
    """Speaks all of them."""

    wires = (ChatCompletions, Responses, Messages)
