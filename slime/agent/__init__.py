"""Agents as environments: any program that speaks OpenAI or Anthropic HTTP talks to an adapter, the adapter talks token
ids to an engine, and what comes out is samples whose every trained id was sampled.

    messages.py     one form of a conversation, whatever wire format it came by
    template.py     a conversation to token ids: the first prompt, and what stands between two sampled turns
    probe.py        whether the chat template of a model allows that, shown on conversations
    parsers/        what a model wrote, back into text, thinking and calls: one file per format
"""
