#!/usr/bin/env bash
# Prints the figures of docs/benchmarks.md in a few minutes: tokenizer next to Hugging Face's, a conversation from body bytes to
# block hashes, whole decisions, index, routing, and loads through the real Envoy next to a server that does nothing.
# Processor times, so that they hold on a machine that is busy; still, compare only what one run printed.
# Peers besides Hugging Face's library are measured if they are in .tools/bench-venv: .tools/bench-venv/bin/pip install
# fastokens==0.3.5 gigatoken==0.10.0. Its own next version needs another environment, whose Python runs reference.py by
# hand on the texts of KVLANE_BENCH_TEXTS=FOLDER go test -run '^$' -bench '^BenchmarkEncode$' ./internal/tokens/bpe:
# python3 -m venv NEXT && NEXT/bin/pip install tokenizers==1.0.0rc3.
# ENVOY is the Envoy to use; LENGTH (3s) the time of one load. Without Python or the package index the comparison with
# Hugging Face's library is left out, and says so.
set -euo pipefail
cd "$(dirname "$0")/../../.."
tools=$PWD/.tools
texts=$(mktemp -d)
trap 'rm -rf "$texts"' EXIT
mkdir -p "$tools/bin"

# show PACKAGE PATTERN TIME prints a package's benchmarks without the frame around them.
show() {
  go test -run '^$' -bench "$2" -benchtime "$3" "$1" | grep -E '^(Benchmark|FAIL|---)|bench_test.go' | sed -E 's/^Benchmark//; s/-[0-9]+( *\t)/\1/'
}

echo "== Machine: $(nproc) processors, load $(cut -d' ' -f1-3 /proc/loadavg), $(go version | cut -d' ' -f3)"
echo
echo "== Tokenizer: prompts of 8,000 characters, MB per CPU-second (MB/cpu-s); cold: nothing seen before, words: its words, in another order, warm: all of it"
export KVLANE_BENCH_TEXTS=$texts
show ./internal/tokens/bpe '^BenchmarkEncode$' 60ms
show ./internal/tokens/bpe '^BenchmarkLoad$' 300ms
venv=$tools/bench-venv
if [ ! -x "$venv/bin/python" ] && ! { python3 -m venv "$venv" && "$venv/bin/pip" install -q --disable-pip-version-check tokenizers==0.23.2; }; then
  rm -rf "$venv"
fi
if [ -x "$venv/bin/python" ]; then
  "$venv/bin/python" internal/lab/bench/reference.py "$texts" internal/tokens/models/{qwen3,deepseek_v3,gptoss,mistral_nemo,mistral_7b}
else
  echo "(Hugging Face's library could not be installed: no comparison)"
fi
echo
echo "== A conversation of 81 messages, 61 KB, from body bytes to block hashes"
show ./internal/decide '^BenchmarkConversation$' 200ms
echo "its chat template alone, nothing remembered:"
show ./internal/tokens/shape '^BenchmarkRender$' 200ms
echo
echo "== A whole decision in process, 8 targets, half of each prompt new to the router; stages (parse-µs, tokens-µs, ...) by the wall clock"
show ./internal/decide '^BenchmarkDecide$' 200ms
echo "for a prompt of 2,000 tokens that came before, which 10, 100 and 1,000 targets hold by their events, or 1,000 by what was sent there:"
show ./internal/decide '^BenchmarkTargets$' 300ms
echo "the 99th percentile of decisions at a steady rate, without events and with 200,000 blocks a second of them, and of their part in the index:"
show ./internal/decide '^BenchmarkTail$' 2000x
echo
echo "== Index: hashing, lookups, events, and what a copy costs a block"
show ./kvindex '^Benchmark(AppendHashes|Match|Apply|Free|Snapshot)$' 200ms
echo
echo "== Index, generated workloads (those on Mooncake's trace: make bench-index WORKLOAD=FILE, see docs/index.md)"
go build -o "$tools/bin/benchindex" ./internal/lab/benchindex
"$tools/bin/benchindex" -brief -depth 78 -holders 64 -ranks 128 -blocks 12800000
"$tools/bin/benchindex" -brief -depth 6250 -holders 8 -ranks 1000 -blocks 10000000
"$tools/bin/benchindex" -brief -depth 24 -holders 1 -ranks 128 -blocks 12800000
"$tools/bin/benchindex" -brief -depth 16 -holders 1 -ranks 128 -blocks 16000000
echo
echo "== Events from the socket to the index: bursts, and 20,000 single-block events a second (part of a core, memory of a feed)"
show ./kvindex/feed '^BenchmarkSocketToIndex$' 300ms
show ./kvindex/feed '^BenchmarkSteady$' 20000x
echo
echo "== Routing: the choice among targets"
show ./routing '^BenchmarkPick$' 200ms
echo
echo "== Disaggregated prefill and decode: 8,000 tokens, NIXL's protocol, simulated engines that take no time, one request at a time"
go test -count=1 -v -run '^TestCostOfAPrefillLeg$' ./e2e | sed -nE 's/^ +disagg_cost_test.go:[0-9]+: //p; /^(FAIL|ok)/p'
echo "of that Kvlane's own part, from the answer to the decision, in process:"
show ./internal/decide '^BenchmarkFromPrefillAnswerToDecision$' 1s
echo
CGO_ENABLED=0 go build -trimpath -tags grpcnotrace -ldflags '-s -w' -o "$tools/bin/kvlane-bench" ./cmd/kvlane
go build -tags grpcnotrace -o "$tools/bin/bench" ./internal/lab/bench
"$tools/bin/bench" -kvlane "$tools/bin/kvlane-bench" -envoy "$ENVOY" -length "${LENGTH:-3s}"
