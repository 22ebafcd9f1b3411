#!/usr/bin/env bash
# able.sh   ends with 0 if this machine lets the tests make what they need, else says what it lacks and ends with 1. Takes a
# second once it is compiled, and none of the tools.
set -euo pipefail
cd "$(dirname "$0")"
if ! said=$(KVLANE_K8S_TRY=1 go test -count=1 -run '^TestMachine$' . 2>&1); then
  printf 'the Kubernetes tests cannot run on this machine:\n%s\n' "$said" >&2
  exit 1
fi
