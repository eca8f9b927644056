"""Builds the components of a rollout from the settings: tokenizer, Data Buffer, evaluation datasets, and the clients
for engines, teacher and graders.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.buffer.data_buffer import DataBuffer
from slime.buffer.sources import SOURCES, SourceContext, image_column
from slime.core.hf_config import num_experts_of, read_hf_config, text_config
from slime.core.routed_experts import ExpertFormat
from slime.core.text import NO_KEYS, EngineKeys
from slime.core.topology import ServedModel
from slime.data.dataset import PromptDataset, load_held_out
from slime.data.first_rows import grader_of_held_out
from slime.models.common.config import is_sparse
from slime.observability.logs import TELL_DRIVER
from slime.rewards.pool import GraderPool
from slime.rollout.client.call import EndOfText
from slime.rollout.client.engine_client import EngineClient
from slime.rollout.client.teacher_client import TeacherClient
from slime.rollout.context import Models
from slime.rollout.evaluate import EvalDataset
from slime.rollout.types import OpenChats
from slime.rollout.user_functions import load
from slime.settings import Args
from slime.settings.conditions import requests_continue
from slime.settings.eval_config import eval_datasets
from slime.settings.topology_yaml import topology_of

logger = logging.getLogger(__name__)


def load_tokenizer(args: Args) -> Any:
    """Loads the HF tokenizer of `--hf-checkpoint`, with `--chat-template`; None without a checkpoint."""
    if not args.hf_checkpoint:
        return None
    tokenizer = tokenizer_of(args.hf_checkpoint)
    if args.chat_template is not None:
        tokenizer.chat_template = Path(args.chat_template).read_text()
    return tokenizer


def tokenizer_of(path: str, **given: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, **given)


def processor_of(path: str, **given: Any) -> Any:
    """Loads a checkpoint's processor for text and images. Returns None for a checkpoint without an image processor."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path, **given)
    return processor if hasattr(processor, "image_processor") else None


def load_data_source(args: Args, tokenizer: Any) -> DataBuffer:
    """Opens the Data Buffer on top of the source named by `--data-source`."""
    context = SourceContext(
        args=args, tokenizer=tokenizer, buffer_filter=load(args.buffer_filter_path, "buffer_filter")
    )
    return SOURCES.build(args.data_source, args).open(context)


def load_eval_datasets(args: Args, tokenizer: Any) -> tuple[EvalDataset, ...]:
    """Reads the datasets of `--eval-prompt-data` or `--eval-config`."""
    images = image_column(args)
    found = eval_datasets(args)
    read = ((one, load_held_out(args, one, tokenizer, images, grader_of_held_out(args, one))) for one in found)
    return tuple(EvalDataset(one, [dataset[i] for i in range(len(dataset))]) for one, dataset in read)


def tell_shared_rows(source: DataBuffer, datasets: Sequence[EvalDataset]) -> None:
    """Warns about evaluation prompts that are also in the training data."""
    if not isinstance(prompts := source.prompts, PromptDataset):
        return
    for one in datasets:
        if shared := prompts.num_shared(one.rows):
            text = "%d of the %d prompts of evaluation data %s are also in the training data, so its score partly "
            text += "measures memorisation; hold them out, for example with a slice (FILE@[100:])"
            logger.warning(text, shared, len(one.rows), one.config.name, extra=TELL_DRIVER)


def model_clients(args: Args, tokenizer: Any, *, keys: EngineKeys, open_chats: OpenChats | None = None) -> Models:
    """Creates a client for each served model, by name; engines are added later. `tokenizer`: the policy's tokenizer."""
    return Models({model.name: _client(args, model, tokenizer, keys, open_chats) for model in topology_of(args).models})


def _client(
    args: Args, model: ServedModel, tokenizer: Any, keys: EngineKeys, open_chats: OpenChats | None
) -> EngineClient:
    if model.trained or model.path == args.hf_checkpoint:
        client = engine_client(args, (), tokenizer, keys=keys, pairs=model.in_pairs, trained=model.trained)
        path, kwargs = args.hf_checkpoint, args.apply_chat_template_kwargs
    else:
        path, kwargs, tokenizer = model.path, {}, tokenizer_of(model.path)
        client = _frozen_client(args, model, tokenizer, keys)
    if open_chats is not None and tokenizer is not None:
        client.chats = open_chats(path, tokenizer, kwargs)
    return client


