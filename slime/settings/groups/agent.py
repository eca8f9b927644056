"""Agents: what the adapter that they talk to lets them do, and where it listens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.core.errors import ConfigError
from slime.core.registry import load_object
from slime.settings.eval_config import eval_datasets
from slime.settings.fields import Need, opt
from slime.settings.group import Rule
from slime.settings.groups.hooks import DEFAULT_ROLLOUT, SFT_ROLLOUT
from slime.settings.ranges import COUNT, SECONDS

if TYPE_CHECKING:
    from slime.settings.args import Args

FORMATS = "slime.agent.parsers:FORMATS"
"""The registry of formats of calls, which stands above the settings."""


def _may_run_agents(s: Any) -> bool:
    """Only functions of users begin executions of agents."""
    if s.custom_generate_function_path or s.rollout_function_path not in (DEFAULT_ROLLOUT, SFT_ROLLOUT):
        return True
    try:
        return any(d.custom_generate_function_path for d in eval_datasets(s))
    except ConfigError:  # a rule tells it
        return True


_AGENTS = Need(_may_run_agents, "your own function that runs agents, --custom-generate-function-path")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """An agent talks to the adapter as to OpenAI or Anthropic: slime.agent.running.execution in your function."""

    agent_tool_format: str | None = opt(None, needs=_AGENTS)
    """How the model writes calls: a built-in format, or the import path of your own class; `text` leaves calls text.
    Default: the one whose marks the chat template has. Where it has those of none, agents with tools are refused."""
    agent_sampling: bool = opt(False, needs=_AGENTS)
    """Let agents choose temperature, top-p and top-k. Answers that were sampled otherwise than the run does are context
    then, not trained: log-probs are computed under the run's. Default: the run's hold, whatever an agent asks for."""
    agent_max_turns: int | None = opt(None, needs=_AGENTS, within=COUNT)
    """Most answers in one execution; further requests are refused, and the execution is truncated."""
    agent_time_limit_s: float | None = opt(None, needs=_AGENTS, within=SECONDS)
    """Longest execution, in seconds; after it requests end and are refused, and the execution is truncated."""
    agent_host: str = opt("127.0.0.1", needs=_AGENTS)
    """Address at which the adapter listens. Agents outside this host need another than the default, and a network where
    only they reach it: the key of a session is all that protects it, and it is not encrypted."""
    agent_port: int = opt(0, ge=0, le=65535, needs=_AGENTS)
    """Port of the adapter; 0: a free one."""
    agent_url: str | None = opt(None, needs=_AGENTS)
    """Address that agents are given, such as that of a tunnel or a container's gateway. Default: where it listens."""


def format_is_known(args: Args) -> str | None:
    """A misspelt format is found before any process starts."""
    try:
        if args.agent_tool_format:
            load_object(FORMATS).get(args.agent_tool_format)
    except ConfigError as error:
        return str(error)
    return None


def one_port_for_one_server(args: Args) -> str | None:
    """Each process that runs agents has a server of its own for them."""
    if not args.agent_port or args.rollout_num_workers < 2:
        return None
    return (
        f"got agent_port {args.agent_port} with rollout_num_workers {args.rollout_num_workers}, which would all listen "
        "there; leave agent_port out, or give --rollout-num-workers 1"
    )


RULES: tuple[Rule, ...] = (format_is_known, one_port_for_one_server)
