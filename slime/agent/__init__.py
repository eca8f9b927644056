"""Agents as environments: a program that speaks OpenAI or Anthropic HTTP talks to an adapter, the adapter sends token
ids to an engine, and the result is samples whose every trained id was sampled.

    messages.py     one form of a conversation for all wire formats
    template.py     a conversation as token ids: the first prompt, and what comes between two sampled turns
    probe.py        whether a model's chat template allows that, tested on conversations
    parsers/        a model's text as text, thinking and calls: one file per format
    session.py      an execution's conversations as a tree of branches, and the samples made from it
    adapters/       the servers that agents talk to: one core, a file per wire format
    running.py      the adapter of a run
    sandbox/        where an agent's commands run
    harness/        agent programs, configured for an adapter
"""
