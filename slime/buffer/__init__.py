"""The Data Buffer: what to do next, what is half done, and an account of every prompt ever issued.

`data_buffer` is the buffer, `prompts` the endless walk over a dataset, `ledger` the account, `sources` the registry of
where prompts come from, and `data_source` the way in for those that serve samples themselves. Imports no torch: the
state is JSON.
"""
