"""The environment of a grader process: a short list of variables.

Graders read text that a model wrote, so their processes get no secrets of the run, such as keys of trackers, Ray or
model hubs. A user's own grader gets additional variables by name: `SLIME_REWARD_ENV=A,B`.
"""

from __future__ import annotations

from collections.abc import Mapping

EXTRA = "SLIME_REWARD_ENV"
"""Variable with the names of additional variables for users' graders, separated by commas."""
_NAMES = """
PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH PYTHONHOME PYTHONHASHSEED
PYTHONUTF8 PYTHONDONTWRITEBYTECODE SLIME_RUN_ID CUDA_VISIBLE_DEVICES XDG_CACHE_HOME TRANSFORMERS_OFFLINE NLTK_DATA
"""
ALLOWED = frozenset(_NAMES.split())
ALLOWED_PREFIXES = ("LC_", "OMP_", "MKL_", "HF_")
SECRET_ENDS = ("TOKEN", "KEY", "KEYS", "SECRET", "PASSWORD")
"""Endings of names that are excluded in spite of `ALLOWED_PREFIXES`."""
NETWORK = frozenset(
    ["HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"]
)
"""Only graders with network access get these, because a proxy's address can contain a password. Case is ignored."""
FEW_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # glibc reserves 64 MiB of addresses per arena and makes up to eight arenas per core. On a machine with many cores,
    # the arenas of idle threads would use up the memory limit.
    "MALLOC_ARENA_MAX": "2",
}
"""Limits libraries that would otherwise use the whole machine."""


def grader_environment(full: Mapping[str, str], *, offline: bool) -> dict[str, str]:
    """Returns the variables of `full` that a grader process gets. `offline`: a process without the network."""

    def allowed(name: str) -> bool:
        if name in ALLOWED or (name.startswith(ALLOWED_PREFIXES) and not name.endswith(SECRET_ENDS)):
            return True
        return not offline and (name.upper() in NETWORK or name in extra)

    extra = {name.strip() for name in full.get(EXTRA, "").split(",")}
    kept = {name: value for name, value in full.items() if allowed(name)}
    return {**kept, **FEW_THREADS}
