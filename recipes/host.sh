# Sourced by the run.sh of a recipe: folder, python, seed, and the dtype that is fast on this machine.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if test -f "$root/pyproject.toml"; then cd "$root"; fi
PY=${PY:-.venv/bin/python}
SEED=${SEED:-1234}
# Emulated bfloat16 is about five times slower than float32, and not every CPU with native bfloat16 is faster with it.
if ls /dev/nvidia[0-9]* >/dev/null 2>&1; then DTYPE=--bf16
elif grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then DTYPE=$("$PY" -c 'from slime.cli.recipes import dtype_flag; print(dtype_flag())')
else DTYPE=--no-bf16; fi
# Runs a command. It also gets SIGTERM, Ctrl-C and SIGUSR1: bash alone would exit and leave it running.
run() {
  local code=0 child
  set -m  # without job control, bash would make the command ignore Ctrl-C
  "$@" </dev/null &
  child=$!
  set +m
  trap 'kill -TERM "$child" 2>/dev/null' TERM
  trap 'kill -INT "$child" 2>/dev/null' INT
  trap 'kill -USR1 "$child" 2>/dev/null' USR1
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do code=0; wait "$child" || code=$?; done  # a signal interrupts `wait`
  trap - TERM INT USR1
  return "$code"
}
