"""SGLang servers, routers and the engines' control plane. Only this package and `slime.compat` import SGLang.

Importing this package imports nothing heavy, because SGLang runs in the processes that `launch` starts.
"""
