"""Agents as environments: any program that speaks OpenAI or Anthropic HTTP talks to an adapter, the adapter talks token
ids to an engine, and what comes out is samples whose every trained id was sampled.

    messages.py     one form of a conversation, whatever wire format it came by
    template.py     a conversation to token ids: the first prompt, and what stands between two sampled turns
    probe.py        whether a model's chat template allows that, shown on conversations
    parsers/        what a model wrote, back into text, thinking and calls: one file per format
    branch.py       one line of tokens, to which things are only ever added
    session.py      an execution's conversations as a tree of branches, and the samples that come of it
    adapters/       what agents talk to: one core, a file per wire format
    running.py      the adapter of a run
    sandbox/        where an agent's commands run
    harness/        programs that are agents, pointed at an adapter
"""
