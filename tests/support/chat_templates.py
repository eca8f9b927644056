"""Chat templates of model families over tokenizers that know their tokens, for masks of fine-tuning.

A family has its own tokenizer where a package brings one (`chat_hooks`, mistral-common), else one of bytes to which its
control tokens are added. The template is the one that comes with the tokenizer, the one that TRL carries, or,
for GLM-4, Kimi K2, Mistral and Phi-4, the published form written down here: what it puts around each message.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slime.data.chat import ChatRenderer
from slime.data.sft_loss_mask import SftRow
from tests.support.chat_hooks import NUM_WORDS, short_tokenizer_folder

GLM4 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}{{ '<|observation|>' }}"
    "{% else %}{{ '<|' ~ m.role ~ '|>' }}{% endif %}{{ '\n' ~ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
GLM_Z1 = GLM4.replace("m.content }}", "m.content.split('</think>')[-1].strip() }}")
KIMI_K2 = (
    "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' ~ (tools | tojson(separators=(',', ':'))) }}"
    "{{ '<|im_end|>' }}{% endif %}{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>' }}{% endif %}"
    "{% set side = m.role if m.role in ('user', 'assistant') else 'system' %}"
    "{{ '<|im_' ~ side ~ '|>' ~ (m.get('name') or m.role) ~ '<|im_middle|>' }}"
    "{% if m.role == 'tool' %}{{ '## Return of ' ~ m.tool_call_id ~ '\n' }}{% endif %}{{ m.content or '' }}"
    "CALLS{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
KIMI_CALLS = (
    "{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for c in m.tool_calls %}"
    "{{ '<|tool_call_begin|>' ~ c.id ~ '<|tool_call_argument_begin|>' }}"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}"
)
DEEPSEEK_V31 = (
    "{% set ns = namespace(asked=false, answers=false) %}{{ bos_token }}"
    "{% for m in messages if m.role == 'system' %}{{ '\n\n' if not loop.first }}{{ m.content }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<\uff5cUser\uff5c>' ~ m.content }}"
    "{% set ns.asked = true %}{% set ns.answers = false %}"
    "{% elif m.role == 'tool' %}{{ '<\uff5ctool\u2581output\u2581begin\uff5c>' ~ m.content"
    " ~ '<\uff5ctool\u2581output\u2581end\uff5c>' }}"
    "{% set ns.asked = false %}{% set ns.answers = true %}"
    "{% elif m.role == 'assistant' %}{{ '<\uff5cAssistant\uff5c></think>' if ns.asked }}{% set ns.asked = false %}"
    "{% if m.tool_calls %}{{ m.content or '' }}{{ '<\uff5ctool\u2581calls\u2581begin\uff5c>' }}"
    "{% for c in m.tool_calls %}{{ '<\uff5ctool\u2581call\u2581begin\uff5c>' + c.function.name"
    " + '<\uff5ctool\u2581sep\uff5c>' + c.function.arguments + '<\uff5ctool\u2581call\u2581end\uff5c>' }}"
    "{% endfor %}{{ '<\uff5ctool\u2581calls\u2581end\uff5c>' }}"
    "{% else %}{{ m.content if ns.answers else m.content.split('</think>', 1)[-1] }}{% endif %}"
    "{% set ns.answers = false %}{{ '<\uff5cend\u2581of\u2581sentence\uff5c>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and ns.asked %}{{ '<\uff5cAssistant\uff5c>' }}"
    "{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
MINIMAX_M2 = (
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{{ ']~!b[]~b]system\n' ~ (messages[0].content if messages[0].role == 'system'"
    " else 'You are a helpful assistant.') }}"
    "{% if tools %}{{ '\n\n# Tools\n<tools>\n' }}{% for t in tools %}"
    "{{ '<tool>' ~ (t.function | tojson) ~ '</tool>\n' }}{% endfor %}{{ '</tools>' }}{% endif %}{{ '[e~[\n' }}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ ']~b]user\n' ~ m.content ~ '[e~[\n' }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ ']~b]tool' }}{% endif %}"
    "{{ '\n<response>' ~ m.content ~ '</response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '[e~[\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{{ ']~b]ai\n' }}{% set thought, said = m.reasoning_content, m.content %}"
    "{% if not thought and '</think>' in said %}"
    "{% set thought, said = said.split('</think>')[0].split('<think>')[-1].strip('\n'),"
    " said.split('</think>')[-1].strip('\n') %}{% endif %}"
    "{% if thought and loop.index0 > ns.asked %}{{ '<think>\n' ~ thought ~ '\n</think>\n\n' }}{% endif %}{{ said }}"
    "{% if m.tool_calls %}{{ '\n<minimax:tool_call>\n' }}{% for c in m.tool_calls %}"
    "{{ '<invoke name=\"' ~ c.function.name ~ '\">\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<parameter name=\"' ~ k ~ '\">' ~ (v if v is string else v | tojson) ~ '</parameter>\n' }}{% endfor %}"
    "{{ '</invoke>\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}{{ '[e~[\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}"
)
GLM47 = (
    "{% set ns = namespace(asked=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "[gMASK]<sop>{% if tools %}{{ '<|system|>\n# Tools\n<tools>\n' }}"
    "{% for t in tools %}{{ (t | tojson) ~ '\n' }}{% endfor %}{{ '</tools>' }}{% endif %}{% for m in messages %}"
    "{% if m.role in ('system', 'user') %}{{ '<|' ~ m.role ~ '|>' ~ m.content }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '<tool_response>' ~ m.content ~ '</tool_response>' }}"
    "{% elif m.role == 'assistant' %}{% set thought, said = m.reasoning_content, m.content %}"
    "{% if not thought and '</think>' in said %}"
    "{% set thought, said = said.split('</think>')[0].split('<think>')[-1], said.split('</think>')[-1] %}{% endif %}"
    "{{ '<|assistant|>' ~ ('<think>' ~ thought.strip() if thought and loop.index0 > ns.asked else '') ~ '</think>' }}"
    "{{ said.strip() }}{% for c in m.tool_calls or () %}{{ '<tool_call>' ~ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<arg_key>' ~ k ~ '</arg_key><arg_value>'"
    " ~ (v if v is string else v | tojson) ~ '</arg_value>' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' ~ m.content ~ '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' ~ ({'content': m.content} | tojson) ~ '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}{{ '' if loop.last else ', ' }}"
    "{% endfor %}{{ ']' ~ eos_token }}{% else %}{{ m.content ~ eos_token }}{% endif %}{% endfor %}"
)
PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '<|im_sep|>' ~ m.content ~ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
GLM4_TOOLS = GLM4.replace(
    "[gMASK]<sop>",
    "[gMASK]<sop>{% if tools %}{{ '<|system|>\n# \u53ef\u7528\u5de5\u5177' ~ (tools | tojson) }}{% endif %}",
)
DSML = "\uff5cDSML\uff5c"
DEEPSEEK_V32 = (
    "{% set ns = namespace(user=-1, calls=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.user = loop.index0 %}{% endif %}{% endfor %}{{ bos_token }}"
    "{% if tools and messages[0].role != 'system' %}{{ '\n\n' ~ (tools | tojson) }}{% endif %}{% for m in messages %}"
    "{% set mark = '<think>' if thinking and loop.index0 >= ns.user else '</think>' %}"
    "{% if m.role == 'system' %}{{ m.content }}{% if tools and loop.first %}{{ '\n\n' ~ (tools | tojson) }}{% endif %}"
    "{% elif m.role == 'user' %}{{ '<\uff5cUser\uff5c>' ~ m.content ~ '<\uff5cAssistant\uff5c>' ~ mark }}"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role == 'assistant' %}{{ '\n\n<function_results>' }}"
    "{% set ns.calls = loop.previtem.tool_calls | length %}{% endif %}{{ '\n<result>' ~ m.content ~ '</result>' }}"
    "{% set ns.calls = ns.calls - 1 %}{% if not ns.calls %}{{ '\n</function_results>\n\n' ~ mark }}{% endif %}"
    "{% else %}{% if thinking and loop.index0 > ns.user %}{{ (m.reasoning_content or '') ~ '</think>' }}{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}{{ '\n\n<DSMLfunction_calls>\n' }}{% for c in m.tool_calls %}"
    "{{ '<DSMLinvoke name=\"' ~ c.function.name ~ '\">\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<DSMLparameter name=\"' ~ k ~ '\" string=\"' ~ ('true' if v is string else 'false') ~ '\">' }}"
    "{{ (v if v is string else v | tojson) ~ '</DSMLparameter>' ~ ('' if loop.last else '\n') }}{% endfor %}"
    "{{ '\n</DSMLinvoke>\n' }}{% endfor %}{{ '</DSMLfunction_calls>' }}{% endif %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
).replace("DSML", DSML)
"""As `encode_messages` of the family, which has no template, with other words about tools; `thinking` is its mode."""
GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
KIMI_TOKENS = (
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "[EOS]"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
)


@dataclass(frozen=True, slots=True)
class Published:
    """One template and what its checkpoint says of its tokens."""

    template: str
    """Name of the tokenizer's own package, `trl:NAME`, or the text."""
    ends: tuple[str, ...]
    """Tokens of `eos_token_id` in generation_config.json."""
    tokenizer: str = "bytes"
    """Name of a package, or bytes with `tokens`."""
    tokens: tuple[str, ...] = ()
    """Control tokens."""
    words: tuple[str, ...] = ()
    """Added tokens that are not control tokens, of whatever tokenizer."""
    swallowing: tuple[str, ...] = ()
    """Control tokens that take the white space behind them along."""


GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
GEMMA_ENDS = ("<eos>", "<end_of_turn>")
LLAMA_ENDS = ("<|end_of_text|>", "<|eot_id|>")
HARMONY_TOKENS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)
PHI_ENDS = ("<|endoftext|>", "<|assistant|>", "<|end|>")
PHI_TOKENS = ("<|system|>", "<|endoftext|>")
MINIMAX_TOKENS = ("]~!b[", "]~b]", "[e~[")
PUBLISHED = {
    "qwen2.5": Published("own", ("<|im_end|>", "<|endoftext|>"), "qwen2.5"),
    "qwen3": Published("own", ("<|im_end|>", "<|endoftext|>"), "qwen3"),
    "qwen3-2507": Published("trl:qwen3_instruct_2507", ("<|im_end|>", "<|endoftext|>"), "qwen3"),
    "qwen3-vl": Published("trl:qwen3_vl", ("<|im_end|>", "<|endoftext|>"), "qwen3"),
    "qwen3.5": Published("trl:qwen3_5_think", ("<|im_end|>", "<|endoftext|>"), "qwen3"),
    "smollm2": Published("own", ("<|im_end|>",), "smollm2"),
    "deepseek-v3": Published("own", (DEEPSEEK_END,), "deepseek-v3"),
    "deepseek-v3.1": Published(DEEPSEEK_V31, (DEEPSEEK_END,), "deepseek-v3"),
    "deepseek-r1": Published("trl:deepseekv3", (DEEPSEEK_END,), "deepseek-v3"),
    "gemma3": Published("trl:gemma3", GEMMA_ENDS, tokens=("<start_of_turn>", "<end_of_turn>", "<start_of_image>")),
    "gemma3 of its package": Published("own", GEMMA_ENDS, "gemma3"),
    "llama3": Published("trl:llama3", LLAMA_ENDS, "llama3"),
    "llama3 of its package": Published("own", LLAMA_ENDS, "llama3"),
    "llama3.1": Published("trl:llama3_1", LLAMA_ENDS, "llama3.1"),
    "llama3.1 of its package": Published("own", LLAMA_ENDS, "llama3.1"),
    "mistral": Published(MISTRAL, ("</s>",), "mistral"),
    "glm4": Published(GLM4, GLM_ENDS, tokens=GLM_TOKENS),
    "glm-z1": Published(GLM_Z1, GLM_ENDS, tokens=GLM_TOKENS, words=("<think>", "</think>")),
    "glm4.6": Published("trl:glm4moe", GLM_ENDS, tokens=GLM_TOKENS, words=("<think>", "</think>")),
    "glm4.6 without words": Published("trl:glm4moe", GLM_ENDS, tokens=GLM_TOKENS),
    "glm4.7": Published(GLM47, GLM_ENDS, tokens=GLM_TOKENS, words=("<think>", "</think>")),
    "minimax-m2": Published(MINIMAX_M2, ("[e~[",), tokens=MINIMAX_TOKENS, words=("<think>", "</think>")),
    "kimi-k2 before calls": Published(KIMI_K2.replace("CALLS", ""), ("<|im_end|>",), tokens=KIMI_TOKENS),
    "kimi-k2": Published(KIMI_K2.replace("CALLS", KIMI_CALLS), ("<|im_end|>",), tokens=KIMI_TOKENS),
    "gpt-oss": Published("trl:gptoss", ("<|return|>", "<|call|>"), tokens=HARMONY_TOKENS),
    "gpt-oss of its package": Published("trl:gptoss", ("<|return|>", "<|endoftext|>", "<|call|>"), "gpt-oss"),
    "qwen3-next": Published("trl:qwen3_instruct_2507", ("<|im_end|>", "<|endoftext|>"), "qwen3"),
    "glm4 with tools": Published(GLM4_TOOLS, GLM_ENDS, tokens=GLM_TOKENS),
    "deepseek-v3.2": Published(DEEPSEEK_V32, (DEEPSEEK_END,), "deepseek-v3", words=("<think>", "</think>")),
    "phi3": Published("trl:phi3", PHI_ENDS, tokens=PHI_TOKENS, swallowing=("<|end|>",)),
    "phi3.5": Published("trl:phi3_5", PHI_ENDS, tokens=PHI_TOKENS, swallowing=("<|end|>",)),
    "phi4": Published(PHI4, ("<|im_end|>",), tokens=("<|im_start|>", "<|im_sep|>", "<|im_end|>")),
}