def _frozen_client(args: Args, model: ServedModel, tokenizer: Any, keys: EngineKeys) -> EngineClient:
    """Creates the client of a model with its own checkpoint, whose responses are never trained on."""
    path = model.path
    return EngineClient(
        request_timeout_s=args.request_timeout_s,
        engine_wait_s=args.engine_wait_s,
        max_concurrency=args.sglang_server_concurrency,
        max_kv_use=_max_kv_use(args),
        vocab_size=_vocab_size(path),
        keys=keys,
        end=end_of_text(path, tokenizer),
        pairs=model.in_pairs,
        trained=False,
    )


def engine_client(
    args: Args,
    urls: Sequence[str],
    tokenizer: Any,
    *,
    keys: EngineKeys = NO_KEYS,
    pairs: bool = False,
    trained: bool = True,
) -> EngineClient:
    """Creates a client for engines that serve the policy's checkpoint.

    `urls`: initial engines; more can be admitted later. `tokenizer`: the engines' tokenizer, if any. The other
    parameters are as in `EngineClient`.
    """
    return EngineClient(
        *urls,
        request_timeout_s=args.request_timeout_s,
        engine_wait_s=args.engine_wait_s,
        max_concurrency=args.sglang_server_concurrency,
        max_kv_use=_max_kv_use(args),
        vocab_size=_vocab_size(args.hf_checkpoint),
        keys=keys,
        token_versions=requests_continue(args),
        experts=_expert_format(args),
        end=end_of_text(args.hf_checkpoint, tokenizer),
        shared=bool(args.rollout_external_engine_addrs),
        pairs=pairs,
        trained=trained,
    )


def _max_kv_use(args: Args) -> float | None:
    """Returns `--rollout-concurrency-max-kv-use` if the number of requests follows the engines' load, else None."""
    return args.rollout_concurrency_max_kv_use if args.rollout_concurrency == "adaptive" else None


def end_of_text(hf_checkpoint: str, tokenizer: Any) -> EndOfText:
    """Returns the end conditions that SGLang derives from the checkpoint's config, generation config and tokenizer."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = Path(hf_checkpoint) / name
        known = json.loads(path.read_text()) if path.is_file() else {}
        for found in (known.get("eos_token_id"), known.get("text_config", {}).get("eos_token_id")):
            ids.update([found] if isinstance(found, int) else found or ())
    if tokenizer is None:
        return EndOfText(frozenset(ids))
    if isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)

    def decode(tokens: Sequence[int], skip_special: bool) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special))

    return EndOfText(frozenset(ids), decode)


def teacher_client(args: Args) -> TeacherClient | None:
    """Creates the client for `--opd-teacher-url`; None if it is not set."""
    if args.opd_teacher_url is None:
        return None
    return TeacherClient(
        args.opd_teacher_url,
        request_timeout_s=args.request_timeout_s,
        max_concurrency=args.sglang_server_concurrency,
        vocab_size=_vocab_size(args.hf_checkpoint),
        api_key=args.opd_teacher_api_key,
    )


def grader_pool(args: Args, prepare: Callable[[object], None] | None = None) -> GraderPool:
    """Creates the pool of grader processes. `prepare`: as in `GraderPool`. Raises `ConfigError` for unknown graders."""
    return GraderPool(
        num_workers=args.reward_num_workers,
        timeout_s=args.reward_timeout_s,
        memory_limit_bytes=args.reward_memory_limit_mb * 2**20 if args.reward_memory_limit_mb else None,
        rm_type=args.rm_type,
        eval_rm_types=[one.rm_type for one in eval_datasets(args) if one.rm_type is not None],
        custom_rm_path=args.custom_rm_path,
        args=args,
        ungradable_is_wrong=args.ungradable_answers == "wrong",
        prepare=prepare,
    )


def _expert_format(args: Args) -> ExpertFormat | None:
    """Returns the format of routed experts; None if engines do not return them."""
    if not args.sglang.get("enable_return_routed_experts"):
        return None
    config = read_hf_config(args.hf_checkpoint)
    sparse = tuple(is_sparse(config, layer) for layer in range(int(config["num_hidden_layers"])))
    return ExpertFormat(num_experts_of(config), int(config["num_experts_per_tok"]), sparse)


def _vocab_size(hf_checkpoint: str) -> int | None:
    """Reads the vocabulary size from the model's config; None if it is missing."""
    path = Path(hf_checkpoint) / "config.json"
    size = text_config(json.loads(path.read_text())).get("vocab_size") if path.is_file() else None
    return None if size is None else int(size)
