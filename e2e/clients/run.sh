#!/usr/bin/env bash
# Starts the demonstration on free ports and runs clients.py against it: run.sh KVLANE FOLDER
#
# FOLDER gets virtual environments with the versions of *.txt, made once for each version of these files; ENVOY, AIPERF
# and VLLM name programs. aiperf has an environment of its own, since its dependencies exclude others.
set -euo pipefail
own=$(cd "$(dirname "$0")" && pwd)
kvlane=$1
mkdir -p "$2"; folder=$(cd "$2" && pwd)

environment() { # NAME: exactly what NAME.txt names
  cmp -s "$own/$1.txt" "$folder/$1/installed.txt" && return
  echo "installing $1 into $folder/$1" >&2
  rm -rf "${folder:?}/$1"
  python3 -m venv "$folder/$1" && "$folder/uv/bin/uv" pip install -q --python "$folder/$1/bin/python" -r "$own/$1.txt" && cp "$own/$1.txt" "$folder/$1/installed.txt"
}
[[ -x $folder/uv/bin/uv ]] || { python3 -m venv "$folder/uv" && "$folder/uv/bin/pip" --disable-pip-version-check install -q uv==0.9.30; }
environment clients
if [[ $AIPERF == "$folder/aiperf/"* ]]; then environment aiperf || echo 'aiperf cannot be installed here' >&2; fi

work=$(mktemp -d)
stop() { kill "$demo" 2>/dev/null && wait "$demo"; rm -rf "$work"; }
trap stop EXIT
read -r ingress admin proxy < <(python3 -c 'import socket
s = [socket.socket() for _ in range(3)]
[x.bind(("127.0.0.1", 0)) for x in s]
print(*[x.getsockname()[1] for x in s])')
"$kvlane" demo --envoy "$ENVOY" --ingress "127.0.0.1:$ingress" --admin "127.0.0.1:$admin" --envoy-admin "127.0.0.1:$proxy" >"$work/demo.log" 2>&1 & demo=$!
"$kvlane" healthcheck --url "http://127.0.0.1:$admin/readyz" --wait 2m || { cat "$work/demo.log" >&2; exit 1; }
"$kvlane" healthcheck --url "http://127.0.0.1:$ingress/v1/models" --wait 2m >/dev/null || { cat "$work/demo.log" >&2; exit 1; }

# The tokenizer that the benchmarks count with, as files that they read.
mkdir "$work/qwen3"
cp "$own/../../internal/tokens/models/qwen3/tokenizer_config.json" "$work/qwen3"
gzip -dc "$own/../../internal/tokens/models/qwen3/tokenizer.json.gz" >"$work/qwen3/tokenizer.json"
echo '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}' >"$work/qwen3/config.json"
cd "$work"
"$folder/clients/bin/python" "$own/clients.py" "http://127.0.0.1:$ingress" "http://127.0.0.1:$admin" "http://127.0.0.1:$proxy" "$work/qwen3"
