"""The Data Buffer: issues new prompts, holds unfinished groups, and accounts for every group ever issued.

`data_buffer` is the buffer itself, `groups` its contents, `prompts` the iteration over a dataset, `account` the ledger,
and `snapshot` the checkpoint. `sources` is the registry of data sources, and `data_source` the buffer for sources that
produce samples themselves. Does not import torch.
"""
