# Sourced by the run.sh of a recipe: folder, python, seed, and the dtype that is fast on this machine.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if test -f "$root/pyproject.toml"; then cd "$root"; fi
PY=${PY:-.venv/bin/python}
SEED=${SEED:-1234}
# bfloat16 is fast only with native CPU support; emulated bfloat16 is about five times slower than float32.
if grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo || ls /dev/nvidia[0-9]* >/dev/null 2>&1; then DTYPE=--bf16; else DTYPE=--no-bf16; fi
