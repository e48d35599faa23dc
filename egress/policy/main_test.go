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
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if built.dir != "" {
		_ = os.RemoveAll(built.dir)
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// built are the guests of testdata, which are compiled once.
var built struct {
	sync.Mutex
	dir     string
	modules map[string][]byte
}

// guest compiles testdata/name with the Go that runs the test.
func guest(t testing.TB, name string) []byte {
	t.Helper()
	built.Lock()
	defer built.Unlock()
	if m := built.modules[name]; m != nil {
		return m
	}
	if built.dir == "" {
		dir, err := os.MkdirTemp("", "doze-policies")
		if err != nil {
			t.Fatal(err)
		}
		built.dir, built.modules = dir, map[string][]byte{}
	}
	file := filepath.Join(built.dir, name+".wasm")
	build := exec.Command("go", "build", "-buildmode=c-shared", "-ldflags=-s -w", "-o", file, "./testdata/"+name)
	build.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "GOFLAGS=-buildvcs=false")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building the guest %s: %v\n%s", name, err, out)
	}
	m, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	built.modules[name] = m
	return m
}

// codeCache is shared by the tests of a run: compiling Go's modules takes long.
func codeCache(t testing.TB) string {
	t.Helper()
	guest(t, "bearer")
	return filepath.Join(built.dir, "code")
}

func newHost(t testing.TB, change func(*Config)) *Host {
	t.Helper()
	// The race detector slows the compiler down, too.
	config := Config{CacheDir: codeCache(t), CompileLimit: 10 * time.Minute}
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

// secrets of the tests: their references tell what they stand for.
type secrets struct{ noSecrets }

func (secrets) Reference(name string) (string, error) {
	if name == "unknown" {
		return "", ErrUnknown
	}
	return "ref-" + name, nil
}

func request(method, target string) *http.Request {
	r := httptest.NewRequest(method, "https://api.example.com"+target, nil)
	r.Host = "api.example.com"
	return r
}
