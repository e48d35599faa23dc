# make help lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

# Podman's bindings without cgo; its local storage drivers are not used.
TAGS := remote containers_image_openpgp exclude_graphdriver_btrfs exclude_graphdriver_devicemapper
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
VERSION_PACKAGE := github.com/doze-run/doze/cmd/internal/version
PACKAGES ?= ./...
# The packages that have integration tests.
INTEGRATION := $(shell grep -rlE '^//go:build .*integration' --include='*_test.go' . | xargs -n1 dirname | sort -u)
# The packages that have tests of memory figures.
MEMORY := $(shell git ls-files '*_memory_test.go' | xargs -rn1 dirname | sort -u | sed 's,^,./,')
# The packages with tests that generate parts of documents.
DOCUMENTED := $(shell git grep -l 'testkit\.Generated' -- '*_test.go' | xargs -n1 dirname | sort -u | sed 's,^,./,')
RUN ?= .
# The names of the integration tests. The other tests of their packages are unit tests.
INTEGRATION_RUN = ^(${shell grep -rlE '^//go:build .*integration' --include='*_test.go' . | xargs sed -nE 's/^func (Test[A-Za-z0-9_]+)\(.*/\1/p' | paste -sd '|'})$$
# As the programs are compiled, so that whatever else compiles their packages finds them in the cache.
COMPILE := -trimpath -buildvcs=false -tags "$(TAGS)"
# The compiler collects garbage less often: it takes a fifth less time. Not for tests, which must not inherit it.
GO := GOGC=400 go
# Tests run with the race detector, without debugging information. Without the detector, the function that derives keys from passwords,
# which shares no memory, takes a quarter of the time.
RACE := -race -gcflags=all=-dwarf=false -gcflags=golang.org/x/crypto/scrypt=-race=false

# The policies that doze ships, which go into the node as WebAssembly.
POLICIES := $(patsubst policies/%/main.go,%,$(wildcard policies/*/main.go))
SDK := $(shell find policies/sdk -name '*.go' ! -name '*_test.go' ! -path '*/sdktest/*')

ENTER := $(CURDIR)/packaging/host/enter
# Where user doze reaches the binaries: the checkout may be in a folder of root's.
TEST_HOME := /var/lib/doze/test
ifneq ($(shell id -u),0)
TEST_HOME := $(HOME)/.local/share/doze/test
endif

# An S3 server for tests and benchmarks.
BUILD_S3SERVER = cd test/s3server && CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -o $(TEST_HOME)/bin/doze-s3server .
# A container registry for tests.
BUILD_REGISTRY = cd test/registry && CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -o $(TEST_HOME)/bin/doze-registry .

.PHONY: help up down logs clean doctor build policies setup test bench bench-disks soak tags check prose openapi docs pictures xterm test-unit test-mounts test-disks test-power test-clients test-integration test-vm

help: ## this list
	@sed -n 's/^\([a-z%-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

up: ## a node on this machine, with a sandbox to try: prints how to get in
	@packaging/build-tools
	@packaging/host/setup
	@echo '==> building (some minutes the first time)'
	@$(MAKE) --no-print-directory build
	@packaging/node up

down: ## end that node; its sandboxes sleep
	@packaging/node down

logs: ## the node's log
	@packaging/node logs

clean: ## end the node, remove its sandboxes, snapshots and all its data, and bin/; images stay
	@packaging/node clean
	@rm -rf bin policies/builtin/modules/*.wasm*

doctor: build ## check this host and the running node; each finding has its remedy
	@mkdir -p $(TEST_HOME)/bin && install -m 0755 bin/* $(TEST_HOME)/bin
	@$(ENTER) -- $(TEST_HOME)/bin/doze doctor

build: policies ## the programs: bin/doze, bin/doze-node, bin/doze-guest, bin/doze-netns, bin/doze-disk, bin/doze-backup and bin/doze-bucket
	@mkdir -p bin
	CGO_ENABLED=0 $(GO) build $(COMPILE) -ldflags "-s -w -X main.buildVersion=$(VERSION) -X $(VERSION_PACKAGE).release=$(VERSION)" \
		-o bin/ ./cmd/doze ./cmd/doze-node ./cmd/doze-netns ./cmd/doze-disk ./cmd/doze-backup ./cmd/doze-bucket
	@# The guest speaks HTTP/1.1 alone: without HTTP/2 each sandbox uses 80 KB less.
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -tags "$(TAGS) nethttpomithttp2" -ldflags "-s -w -X main.buildVersion=$(VERSION)" -o bin/ ./cmd/doze-guest

policies: $(POLICIES:%=policies/builtin/modules/%.wasm.gz) ## the policies that doze ships, as WebAssembly

.SECONDEXPANSION:
policies/builtin/modules/%.wasm.gz: $$(filter-out %_test.go,$$(wildcard policies/$$*/*.go)) $(SDK) go.mod
	@echo 'policy $*'
	@GOOS=wasip1 GOARCH=wasm $(GO) build -buildmode=c-shared -trimpath -buildvcs=false -ldflags '-s -w' -o $(basename $@) ./policies/$*
	@gzip -9nf $(basename $@)

