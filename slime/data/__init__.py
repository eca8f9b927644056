"""Datasets, chat templates, loss masks, packing, and the schedule that splits a batch over steps and ranks.

`micro_batch_schedule`, `packing`, `shared_prefixes` and `context_split` are pure. `dataset`, `chat` and `sft_loss_mask`
read files and use the caller's tokenizer.
"""
