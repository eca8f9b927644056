"""`slime doctor --template DIR`: which things that agents do the chat template of a checkpoint appends."""

from __future__ import annotations

from pathlib import Path

from slime.core.errors import ConfigError, DataError


def report(folder: str) -> int:
    """Prints a line for each feature; returns 1 if not even plain turns are appended.

    Raises `ConfigError` for a folder without a tokenizer or a chat template.
    """
    from transformers import AutoTokenizer

    from slime.agent.parsers import FORMATS, format_of
    from slime.agent.probe import probe, tools_problem
    from slime.agent.template import ConversationTemplate
    from slime.data.chat import ChatRenderer
    from slime.rollout.clients import end_of_text

    if not Path(folder).is_dir():
        raise ConfigError(f"got --template {folder}, which is not a folder; give that of a Hugging Face checkpoint")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"got --template {folder}, whose tokenizer does not load: {error}") from error
    chat = ChatRenderer(tokenizer)
    ends = sorted(end_of_text(folder, tokenizer).token_ids)
    found = probe(chat, ends)
    for outcome in found.outcomes:
        mark = "ok" if outcome.works else "WARN"
        print(
            f"{mark:>4}  {outcome.feature:<30} {outcome.state.value}{': ' + outcome.detail if outcome.detail else ''}"
        )
    name = format_of(chat.template)
    print(f"      {'format of calls':<30} {name or 'not known'}")
    if name is not None:
        print(f"      {'ids of calls, such as':<30} {FORMATS.build(name, None).call_id('look_up', 0)}")
    print(f"      {'tokens that end a turn':<30} {', '.join(f'{chat.decode([i])!r} (id {i})' for i in ends)}")
    endings = ", ".join(f"{role} {token!r}" for role, token in found.endings)
    print(f"      {'the template ends one before':<30} {endings or 'nothing'}")
    try:
        found.require_plain_turns()
    except DataError as error:
        print(f"FAIL  {error}")
        return 1
    if problem := tools_problem(ConversationTemplate(chat, ends)):
        print(f"WARN  agents with tools are refused: {problem}")
    failing = ", ".join(found.failing)
    print(f"agents can talk to this model; a new branch, or a refusal, for: {failing or 'nothing'}")
    return 0
