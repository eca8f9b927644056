"""Data: datasets, chat templates and loss masks, packing, and the split of a batch into steps, ranks and micro-batches.

`schedule` and `packing` are pure; `dataset`, `chat` and `sft` read files and call a tokenizer passed in by the caller.
"""
