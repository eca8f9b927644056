"""Environment variables of grader processes: a short allowlist.

Graders process text that a model wrote, so they get no secrets of the run, such as keys of trackers, Ray or model hubs.
Users can pass more variables to their own graders by name: `SLIME_REWARD_ENV=A,B`.
"""

from __future__ import annotations

from collections.abc import Mapping

EXTRA = "SLIME_REWARD_ENV"
"""Lists additional variables for users' graders, separated by commas."""
_NAMES = """
PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH PYTHONHOME PYTHONHASHSEED
PYTHONUTF8 PYTHONDONTWRITEBYTECODE SLIME_RUN_ID CUDA_VISIBLE_DEVICES XDG_CACHE_HOME TRANSFORMERS_OFFLINE NLTK_DATA
"""
ALLOWED = frozenset(_NAMES.split())
ALLOWED_PREFIXES = ("LC_", "OMP_", "MKL_", "HF_")
SECRET_ENDS = ("TOKEN", "KEY", "KEYS", "SECRET", "PASSWORD")
"""Variables with these suffixes are excluded even if they match `ALLOWED_PREFIXES`."""
NETWORK = frozenset(
    ["HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"]
)
"""Passed only to graders with network access, because a proxy URL can contain a password. Case-insensitive."""
FEW_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # glibc reserves 64 MiB of address space per arena, with up to eight arenas per core. On a machine with many cores,
    # the arenas of idle threads would exhaust the memory limit.
    "MALLOC_ARENA_MAX": "2",
}
"""Limits on libraries that would otherwise use all cores."""


def grader_environment(full: Mapping[str, str], *, offline: bool) -> dict[str, str]:
    """Selects the variables of `full` for a grader process. `offline`: the process has no network access."""

    def allowed(name: str) -> bool:
        if name in ALLOWED or (name.startswith(ALLOWED_PREFIXES) and not name.endswith(SECRET_ENDS)):
            return True
        return not offline and (name.upper() in NETWORK or name in extra)

    extra = {name.strip() for name in full.get(EXTRA, "").split(",")}
    kept = {name: value for name, value in full.items() if allowed(name)}
    return {**kept, **FEW_THREADS}
