//go:build clients

package clients

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/api"
	"github.com/doze-run/doze/egress"
	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/test/testnode"
)

// limit of one program: npm and go download what they need the first time.
const limit = 5 * time.Minute

func TestLint(t *testing.T) {
	dir := project(t)
	// The report goes to standard output, everything else to standard error. The exit
	// status is 1 if the report has errors.
	out, complaint, err := run(t, dir, "node_modules/.bin/redocly", "lint", "--format", "json", "--max-problems", "1000", "openapi.json")
	var report struct {
		Totals   struct{ Errors, Warnings, Ignored int }
		Problems []struct {
			RuleID, Severity, Message string
			Location                  []struct{ Pointer string }
		}
	}
	if decodeErr := json.Unmarshal(out, &report); decodeErr != nil {
		t.Fatalf("redocly lint: %v, %v: %s", err, decodeErr, complaint)
	}
	for _, p := range report.Problems {
		t.Errorf("%s (%s): %s at %v", p.RuleID, p.Severity, p.Message, p.Location)
	}
	if total := report.Totals; total.Errors+total.Warnings+total.Ignored > 0 || err != nil {
		t.Errorf("%d errors, %d warnings, %d ignored; %v", total.Errors, total.Warnings, total.Ignored, err)
	}
}

// Without the option a field with a default would be required, in requests too.
func TestTypeScriptClientCompiles(t *testing.T) {
	dir := project(t)
	must(t, dir, "node_modules/.bin/openapi-typescript", "openapi.json", "--default-non-nullable", "false", "--output", "api.d.ts")
	must(t, dir, "node_modules/.bin/tsc", "--project", ".")
}

func TestGoClientCompiles(t *testing.T) {
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("testdata/go")); err != nil {
		t.Fatal(err)
	}
	writeDocument(t, dir)
	if err := os.Mkdir(filepath.Join(dir, "client"), 0o755); err != nil {
		t.Fatal(err)
	}
	must(t, dir, "go", "tool", "oapi-codegen", "-config", "config.yaml", "openapi.json")
	must(t, dir, "go", "vet", "./...")
}

// project returns a folder with the files of testdata/npm, the packages that they need,
// and the document.
func project(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("testdata/npm")); err != nil {
		t.Fatal(err)
	}
	modules := filepath.Join(testnode.Modules(t, "testdata/npm"), "node_modules")
	if err := os.Symlink(modules, filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	writeDocument(t, dir)
	return dir
}

// writeDocument writes the document of the API, as a node serves it, to openapi.json.
func writeDocument(t *testing.T, dir string) {
	t.Helper()
	a, err := api.New(api.Config{
		Sandboxes:  new(sandbox.Manager), // which serve no request
		Egress:     new(egress.Egress),
		Auth:       api.SingleToken("token-0123456789", "owner"),
		PreviewURL: func(sandbox.Sandbox, sandbox.Port) string { return "" },
	})
	if err != nil {
		t.Fatal(err)
	}
	rec := httptest.NewRecorder()
	a.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, api.Prefix+"/openapi.json", nil))
	if rec.Code != http.StatusOK {
		t.Fatalf("GET /openapi.json: %d %s", rec.Code, rec.Body)
	}
	if err := os.WriteFile(filepath.Join(dir, "openapi.json"), rec.Body.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

// run runs a program in dir and returns its output.
func run(t *testing.T, dir, name string, args ...string) (stdout, stderr []byte, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if filepath.Dir(name) != "." {
		name = filepath.Join(dir, name)
	}
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	// The Go client is a module of its own, without doze's build tags.
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOWORK=off", "REDOCLY_TELEMETRY=off", "REDOCLY_SUPPRESS_UPDATE_NOTICE=true")
	var outBuf, errBuf bytes.Buffer
	cmd.Stdout, cmd.Stderr = &outBuf, &errBuf
	err = cmd.Run()
	return outBuf.Bytes(), errBuf.Bytes(), err
}

// must runs a program that has to succeed.
func must(t *testing.T, dir, name string, args ...string) {
	t.Helper()
	if stdout, stderr, err := run(t, dir, name, args...); err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, stdout, stderr)
	}
}
