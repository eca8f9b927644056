"""Changes that stock SGLang and megatron-core need, one file each. Nothing happens on import.

On every machine SGLang calls hooks that its own plugin registry puts in place (`sglang_token_versions`, `sglang_stages`
and others); `slime.serving.launch` checks that each is. The rest are patches, mostly for machines without a GPU: each
is a function that reports its symptom, the upstream version and when it can be removed, and checks its own effect.
"""