@functools.cache
def published_tokenizer(name: str) -> Any:
    """A tokenizer with the template of a family. Skips the test if it cannot be had."""
    from transformers import AddedToken

    known = PUBLISHED[name]
    tokenizer = copy.deepcopy(loaded_tokenizer(known.tokenizer))
    if known.tokenizer == "bytes":
        tokens = [*known.tokens, *(end for end in known.ends if end not in (*known.tokens, *known.swallowing))]
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
        tokenizer.add_tokens([AddedToken(t, special=True, normalized=False, rstrip=True) for t in known.swallowing])
        tokenizer.eos_token = known.ends[0]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in known.words])
    if known.template.startswith("trl:"):
        trl = importlib.util.find_spec("trl")
        assert trl is not None and trl.origin is not None, "the development dependencies bring trl"
        file = Path(trl.origin).parent / "chat_templates" / f"{known.template.removeprefix('trl:')}.jinja"
        tokenizer.chat_template = file.read_text(encoding="utf-8")
    elif known.template != "own":
        tokenizer.chat_template = known.template
    return tokenizer


def published_chat(name: str, **kwargs: Any) -> ChatRenderer:
    """The renderer that fine-tuning would make of the family's checkpoint."""
    tokenizer = published_tokenizer(name)
    return ChatRenderer(tokenizer, kwargs=kwargs, end_ids=ids_of(tokenizer, PUBLISHED[name].ends))


