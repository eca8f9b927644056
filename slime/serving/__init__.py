"""SGLang servers, routers and the engines' control plane. Only this package and `slime.compat` import SGLang.

Importing this package is cheap, because SGLang runs only in the processes started by `launch`.
"""
