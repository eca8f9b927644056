"""What stock upstreams need, one file each: on a machine without a GPU, and a few things of SGLang on every machine.

Nothing happens on import. Those few (`sglang_token_versions`, `sglang_stages` and others beside them) are hooks that
the stock engine is asked to call, in the ways that it has for them. The others are patches: each is a function that
says which symptom it cures, on which upstream version, when it can go, and that checks its own effect.
"""
