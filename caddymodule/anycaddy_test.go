package caddymodule_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// anyCaddy is what xcaddy writes for `--with github.com/doze-run/doze/caddymodule`.
const anyCaddy = `package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	_ "github.com/caddyserver/caddy/v2/modules/standard"
	_ "github.com/doze-run/doze/caddymodule"
)

func main() { caddycmd.Main() }
`

// podmanTags are the build tags that `make -s tags` prints; see the Makefile.
const podmanTags = "remote,containers_image_openpgp,exclude_graphdriver_btrfs,exclude_graphdriver_devicemapper"

func TestModulesBuildIntoAnyCaddy(t *testing.T) {
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	goMod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	goSum, err := os.ReadFile(filepath.Join(root, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	// Another module that requires ours: the same versions, so that nothing has
	// to be looked up.
	theirs := regexp.MustCompile(`(?m)^module .*$`).ReplaceAllString(string(goMod), "module caddy") +
		"\nrequire github.com/doze-run/doze v0.0.0\n\nreplace github.com/doze-run/doze => " + root + "\n"
	dir := t.TempDir()
	for name, text := range map[string]string{"main.go": anyCaddy, "go.mod": theirs, "go.sum": string(goSum)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	program := filepath.Join(dir, "caddy")
	build := exec.CommandContext(t.Context(), "go", "build", "-mod=mod", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-tags", podmanTags, "-o", program, ".")
	build.Dir = dir
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.CommandContext(t.Context(), program, "list-modules", "--skip-standard").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, module := range []string{"doze", "http.handlers.doze_api", "http.handlers.doze_preview", "tls.permission.doze"} {
		if !strings.Contains("\n"+string(out), "\n"+module+"\n") {
			t.Errorf("the built Caddy lacks %s:\n%s", module, out)
		}
	}
}
