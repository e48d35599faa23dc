package policy

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/doze-run/doze/egress/policy/policytest"
	"github.com/doze-run/doze/egress/secret"
)

func TestMain(m *testing.M) {
	code := runTests(m)
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "doze-policies")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	built.dir, built.modules = dir, map[string][]byte{}
	if built.compiler, err = policytest.BuildCompiler(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// built holds the binaries that tests share: the compiler, and the guests. Each
// guest is built once.
var built struct {
	sync.Mutex
	dir, compiler string
	modules       map[string][]byte
}

// The guests: a policy that doze ships, and one with a script as its configuration.
const (
	bearer = "../../policies/bearer"
	script = "../../policies/sdk/sdktest/testdata/script/guest"
)

// guest compiles a guest with the Go toolchain that runs the test.
func guest(t testing.TB, folder string) []byte {
	t.Helper()
	built.Lock()
	defer built.Unlock()
	if m := built.modules[folder]; m != nil {
		return m
	}
	file := filepath.Join(built.dir, "guest.wasm")
	build := exec.Command("go", "build", "-buildmode=c-shared", "-ldflags=-s -w", "-o", file, folder)
	build.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "GOFLAGS=-buildvcs=false")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the guest %s: %v\n%s", folder, err, out)
	}
	m, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	built.modules[folder] = m
	return m
}

// codeCache returns the folder of machine code that the tests of a run share, because
// compiling Go modules is slow.
func codeCache() string { return filepath.Join(built.dir, "code") }

func newHost(t testing.TB, change func(*Config)) *Host {
	t.Helper()
	config := Config{CacheDir: codeCache(), Compiler: built.compiler}
	if change != nil {
		change(&config)
	}
	h, err := NewHost(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func compile(t testing.TB, h *Host, name string, wasm []byte) *Module {
	t.Helper()
	m, err := h.Compile(t.Context(), name, wasm)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Release)
	return m
}

func configure(t testing.TB, m *Module, config string) *Policy {
	t.Helper()
	p, err := m.Configure(t.Context(), []byte(config))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Release)
	return p
}

// secrets is a source of secrets whose references contain the names of the secrets.
type secrets struct{ secret.Source }

func (secrets) Reference(name string) (string, error) {
	if name == "unknown" {
		return "", secret.ErrUnknown
	}
	return "ref-" + name, nil
}

// result is the outcome of a request and its response.
type result struct {
	*Chain
	Denied *Denial
	Cut    bool
}

// run runs policies around next, and retains them, as egress does. next can fail by a
// panic with http.ErrAbortHandler.
func run(w http.ResponseWriter, r *http.Request, i Info, steps []Step, next http.Handler) *result {
	for _, s := range steps {
		if !s.Policy.Retain() {
			panic("the policy was released")
		}
		defer s.Policy.Release()
	}
	c := NewChain(w, r, i)
	defer c.Close()
	stopped, failed := false, false
	for _, s := range steps {
		if stopped = c.Request(s); stopped {
			break
		}
	}
	if !stopped {
		failed = aborts(next, c.Writer(), r)
	}
	x := &result{Chain: c}
	x.Denied, x.Cut = c.Response(failed)
	return x
}

// aborts calls a handler, and reports whether it panicked with http.ErrAbortHandler.
func aborts(h http.Handler, w http.ResponseWriter, r *http.Request) (aborted bool) {
	defer func() {
		if v := recover(); v == http.ErrAbortHandler {
			aborted = true
		} else if v != nil {
			panic(v)
		}
	}()
	h.ServeHTTP(w, r)
	return false
}

func request(method, target string) *http.Request {
	r := httptest.NewRequest(method, "https://api.example.com"+target, nil)
	r.Host = "api.example.com"
	return r
}
