"""What of a model is trained: its adapters, or the parameters that the settings leave."""

from __future__ import annotations

from collections.abc import Sequence

from slime.models.common.table import FamilyTable
from slime.settings import Args
from slime.training.model.frozen import freeze_others, trained_names
from slime.training.model.lora import Adapters
from slime.training.model.policy import PolicyModel
from slime.training.state.sharded_model import ShardedModel


def choose_trained(chunks: Sequence[PolicyModel], table: FamilyTable, args: Args) -> ShardedModel:
    """Adds adapters, finds out which rank holds what, and freezes the rest. Collective."""
    if args.lora_rank:
        adapters = Adapters(chunks, table, args)
        model = ShardedModel.of(chunks, adapters.table, adapters.names, adapters.scale)
    else:
        lists = args.only_train_params_name_list, args.freeze_params_name_list
        model = ShardedModel.of(chunks, table, trained_names(table, *lists))
    freeze_others(chunks, model)
    return model
