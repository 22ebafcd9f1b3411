#!/usr/bin/env bash
# build.sh FOLDER TOOL...   makes FOLDER/bin/TOOL for each tool, from the versions pinned here and in tools/*/go.mod.
# A tool is built once for its version and kept in FOLDER; bin holds links to the versions that are meant.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1; shift
mkdir -p "$folder/bin"; folder=$(cd "$folder" && pwd)
exec {lock}>"$folder/lock"; flock "$lock" # of two concurrent runs, the second finds all made
# Without inlining and debugging data compilers take a quarter less time; e2e/chart/build.sh has the same flags, and shares what is made.
export CGO_ENABLED=0 GOFLAGS="-buildvcs=false -trimpath '-gcflags=all=-l -dwarf=false'" GOTOOLCHAIN=local
# Compilers that collect no garbage below 2 GiB take a seventh less time.
export GOGC=off GOMEMLIMIT=2GiB

HELM=v3.22.0
KUBECONFORM=v0.8.0
ENVOY_GATEWAY=v1.9.1
pinned() { (cd "$here/tools/$1" && go list -m -f '{{.Version}}' "$2"); }

# Tools made from files of tools/NAME, not of a module alone, are keyed by those too.
local_source() { local v; v=$(pinned "$1" "$2"); echo "$v-$(cat "$here/tools/$1"/* | sha256sum | cut -c1-12)"; }

kubernetes() { # kubernetes COMMAND OUTPUT
  local v short; v=$(pinned kubernetes k8s.io/kubernetes); short=${v#v1.}
  (cd "$here/tools/kubernetes" && go build -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$v -X k8s.io/component-base/version.gitMajor=1 \
    -X k8s.io/component-base/version.gitMinor=${short%%.*} -X k8s.io/client-go/pkg/version.gitVersion=$v" -o "$2" "k8s.io/kubernetes/cmd/$1")
}
install() { # install PACKAGE@VERSION OUTPUT
  local dir; dir=$(mktemp -d "$folder/install.XXXX")
  GOBIN=$dir go install -ldflags '-s -w' "$1"
  mv "$dir"/* "$2"; rmdir "$dir"
}

version() {
  case $1 in
    etcd) local_source etcd go.etcd.io/etcd/server/v3 ;;
    kube-apiserver | kube-controller-manager | kubectl) pinned kubernetes k8s.io/kubernetes ;;
    pilot-discovery) pinned istio istio.io/istio ;;
    conformance.test) local_source conformance sigs.k8s.io/gateway-api-inference-extension/conformance ;;
    helm) echo $HELM ;;
    kubeconform) echo $KUBECONFORM ;;
    envoy-gateway) echo $ENVOY_GATEWAY ;;
    *) echo "no tool $1" >&2; return 1 ;;
  esac
}

build() { # build TOOL OUTPUT
  case $1 in
    etcd) (cd "$here/tools/etcd" && go build -ldflags '-s -w' -o "$2" .) ;;
    kube-* | kubectl) kubernetes "$1" "$2" ;;
    pilot-discovery) (cd "$here/tools/istio" && go build -ldflags '-s -w' -o "$2" istio.io/istio/pilot/cmd/pilot-discovery) ;;
    conformance.test) (cd "$here/tools/conformance" && go test -c -ldflags '-s -w' -o "$2" .) ;;
    helm) install helm.sh/helm/v3/cmd/helm@$HELM "$2" ;;
    kubeconform) install github.com/yannh/kubeconform/cmd/kubeconform@$KUBECONFORM "$2" ;;
    envoy-gateway) install github.com/envoyproxy/gateway/cmd/envoy-gateway@$ENVOY_GATEWAY "$2" ;;
  esac
}

# What the tests read besides the programs: resource definitions and Istio's chart.
(cd "$here/tools/conformance" && go mod download sigs.k8s.io/gateway-api sigs.k8s.io/gateway-api-inference-extension sigs.k8s.io/gateway-api-inference-extension/conformance)
for tool; do
  [[ $tool != pilot-discovery ]] || (cd "$here/tools/istio" && go mod download istio.io/istio)
  [[ $tool != envoy-gateway ]] || (cd "$folder" && go mod download "github.com/envoyproxy/gateway@$ENVOY_GATEWAY")
  v=$(version "$tool")
  made=$folder/$tool-$v
  if [[ ! -x $made ]]; then
    echo "building $tool $v"
    began=$SECONDS
    build "$tool" "$made.new"
    mv "$made.new" "$made"
    echo "built $tool in $((SECONDS - began)) s"
  fi
  ln -sfn "../$(basename "$made")" "$folder/bin/$tool" # relative: the folder may be moved
done