image-%: ## an image for sandboxes, such as image-python; docs/images.md lists them
	@packaging/host/as-root images/build $*

setup: ## prepare this host: packages, user doze, Podman (root or sudo)
	packaging/host/setup

test: ## everything: installs what it needs, checks, unit and integration tests
	@packaging/test

bench: build setup ## the figures that a node must reach, and its peers': BENCH='-only wake'
	@packaging/host/setup --with-peers || echo 'bench: peers are missing; their rows report that'
	@packaging/host/as-root images/build base python
	@mkdir -p $(TEST_HOME)/bin && install -m 0755 bin/* $(TEST_HOME)/bin
	$(BUILD_S3SERVER)
	CGO_ENABLED=0 $(GO) build $(COMPILE) -o $(TEST_HOME)/bin/bench ./test/bench
	@mkdir -p build && chmod 1777 build && rm -f build/bench.json # written by user doze
	$(ENTER) -- $(TEST_HOME)/bin/bench -bin $(TEST_HOME)/bin $(BENCH)
	@[ -n '$(BENCH)' ] || $(MAKE) --no-print-directory bench-disks

bench-disks: build setup ## snapshots, forks, restores and backups on file systems of their own (24 GiB, root or sudo): FILESYSTEMS=xfs
	@packaging/host/setup --with-tests
	@packaging/host/as-root images/build base
	@mkdir -p $(TEST_HOME)/bin && install -m 0755 bin/* $(TEST_HOME)/bin
	$(BUILD_S3SERVER)
	CGO_ENABLED=0 $(GO) build $(COMPILE) -o $(TEST_HOME)/bin/bench ./test/bench
	@mkdir -p build && chmod 1777 build # written by the users of the benchmarks
	@for type in $(or $(FILESYSTEMS),ext4 xfs btrfs); do \
		rm -f build/bench-$$type.json; \
		packaging/host/as-root test/filesystem/run $$type 24 $(TEST_HOME)/bin bench -only snapshot,backup -json build/bench-$$type.json $(BENCH) || exit 1; \
	done

soak: build setup ## build the image full and check it; work on a node for DURATION (15m) and report resources that it does not release; losses of power
	@packaging/host/as-root images/build base full
	@mkdir -p $(TEST_HOME)/bin && install -m 0755 bin/* $(TEST_HOME)/bin
	CGO_ENABLED=0 $(GO) build $(COMPILE) -o $(TEST_HOME)/bin/bench ./test/bench
	$(ENTER) -- $(TEST_HOME)/bin/bench soak -bin $(TEST_HOME)/bin -duration $(or $(DURATION),15m) $(SOAK)
	@$(MAKE) --no-print-directory test-power POWER='-moments 20 -filesystems ext4,xfs,btrfs'

tags: ## the build tags, for GOFLAGS
	@echo '$(TAGS)' | tr ' ' ','

check: prose ## gofmt, go vet, the language, and the client for other systems
	@unformatted=$$(git ls-files -z --cached --others --exclude-standard -- '*.go' | xargs -0 gofmt -l); \
	if [ -n "$$unformatted" ]; then echo "run gofmt -w on:"; echo "$$unformatted"; exit 1; fi
	$(GO) vet $(RACE) -tags "integration clients mounts $(TAGS)" ./... # compiled like the unit tests
	GOOS=wasip1 GOARCH=wasm go vet ./policies/sdk/internal/abi
	CGO_ENABLED=0 $(GO) run $(COMPILE) ./internal/typecheck ./cmd/doze darwin/arm64 windows/amd64

openapi: ## docs/openapi.json, after a change of the API
	go test -count=1 -run TestDocumentIsCommitted -tags "$(TAGS)" ./api -update

prose: ## the language of code and documents; CONTRIBUTING.md has the rules
	CGO_ENABLED=0 $(GO) run $(COMPILE) ./internal/prose

docs: ## the generated parts of documents, which tests compare with the code
	go test -count=1 -run '^TestReference' -tags "$(TAGS)" $(DOCUMENTED) -update

xterm: ## api/terminalpage/assets/xterm, after a change of the versions in its package.json: wants npm
	api/terminalpage/update-xterm

pictures: ## docs/pictures/*.svg, from their sources in *.txt
	cd docs/pictures && GOFLAGS= go run .

# Compiled before and run two packages at a time: a test that has a core to itself
# fails only for a reason of its own. Tests that wait most of the time are parallel.
# `make check` vets them.
test-unit: policies ## tests that need nothing: PACKAGES=./runtime/... RUN=TestName
	$(GO) list -export -test $(RACE) -tags "$(TAGS)" $(PACKAGES) >/dev/null
	go test -vet=off $(RACE) -p 2 -parallel 8 -timeout 10m -run '$(RUN)' -tags "$(TAGS)" $(PACKAGES)
	$(if $(filter ./...,$(PACKAGES)),CGO_ENABLED=0 go test -vet=off -p 1 -timeout 10m -run '^TestMemory' $(COMPILE) $(MEMORY)) # without -race, which changes figures

test-mounts: ## copies of disks on ext4, XFS and Btrfs: wants root or sudo, and loop devices
	@packaging/host/setup --with-tests
	go test -vet=off $(RACE) -count=1 -run 'FileSystem|ShiftOwners' -tags "mounts $(TAGS)" -exec '$(CURDIR)/packaging/host/as-root' ./runtime/disk/tree

# Has users and storage of its own, and programs of its own, too, so that it can run in parallel with other tests.
test-disks test-power: TEST_HOME := $(TEST_HOME)-disks

# Each compares all that a snapshot or a backup must preserve of a disk.
DISK_TESTS := TestSnapshotHasEverythingInEachState$$|TestForksAreIndependent$$|TestBackups$$/^in_each_state$$

test-disks: build ## snapshots, forks, restores and backups with the storage on ext4, XFS and Btrfs: wants root or sudo, and loop devices; FILESYSTEMS=xfs
	@packaging/host/setup --with-tests
	@packaging/host/as-root images/build base
	@mkdir -p $(TEST_HOME)/bin && install -m 0755 bin/* $(TEST_HOME)/bin
	@$(BUILD_S3SERVER)
	$(GO) test -vet=off $(RACE) -c -o $(TEST_HOME)/bin/e2e.test -tags "integration $(TAGS)" ./test/e2e
	@for type in $(or $(FILESYSTEMS),ext4 xfs btrfs); do \
		echo "==> $$type"; \
		packaging/host/as-root test/filesystem/run $$type 4 $(TEST_HOME)/bin e2e.test -test.parallel 8 -test.timeout 10m -test.run '$(DISK_TESTS)' || exit 1; \
	done

test-power: build ## losses of power at random moments, and a full disk: wants root or sudo, and loop devices; POWER='-moments 20 -filesystems ext4,xfs,btrfs'
	@packaging/host/setup --with-tests
	@mkdir -p $(TEST_HOME)/bin && install -m 0755 bin/* $(TEST_HOME)/bin
	@CGO_ENABLED=0 $(GO) build $(COMPILE) -ldflags '-s -w' -o $(TEST_HOME)/bin/doze-recorder ./test/power/recorder
	@$(BUILD_S3SERVER)
	go test -vet=off $(RACE) -count=1 -timeout 60m -run "PowerLoss|FullDisk" -tags "mounts $(TAGS)" \
		-exec '$(CURDIR)/packaging/host/as-root env DOZE_BIN=$(TEST_HOME)/bin' ./test/power -args $(POWER)

test-clients: ## the OpenAPI document: lint, and compile generated clients for TypeScript and Go; wants Node.js
	go test -vet=off $(RACE) -count=1 -timeout 15m -run '$(RUN)' -tags "clients $(TAGS)" ./test/clients

# Every test binary runs as the unprivileged user, in a cgroup subtree of its
# own, with the binaries under test in $DOZE_BIN. All packages share that user's
# Podman, hence one at a time.
test-integration: PACKAGES := $(if $(filter ./...,$(PACKAGES)),$(INTEGRATION),$(PACKAGES))
test-integration: RUN := $(if $(filter .,$(RUN)),$(INTEGRATION_RUN),$(RUN))
test-integration: build ## tests against real Podman: PACKAGES=./runtime/netns/... RUN=TestName
	@packaging/host/setup --with-tests
	@mkdir -p $(TEST_HOME)/bin
	@install -m 0755 bin/* $(TEST_HOME)/bin
	@# What tests of egress put into sandboxes, and a policy that does harm.
	@CGO_ENABLED=0 $(GO) build $(COMPILE) -ldflags '-s -w' -o $(TEST_HOME)/bin/ ./test/egress/client ./test/egress/everything
	@$(BUILD_S3SERVER)
	@$(BUILD_REGISTRY)
	@GOOS=wasip1 GOARCH=wasm $(GO) build -buildmode=c-shared -trimpath -buildvcs=false -ldflags '-s -w' -o $(TEST_HOME)/bin/hostile.wasm ./test/egress/hostile
	@mkdir -p build && chmod 1777 build # pictures of pages that failed
	DOZE_BIN=$(TEST_HOME)/bin go test -vet=off $(RACE) -count=1 -p 1 -parallel 8 -timeout 30m -run '$(RUN)' \
		-tags "integration $(TAGS)" -exec '$(ENTER) --' $(PACKAGES)

test-vm: build ## the unit on a Debian 13 with systemd, emulated: wants root, QEMU, 10 minutes
	@test/vm/run
