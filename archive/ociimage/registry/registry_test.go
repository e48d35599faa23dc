package registry

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// open opens the repository shop of a server under a host name.
func open(t *testing.T, u userFolders, server *httptest.Server, host string, skipVerify bool) (*Repository, error) {
	t.Helper()
	return Open(testkit.Context(t), Config{
		Reference: Reference{host, "shop", "1"}, SkipTLSVerify: skipVerify, Getenv: u.getenv,
		dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, server.Listener.Addr().String())
		},
	})
}

func serve(t *testing.T, encrypted bool, status int) *httptest.Server {
	t.Helper()
	return serveHandler(t, encrypted, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(status) }))
}

func serveHandler(t *testing.T, encrypted bool, handler http.Handler) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(handler)
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	if encrypted {
		s.StartTLS()
	} else {
		s.Start()
	}
	t.Cleanup(s.Close)
	return s
}

// TestPlainHTTPNeedsLoopbackOrPermission: otherwise, the credentials could be read on the network.
func TestPlainHTTPNeedsLoopbackOrPermission(t *testing.T) {
	u := newUser(t)
	server := serve(t, false, http.StatusUnauthorized)
	for _, c := range []struct {
		host       string
		skipVerify bool
		want       string
	}{
		{"localhost:5000", false, ""},
		{"127.0.0.1:5000", false, ""},
		{"registry.example.com", true, ""},
		{"registry.example.com", false, "registry.example.com speaks HTTP without encryption; use --tls-verify=false in a network that you trust"},
		{"192.168.1.1:5000", false, "speaks HTTP without encryption"},
	} {
		r, err := open(t, u, server, c.host, c.skipVerify)
		if c.want != "" {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v, want %q", c.host, err, c.want)
			}
			continue
		}
		testkit.NoError(t, "open "+c.host, err)
		if !r.remote.PlainHTTP {
			t.Errorf("%s: HTTPS to a server that speaks HTTP", c.host)
		}
		r.Close()
	}
}

// TestPlainHTTPIsTriedAgain: like HTTPS, after a connection that breaks off. Other failures are reported as they are.
func TestPlainHTTPIsTriedAgain(t *testing.T) {
	u := newUser(t)
	var requests atomic.Int32
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if requests.Add(1) == 1 {
			panic(http.ErrAbortHandler)
		}
		w.WriteHeader(http.StatusUnauthorized)
	}))
	t.Cleanup(s.Close)
	r, err := open(t, u, s, "127.0.0.1:5000", false)
	testkit.NoError(t, "open", err)
	r.Close()
	if !r.remote.PlainHTTP || requests.Load() != 2 {
		t.Errorf("HTTP %t, %d requests", r.remote.PlainHTTP, requests.Load())
	}
	_, err = open(t, u, serve(t, false, http.StatusNotFound), "127.0.0.1:5000", false)
	if want := "127.0.0.1:5000 is not a registry: it responds 404"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("without a registry: %v, want %q", err, want)
	}
}

func TestCertificatesAreVerified(t *testing.T) {
	u := newUser(t)
	const host = "example.com:5000" // the certificate has example.com
	server := serve(t, true, http.StatusOK)
	_, err := open(t, u, server, host, false)
	wanted := filepath.Join("~", ".config", "containers", "certs.d", host, "ca.crt")
	if err == nil || !strings.Contains(err.Error(), "the certificate of "+host+" is not trusted") || !strings.Contains(err.Error(), wanted) {
		t.Errorf("distrusted: %v", err)
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		t.Error("the client would print the remedy for the certificate of the API")
	}
	connected := func(skipVerify bool) {
		t.Helper()
		r, err := open(t, u, server, host, skipVerify)
		testkit.NoError(t, "open", err)
		if r.remote.PlainHTTP {
			t.Error("HTTP to a server that speaks HTTPS")
		}
		r.Close()
	}
	connected(true)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	file := write(t, filepath.Join(u.env["HOME"], ".config", "containers", "certs.d", host, "ca.crt"), string(ca))
	connected(false)
	write(t, file, "no certificate")
	if _, err := open(t, u, server, host, false); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("without a certificate in it: %v", err)
	}
}

func TestRegistryThatCannotBeReachedIsNamed(t *testing.T) {
	u := newUser(t)
	server := serve(t, true, http.StatusNotFound)
	if _, err := open(t, u, server, "example.com", true); err == nil || err.Error() != "example.com is not a registry: it responds 404 Not Found to GET /v2/" {
		t.Errorf("a server that is not a registry: %v", err)
	}
	server.Close()
	for _, host := range []string{"example.com", "localhost:5000"} {
		if _, err := open(t, u, server, host, false); err == nil || !strings.HasPrefix(err.Error(), "connect to "+host+": dial tcp") {
			t.Errorf("unreachable: %v", err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := Open(ctx, Config{Reference: Reference{"localhost:5000", "shop", "1"}, Getenv: u.getenv})
	testkit.ErrorIs(t, "open", err, context.Canceled)
}

func TestBusyRegistryIsAskedAgain(t *testing.T) {
	var requests atomic.Int64
	server := serveHandler(t, true, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if requests.Add(1) == 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	}))
	r, err := open(t, newUser(t), server, "example.com", true)
	testkit.NoError(t, "open", err)
	r.Close()
	failing := serve(t, true, http.StatusServiceUnavailable)
	if _, err := open(t, newUser(t), failing, "example.com", true); err == nil || err.Error() != "connect to example.com: it responds 503 Service Unavailable to GET /v2/" {
		t.Errorf("a registry that fails: %v", err)
	}
}

func TestRedirectsDoNotLeaveHTTPS(t *testing.T) {
	plain := serve(t, false, http.StatusOK)
	server := serveHandler(t, true, http.RedirectHandler(plain.URL, http.StatusTemporaryRedirect))
	if _, err := open(t, newUser(t), server, "example.com", true); err == nil || !strings.Contains(err.Error(), "redirects from HTTPS to http://") {
		t.Errorf("redirect to HTTP: %v", err)
	}
}

// TestLayersOfEqualContentHaveEqualDigests: otherwise, a registry would get the layers of a base image
// with each push.
func TestLayersOfEqualContentHaveEqualDigests(t *testing.T) {
	content := strings.Repeat("some content of a layer\n", 100_000)
	dir := t.TempDir()
	first, err := spool(dir, strings.NewReader(content))
	testkit.NoError(t, "spool", err)
	defer first.close()
	second, err := spool(dir, io.MultiReader(strings.NewReader(content[:7]), strings.NewReader(content[7:5000]), strings.NewReader(content[5000:])))
	testkit.NoError(t, "spool", err)
	second.close()
	if first.Digest != second.Digest || first.Size >= int64(len(content)) {
		t.Errorf("%+v and %+v", first.Descriptor, second.Descriptor)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("the folder has %v, %v", left, err) // one file is open
	}
}

func TestTemporaryFilesAreNotInMemory(t *testing.T) {
	env := map[string]string{}
	getenv := func(key string) string { return env[key] }
	if got := TemporaryFolder(getenv); got != "/var/tmp" {
		t.Errorf("the default is %s", got)
	}
	env["TMPDIR"] = "/elsewhere"
	if got := TemporaryFolder(getenv); got != "/elsewhere" {
		t.Errorf("with TMPDIR: %s", got)
	}
}
