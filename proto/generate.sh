#!/bin/sh
# Makes the Go code of proto/kvlane anew. The compiler is the protoc inside the
# grpcio-tools wheel, in a virtual environment of its own; the plugins come
# through the Go module proxy. Both are pinned and live in .tools.
set -eu
cd "$(dirname "$0")/.."

GRPCIO_TOOLS=1.76.0
PROTOC_GEN_GO=v1.36.12
PROTOC_GEN_GO_GRPC=v1.6.0
tools=$PWD/.tools

venv=$tools/grpcio-tools-$GRPCIO_TOOLS
if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -c 'import grpc_tools' 2>/dev/null; then
	python3 -m venv "$venv"
	"$venv/bin/pip" install --quiet --disable-pip-version-check "grpcio-tools==$GRPCIO_TOOLS"
fi
bin=$tools/protoc-gen-go-$PROTOC_GEN_GO-grpc-$PROTOC_GEN_GO_GRPC
[ -x "$bin/protoc-gen-go" ] || GOBIN=$bin go install "google.golang.org/protobuf/cmd/protoc-gen-go@$PROTOC_GEN_GO"
[ -x "$bin/protoc-gen-go-grpc" ] || GOBIN=$bin go install "google.golang.org/grpc/cmd/protoc-gen-go-grpc@$PROTOC_GEN_GO_GRPC"

cd proto
PATH=$bin:$PATH "$venv/bin/python" -m grpc_tools.protoc -I. \
	--go_out=. --go_opt=paths=source_relative \
	--go-grpc_out=. --go-grpc_opt=paths=source_relative \
	kvlane/v1/*.proto
