package main

import (
	"encoding/pem"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestEnv(t *testing.T) {
	r := newRig(t)
	home := filepath.Join(t.TempDir(), "it's")
	if err := os.MkdirAll(home, 0o700); err != nil {
		t.Fatal(err)
	}
	r.env["DOZE_HOME"], r.env["DOZE_HTTPS_PORT"] = home, "94430"
	r.refused(`DOZE_HTTPS_PORT: invalid port "94430"`, "env")
	r.env["DOZE_HTTPS_PORT"] = "9443"
	r.refused("start the node", "env")
	if err := os.WriteFile(filepath.Join(home, "token"), []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ca := home + "/caddy/pki/authorities/local/root.crt"
	want := "https://127.0.0.1:9443/api/v1|secret|" + ca + "|" + ca
	print := `printf '%s|%s|%s|%s' "$DOZE_API" "$DOZE_TOKEN" "$DOZE_CA" "$NODE_EXTRA_CA_CERTS"`
	// Without a CA there is nothing else to print.
	got := r.doze("env")
	if got.code != 0 || !strings.Contains(got.err, "SSL_CERT_FILE, CURL_CA_BUNDLE and REQUESTS_CA_BUNDLE are omitted") {
		t.Errorf("got %+v", got)
	}
	if out, err := exec.Command("sh", "-c", got.out+print).Output(); err != nil || string(out) != want {
		t.Errorf("got %q, %v; want %q", out, err, want)
	}
}

// trustedServer is a server like a node's, whose folder home is.
func trustedServer(t *testing.T, r *rig) *httptest.Server {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "hello") }))
	t.Cleanup(server.Close)
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // of handshakes that fail
	home := t.TempDir()
	authority := filepath.Join(home, "caddy/pki/authorities/local")
	if err := os.MkdirAll(authority, 0o700); err != nil {
		t.Fatal(err)
	}
	tree{"root.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))}.write(t, authority)
	tree{"token": "secret"}.write(t, home)
	_, port, _ := net.SplitHostPort(server.Listener.Addr().String())
	r.env["DOZE_HOME"], r.env["DOZE_HTTPS_PORT"] = home, port
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	return server
}

// Clients that every machine of the tests has; test/up/run has requests and httpx too.
func TestProgramsTrustTheNodeByWhatEnvPrints(t *testing.T) {
	r := newRig(t)
	trustedServer(t, r)
	clients := map[string]string{
		"curl":   `curl -fsS "$DOZE_API"`,
		"Python": `python3 -c 'import os, urllib.request as u; print(u.urlopen(os.environ["DOZE_API"]).read().decode(), end="")'`,
		"Node":   `node -e 'fetch(process.env.DOZE_API).then(r => r.text()).then(t => process.stdout.write(t))'`,
	}
	for name, command := range clients {
		address := `export DOZE_API=https://127.0.0.1:` + r.env["DOZE_HTTPS_PORT"] + "/api/v1\n"
		if out, err := exec.Command("sh", "-c", address+command).Output(); err == nil {
			t.Errorf("%s trusts the node without these variables: %q", name, out)
		}
		if out, err := exec.Command("sh", "-c", r.ok("env")+command).CombinedOutput(); err != nil || string(out) != "hello" {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
}

func TestOtherHostsAreTrustedAsBefore(t *testing.T) {
	r := newRig(t)
	trustedServer(t, r)
	count := func(file string) int {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Count(string(text), "BEGIN CERTIFICATE")
	}
	variables := func() map[string]string { return decodeJSON[map[string]string](t, r.ok("env", "--json")) }
	first := variables()
	bundle := first["SSL_CERT_FILE"]
	if system := count("/etc/ssl/certs/ca-certificates.crt"); system == 0 || count(bundle) != system+1 {
		t.Errorf("%d authorities in the system's bundle and %d in %s", system, count(bundle), bundle)
	}
	if first["CURL_CA_BUNDLE"] != bundle || first["REQUESTS_CA_BUNDLE"] != bundle || filepath.Dir(filepath.Dir(bundle)) != os.Getenv("XDG_CACHE_HOME") {
		t.Errorf("got %v", first)
	}
	// The bundle that doze wrote is not one to add to.
	r.env["SSL_CERT_FILE"] = bundle
	before := count(bundle)
	if variables(); count(bundle) != before {
		t.Errorf("the bundle has grown from %d to %d authorities", before, count(bundle))
	}
	// One that the user has set is.
	mine := filepath.Join(t.TempDir(), "mine.pem")
	tree{"mine.pem": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("mine")}))}.write(t, filepath.Dir(mine))
	r.env["CURL_CA_BUNDLE"] = mine
	if variables(); count(bundle) != 2 {
		t.Errorf("%d authorities, want the user's and the node's", count(bundle))
	}
}
