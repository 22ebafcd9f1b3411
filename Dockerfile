# syntax=docker/dockerfile:1
# Kvlane's image: one static binary, no shell, not root.
#
#   docker buildx build --platform linux/amd64,linux/arm64 --build-arg VERSION=v0.1.0 --tag kvlane .
#
# The same source, VERSION and Go make the same binary and bill of materials, byte for byte. The image that builds is pinned by
# the digest that Docker's own list has for its tag (github.com/docker-library/repo-info, repos/golang/remote/1.26.8-bookworm.md).
# No such list is published for the base, and the tests have no registry to ask: it is named by tag, and thereby gets new
# certificates. `make pin-images` writes both digests here, where the registries can be reached; `make check-images` fails
# until then. For one build:
#
#   --build-arg BASE_IMAGE=gcr.io/distroless/static-debian12@$(docker buildx imagetools inspect \
#     gcr.io/distroless/static-debian12:nonroot --format '{{.Manifest.Digest}}')
ARG GO_IMAGE=golang:1.26.8-bookworm@sha256:f4191582e1522dfc5980a6bdc0309a756f9697f3e7d0f199c7e26fc82ab324fd
ARG BASE_IMAGE=gcr.io/distroless/static-debian12:nonroot

# Runs on the machine that builds and cross-compiles, so that other architectures need no emulation.
FROM --platform=$BUILDPLATFORM ${GO_IMAGE} AS build
# The builder says for what; a default here would take the place of that. Without one: for the machine that builds.
ARG TARGETOS
ARG TARGETARCH
ARG VERSION=unknown
WORKDIR /src
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
# The tag and the flags are those of `make build`, which says what the tag is for.
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS=${TARGETOS} GOARCH=${TARGETARCH} GOTOOLCHAIN=local GOFLAGS=-mod=readonly \
    go build -trimpath -tags grpcnotrace -buildvcs=false -ldflags "-s -w -buildid= -X main.version=${VERSION}" -o /out/kvlane ./cmd/kvlane
# The bill of materials (CycloneDX) of the very binary; `make release` writes the same.
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    (cd e2e/chart/tools/sbom && CGO_ENABLED=0 GOTOOLCHAIN=local GOFLAGS="-buildvcs=false -trimpath" \
      go build -ldflags "-s -w" -o /out/cyclonedx-gomod github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod) && \
    /out/cyclonedx-gomod bin -json -std -noserial -notimestamp -version "${VERSION}" -output /out/kvlane.cdx.json /out/kvlane

FROM ${BASE_IMAGE}
ARG VERSION=unknown
LABEL org.opencontainers.image.title=kvlane \
      org.opencontainers.image.description="Routes LLM requests by KV cache, behind an Envoy" \
      org.opencontainers.image.source=https://github.com/kvlane/kvlane \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.version=${VERSION}
COPY --from=build /out/kvlane /usr/local/bin/kvlane
COPY --from=build /out/kvlane.cdx.json /usr/share/doc/kvlane/kvlane.cdx.json
USER 65532:65532
# ext_proc, gRPC health, metrics
EXPOSE 9002 9003 9090
ENTRYPOINT ["/usr/local/bin/kvlane"]
CMD ["help"]
