package server_test

import (
	"crypto/x509/pkix"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/guesttest"
	"github.com/doze-run/doze/runtime/guest/server"
	"github.com/doze-run/doze/runtime/guest/trust"
	"github.com/doze-run/doze/testkit/testca"
)

func newCA(t testing.TB) string {
	t.Helper()
	a, err := testca.NewAuthority(pkix.Name{CommonName: "CA"})
	if err != nil {
		t.Fatal(err)
	}
	return string(a.PEM())
}

// startIn is start with a root folder of its own, in which commands cannot run.
func startIn(t *testing.T, env ...string) (c *guest.Client, root string) {
	t.Helper()
	root = t.TempDir()
	c = start(t, func(cfg *server.Config) {
		cfg.Root, cfg.Workdir = root, "/"
		cfg.Env = append([]string{"PATH=" + os.Getenv("PATH")}, env...)
	})
	return c, root
}

// environment of a command.
func environment(t *testing.T, c *guest.Client, req guest.ExecRequest) map[string]string {
	t.Helper()
	req.Argv = []string{"env", "-0"}
	out, err := guesttest.Run(t.Context(), c, req)
	if err != nil {
		t.Fatal(err)
	}
	vars := map[string]string{}
	for kv := range strings.SplitSeq(string(out.Stdout), "\x00") {
		name, value, _ := strings.Cut(kv, "=")
		if _, twice := vars[name]; twice {
			t.Errorf("%s is set twice", name)
		}
		vars[name] = value
	}
	return vars
}

func TestTrustIsInstalledAndReported(t *testing.T) {
	c, root := startIn(t, "PIP_CERT=/image's", "GIT_SSL_CAINFO=/image's")
	if h, err := c.Hello(t.Context()); err != nil || h.Trust != "" {
		t.Errorf("at first it trusts %q, %v", h.Trust, err)
	}
	if vars := environment(t, c, guest.ExecRequest{}); vars["SSL_CERT_FILE"] != "" {
		t.Errorf("at first there are variables: %v", vars)
	}
	ca, roots := newCA(t), newCA(t)
	res, err := c.Trust(t.Context(), guest.Trust{CA: ca})
	if err != nil || !res.NeedsRoots {
		t.Errorf("without roots: %+v, %v", res, err)
	}
	res, err = c.Trust(t.Context(), guest.Trust{CA: ca, Roots: roots})
	if err != nil || res.NeedsRoots {
		t.Errorf("with roots: %+v, %v", res, err)
	}
	for file, want := range map[string]string{trust.CAFile: ca, trust.BundleFile: roots + ca} {
		info, err := os.Stat(filepath.Join(root, file))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != 0o644 {
			t.Errorf("%s has mode %v", file, info.Mode())
		}
		if got, err := os.ReadFile(filepath.Join(root, file)); err != nil || string(got) != want {
			t.Errorf("%s has %q, %v", file, got, err)
		}
	}
	if h, err := c.Hello(t.Context()); err != nil || h.Trust != guest.TrustDigest([]byte(ca)) {
		t.Errorf("it trusts %q, %v", h.Trust, err)
	}
	vars := environment(t, c, guest.ExecRequest{Command: guest.Command{Env: map[string]string{"GIT_SSL_CAINFO": "/command's", "CURL_CA_BUNDLE": ""}, Defaults: map[string]string{"NODE_EXTRA_CA_CERTS": "/node's", "PIP_CERT": "/node's", "PLACEHOLDER": "x"}}})
	for name, want := range map[string]string{
		"SSL_CERT_FILE": trust.BundleFile, "GIT_SSL_CAINFO": "/command's", "CURL_CA_BUNDLE": "", "PIP_CERT": "/image's",
		"NODE_EXTRA_CA_CERTS": "/node's", "DENO_CERT": trust.CAFile, "PLACEHOLDER": "x",
	} {
		if got, ok := vars[name]; got != want || !ok {
			t.Errorf("%s is %q (%v), want %q", name, got, ok, want)
		}
	}
}

func TestUnusableTrustIsRefused(t *testing.T) {
	c, root := startIn(t)
	_, err := c.Trust(t.Context(), guest.Trust{CA: "x"})
	wantCode(t, err, guest.CodeInvalid, "no certificate")
	if h, err := c.Hello(t.Context()); err != nil || h.Trust != "" {
		t.Errorf("it trusts %q, %v", h.Trust, err)
	}
	if entries, err := os.ReadDir(root); err != nil || len(entries) > 0 {
		t.Errorf("it wrote %v, %v", entries, err)
	}
}

func TestConcurrentTrustsEndAsOneOfThem(t *testing.T) {
	c, root := startIn(t)
	cas := []string{newCA(t), newCA(t), newCA(t)}
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			if _, err := c.Trust(t.Context(), guest.Trust{CA: cas[i%len(cas)]}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	got, err := os.ReadFile(filepath.Join(root, trust.BundleFile))
	if err != nil {
		t.Fatal(err)
	}
	h, err := c.Hello(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if guest.TrustDigest(got) != h.Trust {
		t.Errorf("the bundle is not of the CA that the guest names:\n%s", got)
	}
}
