"""Data: datasets, chat templates and loss masks, packing, and the split of a batch into steps, ranks and micro-batches.

`micro_batch_schedule`, `packing`, `shared_prefixes` and `context_split` are pure. `dataset`, `chat` and `sft_loss_mask`
read files and call a tokenizer that the caller passes.
"""
