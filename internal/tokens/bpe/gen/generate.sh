#!/bin/sh
# Makes tables.go anew: Unicode classes and normalization as the reference library
# has them, found by asking it. The library is pinned and lives in .tools.
set -eu
cd "$(dirname "$0")/.."
TOKENIZERS=0.23.2
tools=$(cd ../../.. && pwd)/.tools
venv=$tools/tokenizers-$TOKENIZERS
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import tokenizers' 2>/dev/null; then
	python3 -m venv "$venv"
	"$venv/bin/pip" install --quiet --disable-pip-version-check "tokenizers==$TOKENIZERS"
fi
probed=$(mktemp)
trap 'rm -f "$probed"' EXIT
"$venv/bin/python" gen/probe.py > "$probed"
go run ./gen "$probed" tables.go