def ids_of(tokenizer: Any, tokens: Sequence[str]) -> list[int]:
    """Ids of tokens that the tokenizer must know."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    assert None not in ids and tokenizer.unk_token_id not in ids, (tokens, ids)
    return ids


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="slime-tests-")


@functools.cache
def tekken_file() -> Path:
    """Mistral's tokenizer as its own package brings it, with its first words alone."""
    package = importlib.util.find_spec("mistral_common")
    if package is None or package.origin is None:
        pytest.skip("mistral-common, which comes with SGLang, holds Mistral's tokenizer")
    whole = json.loads((Path(package.origin).parent / "data" / "tekken_240718.json").read_text())
    num_special = whole["config"]["default_num_special_tokens"]
    size = {"num_vocab_tokens": NUM_WORDS, "default_vocab_size": NUM_WORDS + num_special}
    file = Path(_folder().name) / "tekken_240718.json"
    file.write_text(json.dumps({"config": whole["config"] | size, "vocab": whole["vocab"][:NUM_WORDS]}))
    return file


def with_template(family: str, template: str | None = None) -> Any:
    """A family's own tokenizer, with `template` if given. A copy: loading one takes time."""
    tokenizer = copy.copy(loaded_tokenizer(family))
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


@functools.cache
def loaded_tokenizer(package: str) -> Any:
    """Shared by all tests: copy it before changing it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.integrations.mistral import convert_tekken_tokenizer

    if package == "mistral":
        return convert_tekken_tokenizer(str(tekken_file()))
    if package != "bytes":
        return AutoTokenizer.from_pretrained(short_tokenizer_folder(package))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain)


def runs(row: SftRow) -> list[tuple[list[int], list[int]]]:
    """The runs of trained ids of all samples of a row: what stands before each, and its own."""
    found = []
    for sample in row.samples:
        first = len(sample.tokens) - sample.response_length
        edges = [i for i, (a, b) in enumerate(itertools.pairwise((0, *sample.loss_mask, 0))) if a != b]
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            ids = list(sample.tokens[: first + stop])
            found.append((ids[: first + start], ids[first + start :]))
    return found


def spans(tokenizer: Any, row: SftRow) -> list[str]:
    """The texts of the runs of trained tokens."""
    return [tokenizer.decode(ids) for _, ids in runs(row)]
