"""The Data Buffer: what to do next, what is half done, and an account of every prompt ever issued.

`data_buffer` is the buffer, `prompts` the endless walk over a dataset, `ledger` the account, `data_source` the way in
for user-written sources. Imports no torch: the state is JSON.
"""
