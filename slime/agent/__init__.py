"""Agents as environments. An agent that speaks OpenAI's or Anthropic's HTTP API connects to an adapter, the adapter
sends token ids to an engine, and the session becomes training samples in which every trained id was sampled.

    messages.py        conversations in a common form for all wire formats
    template.py        conversations as token ids: the first prompt, and the tokens between two sampled turns
    template_probe.py  checks with sample conversations whether a chat template supports token in, token out
    parsers/           split the model's text into thinking, text and tool calls: one file per format
    session.py         the conversations of an execution as a tree of branches, and the samples built from it
    adapters/          the servers that agents connect to: a common core, and one file per wire format
    execution.py       the adapter of a run
    chat.py            the same conversations without HTTP, for generate functions
    sandbox/           where an agent's commands run
    harness.py         agent programs, configured for an adapter
"""
