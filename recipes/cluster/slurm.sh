#!/bin/bash
#SBATCH --job-name={{NAME}}
#SBATCH --nodes={{NODES}} --ntasks-per-node=1 --exclusive --cpus-per-task={{CPUS}} --mem=0{{GPU_OPTION}}
#SBATCH --time={{TIME}} --signal=B:USR1@{{WARN_S}}
#SBATCH --requeue --open-mode=append --output={{DIR}}/job_%j.log{{MORE_OPTIONS}}
#
# Starts Ray on each node, and the run on the first one. SIGUSR1 comes {{WARN_S}} s before the time limit: the run saves
# a checkpoint after its step and exits with 75, and the job requeues itself. Choose a time ("--signal" above) in which a
# step and a checkpoint fit. Submit with: sbatch {{DIR}}/job.sbatch
set -euo pipefail
{{ENVIRONMENT}}
cd {{SHARED}}
again=75
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
HEAD=$(hostname -I | awk '{print $1}')  # this script runs on the first node; others reach it at this address
FIRST=$SLURMD_NODENAME
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN HEAD FIRST SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export RAY_raylet_start_wait_time_s=240  # files of a shared environment are slow to read at first
echo "launch $((${SLURM_RESTART_COUNT:-0} + 1)) of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST"

# One Ray daemon on each node. The others wait until the first one listens.
srun bash -c '
  where="--head --port=6379 --node-ip-address=$HEAD"
  if [ "$SLURMD_NODENAME" != "$FIRST" ]; then
    where="--address=$HEAD:6379"
    until (: > "/dev/tcp/$HEAD/6379") 2>/dev/null; do sleep 1; done
  fi
  exec ray start --block $where --num-gpus={{GPUS}} --num-cpus="$SLURM_CPUS_PER_TASK" --disable-usage-stats' &
ray=$!

# The run waits until all nodes have joined. It gets the signals of this script.
bash {{DIR}}/train.sh --ray-address "$HEAD:6379" --cluster-wait-s 600 &
driver=$! timer=
near_the_limit() {
  kill -USR1 "$driver" 2>/dev/null || true
  sleep $(({{WARN_S}} > 90 ? {{WARN_S}} - 60 : {{WARN_S}} / 2)) &
  timer=$!
}
trap near_the_limit USR1
trap 'kill -TERM "$driver" 2>/dev/null || true' TERM
watched=$ray
while kill -0 "$driver" 2>/dev/null; do
  wait -n "$driver" $watched $timer || true  # a signal ends it, too
  if [ -n "$watched" ] && ! kill -0 "$ray" 2>/dev/null; then
    echo "Ray has ended on a node (see above): the run has two minutes to end as well"
    watched=
    (sleep 120; kill -KILL "$driver") &
  fi
  if [ -n "$timer" ] && ! kill -0 "$timer" 2>/dev/null && kill -0 "$driver" 2>/dev/null; then
    echo "the step takes longer than the job: the run will repeat the steps since its last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
    timer=
  fi
done
status=0
wait "$driver" || status=$?
trap - USR1 TERM
if [ -n "$timer" ]; then kill "$timer" 2>/dev/null || true; fi
kill "$ray" 2>/dev/null || true
wait "$ray" || true
if [ "$status" = "$again" ]; then
  echo "the run is not complete: requeueing job $SLURM_JOB_ID"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
