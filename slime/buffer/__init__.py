"""The Data Buffer: what to do next, what is half done, and an account of every prompt ever issued.

`data_buffer` is the buffer, `groups` what it holds, `prompts` the endless walk over a dataset, `account` the ledger,
`snapshot` its checkpoint. `sources` is the registry of where prompts come from; `data_source` is the buffer for sources
that serve samples themselves. Imports no torch.
"""
