#!/bin/bash
# Records what stock vLLM makes of generated chats for models whose prompts it encodes in code, and what it and stock SGLang make
# of bodies of their APIs: encoders.sh ENGINES MODELS COUNT OUT, with ENGINES the folder of install.sh, MODELS that of tokenizers. Writes
# OUT/NAME.jsonl.gz. vLLM runs without weights (vllm launch render), SGLang up to its scheduler (sglang_ids.py).
set -euo pipefail
own=$(cd "$(dirname "$0")" && pwd)
vllm=$(cd "$1/vllm" && pwd) sglang=$(cd "$1/sglang" && pwd) models=$2 count=$3 out=$4
mkdir -p "$out"
[ -n "${ONLY:-}" ] || rm -rf "$out"/*.jsonl.gz "$out"/*.log "$out"/mistral_* # of an earlier run
seed=${SEED:-$RANDOM}
echo "seed $seed, 64 lists of $count bodies"
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill -- "$server"; rm -rf "$work"' EXIT
export VLLM_SYSTEM_START_DATE=2026-11-22 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TIKTOKEN_ENCODINGS_BASE=$work/gptoss
port=${PORT:-8391}

ask() { # KIND FILE; each list has bodies of its own
  local own_seed=$((seed + $(cksum <<< "$2" | cut -d ' ' -f 1) % 1000000))
  python3 "$own/encoders.py" "$1" "http://127.0.0.1:$port" "$own_seed" "$count" "$out/$2.jsonl.gz"
  echo "$2, after $SECONDS s"
}

record() { # NAME TOKENIZER LENGTH KIND/APIS ARGUMENTS...; an empty KIND: no chats of encoders.py; APIS: bodies of bodies.py
  local name=$1 tokenizer=$2 length=$3 kind=${4%/*} api
  local apis=(${4##*/})
  shift 4
  [ -z "${ONLY:-}" ] || [[ " $ONLY " = *" $name "* ]] || return 0
  "$vllm/bin/python" "$own/encoder_models.py" "$models/$tokenizer" "$work/$tokenizer"
  "$vllm/bin/vllm" launch render "$work/$tokenizer" --host 127.0.0.1 --port "$port" --served-model-name tiny \
    --max-model-len "$length" "$@" > "$out/$name.log" 2>&1 &
  server=$!
  for _ in $(seq 900); do
    curl -sf -o /dev/null "http://127.0.0.1:$port/health" && break
    kill -0 "$server" || { tail -5 "$out/$name.log"; exit 1; }
    sleep 1
  done
  [ -z "$kind" ] || ask "$kind" "$name"
  for api in "${apis[@]}"; do
    ask "vllm_$api" "vllm_${name}_$api"
  done
  kill "$server"
  wait "$server" || true
  server=
}

# SGLang's processes end with their group.
record_sglang() { # NAME TOKENIZER ARGUMENTS -- APIS...
  local name=$1 tokenizer=$2 arguments=()
  shift 2
  while [ "$1" != -- ]; do arguments+=("$1"); shift; done
  shift
  [ -z "${ONLY:-}" ] || [[ " $ONLY " = *" $name "* ]] || return 0
  setsid "$sglang/bin/python" "$own/serve.py" sglang_ids --tokenizer "$models/$tokenizer" --work "$work" --port "$port" --events $((port + 1)) \
    --replay $((port + 2)) --ranks 1 -- "${arguments[@]}" > "$out/$name.log" 2>&1 &
  server=-$!
  for _ in $(seq 900); do
    curl -sf -o /dev/null "http://127.0.0.1:$port/v1/models" && break
    kill -0 -- "$server" || { tail -5 "$out/$name.log"; exit 1; }
    sleep 1
  done
  for api in "$@"; do
    ask "${api/#conversations/sglang:deepseek}" "${name}_${api#sglang_}"
  done
  kill -9 -- "$server"
  wait || true
  server=
}

record_sglang sglang qwen3 -- sglang_chat sglang_completions sglang_responses sglang_messages sglang_generate
record_sglang sglang qwen3 --is-embedding -- sglang_embeddings
record_sglang sglang_dsv32 deepseek_v3 --tool-call-parser deepseekv32 --context-length 4096 -- conversations sglang_completions sglang_responses sglang_messages
# Bodies of all APIs for a model of each kind. The template of gpt-oss, which /tokenize uses, prints the day's date.
all='chat completions responses messages tokenize'
tools=--enable-auto-tool-choice\ --tool-call-parser
record qwen3 qwen3 1024 "/$all" $tools hermes --trust-request-chat-template
record harmony gptoss 16384 "harmony/${all% *}" $tools openai
record harmony_responses gptoss 16384 harmony_responses/ $tools openai
for version in v32 v4 v41; do
  record "deepseek_$version" deepseek_v3 16384 "deepseek/$all" $tools "deepseek_$version" --tokenizer-mode "deepseek_$version"
done
record inkling inkling 16384 "inkling/$all" $tools inkling --tokenizer-mode inkling
# Without a tool parser: vLLM's own for Mistral fails with mistral-common 1.13 from version 11 on.
for version in v1 v2 v3 v7 tekken_v3 tekken_v7 tekken_v11 tekken_v13 tekken_v15; do
  apis=
  [[ $version != v3 && $version != tekken_v15 ]] || apis=$all
  record "mistral_$version" "mistral_$version" 16384 "mistral:${version##*v}/$apis"
  [ ! -d "$work/mistral_$version" ] || cp -r "$work/mistral_$version" "$out/" # the tests read the same files
done
