"""Agents of other frameworks, each run by the python of a virtual environment with the framework.

python framework_agents.py NAME URL KEY       # does a task with the tool `weather`, in three turns
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

QUESTION = "What is the weather in two cities?"


def weather(city: str) -> str:
    """Returns the weather of a city.

    Args:
        city: the name of the city
    """
    return f"18 C in {city}"


def smolagents_tools(url: str, key: str) -> str:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    # By default, smolagents demands a call, which an adapter refuses.
    model = OpenAIModel(model_id="any", api_base=f"{url}/v1", api_key=key, tool_choice="auto")
    agent = ToolCallingAgent(tools=[tool(weather)], model=model, max_steps=3)
    return str(agent.run(QUESTION))


def without_calls(step: Any, agent: Any = None) -> None:
    step.tool_calls = None


def smolagents_code(url: str, key: str) -> str:
    from smolagents import CodeAgent, OpenAIModel, tool

    model = OpenAIModel(model_id="any", api_base=f"{url}/v1", api_key=key)
    # By default, smolagents adds a summary of each call to what the model said, so that every turn is a new branch.
    agent = CodeAgent(tools=[tool(weather)], model=model, max_steps=3, step_callbacks=[without_calls])
    return str(agent.run(QUESTION))


def langgraph(url: str, key: str) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="any", base_url=f"{url}/v1", api_key=key, max_retries=0)
    agent = create_react_agent(model, [tool(weather)])
    return str(agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content)


def openai_agents(url: str, key: str, *, responses: bool = False, streams: bool = False) -> str:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    agent = Agent(
        name="a", instructions="be brief", tools=[function_tool(weather)], model=kind(model="any", openai_client=client)
    )

    async def run() -> str:
        if not streams:
            return str((await Runner.run(agent, QUESTION)).final_output)
        found = Runner.run_streamed(agent, QUESTION)
        async for _ in found.stream_events():
            pass
        return str(found.final_output)

    return asyncio.run(run())


AGENTS = {
    "smolagents_tools": smolagents_tools,
    "smolagents_code": smolagents_code,
    "langgraph": langgraph,
    "openai_agents_chat": openai_agents,
    "openai_agents_responses": lambda url, key: openai_agents(url, key, responses=True),
    "openai_agents_stream": lambda url, key: openai_agents(url, key, responses=True, streams=True),
}

if __name__ == "__main__":
    print("ENDED:", AGENTS[sys.argv[1]](*sys.argv[2:4]))
