#!/bin/bash
# Submits the run as a job of a Ray cluster that is up. RAY_AUTH_MODE and RAY_AUTH_TOKEN are those of its `ray start`.
# Follow it with: ray job logs --address {{ADDRESS}} --follow {{NAME}}. Stop it with stop.sh, and continue it by calling
# this script again.
set -euo pipefail
ray job delete --address "{{ADDRESS}}" {{NAME}} >/dev/null 2>&1 || true  # the record of an earlier launch that has ended
# A stopped job has RAY_JOB_STOP_WAIT_TIME_S seconds for the rest of its step and a checkpoint.
exec ray job submit --address "{{ADDRESS}}" --submission-id {{NAME}} --no-wait \
  --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "{{WARN_S}}", "PYTHONPATH": "{{SHARED}}"}}' \
  -- bash {{DIR}}/train.sh --cluster-wait-s 600 "$@"
