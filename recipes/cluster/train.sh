#!/bin/bash
# The run. The same command starts it and, after a requeue, continues it from its newest checkpoint. Arguments of this
# script come first: the job passes what belongs to its Ray cluster. Paths are those that all hosts see.
exec slime train "$@" {{FLAGS}}
