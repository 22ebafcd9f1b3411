#!/usr/bin/env bash
# build.sh FOLDER   puts what the tests of the chart need into FOLDER: tools in bin, each built once for its version, and in
# schemas the OpenAPI document of Kubernetes' own kinds and the CRDs that the chart's objects belong to. Network is only used
# for Go modules, and only what is missing is made.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1/bin"; folder=$(cd "$1" && pwd)
export CGO_ENABLED=0 GOFLAGS="-buildvcs=false -trimpath '-gcflags=all=-l -dwarf=false'" GOTOOLCHAIN=local

"$here/../k8s/build.sh" "$folder" helm kubeconform
exec {lock}>"$folder/lock"; flock "$lock"

tool() { # tool NAME MODULE-FOLDER PACKAGE
  local key made
  key=$(cat "$here/tools/$2"/* | sha256sum | cut -c1-12)
  made=$folder/$1-$key
  if [[ ! -x $made ]]; then
    echo "building $1"
    (cd "$here/tools/$2" && go build -ldflags '-s -w' -o "$made.new" "$3")
    mv "$made.new" "$made"
  fi
  ln -sfn "../$(basename "$made")" "$folder/bin/$1"
}
tool helm-unittest unittest github.com/helm-unittest/helm-unittest/cmd/helm-unittest
tool cyclonedx-gomod sbom github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod
tool promql promql .
tool compose compose .

# MODULE@VERSION and the files in it.
sources=(
  'k8s.io/kubernetes@v1.36.3 api/openapi-spec/swagger.json'
  'sigs.k8s.io/gateway-api@v1.6.1 config/crd/standard/*routes.yaml'
  'sigs.k8s.io/gateway-api-inference-extension@v1.6.0 config/crd/bases/*_inferencepools.yaml'
  'istio.io/api@v1.31.1 kubernetes/customresourcedefinitions.gen.yaml'
  'github.com/envoyproxy/gateway@v1.9.1 charts/gateway-helm/charts/crds/crds/generated/*policies.yaml'
  'github.com/kedacore/keda/v2@v2.18.1 config/crd/bases/keda.sh_scaledobjects.yaml'
  'github.com/cert-manager/cert-manager@v1.21.2 deploy/crds/cert-manager.io_certificates.yaml'
  'github.com/prometheus-operator/prometheus-operator@v0.85.0 example/prometheus-operator-crd/*monitors.yaml example/prometheus-operator-crd/*rules.yaml'
)
key=$( (printf '%s\n' "${sources[@]}"; cat "$here/build.sh") | sha256sum | cut -c1-12)
made=$folder/schemas-$key
if [[ ! -d $made ]]; then
  echo "fetching schemas"
  files=()
  for source in "${sources[@]}"; do
    read -r -a parts <<<"$source"
    dir=$(cd "$folder" && GOFLAGS=-mod=mod go mod download -json "${parts[0]}" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
    for pattern in "${parts[@]:1}"; do
      # shellcheck disable=SC2206 # the pattern is meant to match files
      matches=("$dir"/$pattern)
      [[ -e ${matches[0]} ]] || { echo "$source: no such file" >&2; exit 1; }
      files+=("${matches[@]}")
    done
  done
  rm -rf "$made.new"
  mkdir -p "$made.new/crds"
  cp "${files[0]}" "$made.new/swagger.json"
  cp "${files[@]:1}" "$made.new/crds"
  chmod -R u+w "$made.new"
  mv "$made.new" "$made"
fi
ln -sfn "$(basename "$made")" "$folder/schemas"
