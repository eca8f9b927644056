"""The Data Buffer: new prompts, unfinished groups, and an account of every prompt ever issued.

`data_buffer` is the buffer, `groups` its contents, `prompts` the endless walk over a dataset, `account` the ledger, and
`snapshot` its checkpoint. `sources` is the registry of data sources; `data_source` is the buffer for sources that serve
samples themselves. Imports no torch.
"""
