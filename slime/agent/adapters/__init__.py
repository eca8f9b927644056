"""Adapters: what agents talk to. One core (`server.py`, `turn.py`), and a file per wire format."""

from __future__ import annotations

from slime.agent.adapters.adapter import Adapter
from slime.agent.adapters.anthropic import Messages
from slime.agent.adapters.openai_chat import ChatCompletions
from slime.agent.adapters.openai_responses import Responses

__all__ = ["Adapter", "AgentAdapter", "AnthropicAdapter", "OpenAIAdapter"]


class OpenAIAdapter(Adapter):
    """For what speaks OpenAI's chat completions or responses."""

    wires = (ChatCompletions, Responses)


class AnthropicAdapter(Adapter):
    """For what speaks Anthropic's messages."""

    wires = (Messages,)


class AgentAdapter(Adapter):
    """For either."""

    wires = (ChatCompletions, Responses, Messages)
