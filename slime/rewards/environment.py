"""What a grader process is given of the environment: a short list of variables.

Graders read text that a model wrote, so a process that runs them holds no secret of the run. The keys of trackers, of
Ray and of model hubs stay behind. A user's own grader that needs one is given it by name: `SLIME_REWARD_ENV=A,B`.
"""

from __future__ import annotations

from collections.abc import Mapping

EXTRA = "SLIME_REWARD_ENV"
"""Names, separated by commas, of further variables for user graders."""
ALLOWED = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "LD_LIBRARY_PATH",
        "PYTHONHOME",
        "PYTHONHASHSEED",
        "PYTHONUTF8",
        "PYTHONDONTWRITEBYTECODE",
        "SLIME_RUN_ID",
        "CUDA_VISIBLE_DEVICES",
        "XDG_CACHE_HOME",
        "TRANSFORMERS_OFFLINE",
        "NLTK_DATA",
    ]
)
ALLOWED_PREFIXES = ("LC_", "OMP_", "MKL_", "HF_")
SECRET_ENDS = ("TOKEN", "KEY", "KEYS", "SECRET", "PASSWORD")
"""Of names of variables that are not handed on for their beginnings."""
NETWORK = frozenset(
    ["HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"]
)
"""For graders that may ask a server; proxies in either case. A proxy's address can hold a password."""
FEW_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # glibc sets 64 MiB of addresses aside for each arena, and makes up to eight for each core of the machine: with many
    # cores a limit of memory is used up by threads that hold nothing.
    "MALLOC_ARENA_MAX": "2",
}
"""Of libraries that take as much as the machine has."""


def grader_environment(full: Mapping[str, str], *, offline: bool) -> dict[str, str]:
    """The variables of `full` that a grader gets; `offline`: a built-in one that only computes."""

    def allowed(name: str) -> bool:
        if name in ALLOWED or (name.startswith(ALLOWED_PREFIXES) and not name.endswith(SECRET_ENDS)):
            return True
        return not offline and (name.upper() in NETWORK or name in extra)

    extra = {name.strip() for name in full.get(EXTRA, "").split(",")}
    kept = {name: value for name, value in full.items() if allowed(name)}
    return {**kept, **FEW_THREADS}
