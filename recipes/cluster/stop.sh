#!/bin/bash
# Stops the job: the run ends after its step, with a checkpoint. submit.sh continues it.
exec ray job stop --address "{{ADDRESS}}" {{NAME}}
