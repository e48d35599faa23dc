//go:build integration

package podman

import (
	"bytes"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/runtime/guest/trust"
	"github.com/doze-run/doze/testkit"
	"github.com/doze-run/doze/testkit/testca"
)

// authority is a CA like a node's.
type authority struct {
	*testca.Authority
	t   *testing.T
	pem string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a, err := testca.NewAuthority(pkix.Name{CommonName: "doze node of the tests", Organization: []string{"doze"}})
	if err != nil {
		t.Fatal(err)
	}
	return &authority{a, t, string(a.PEM())}
}

// serve starts a web server in the sandbox on a port. It presents a leaf of the CA for
// localhost, and serves a folder with a git repository.
func (a *authority) serve(b *box, port int) {
	a.t.Helper()
	leaf, err := a.Leaf("localhost")
	if err != nil {
		a.t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(leaf.PrivateKey)
	if err != nil {
		a.t.Fatal(err)
	}
	file := fmt.Sprintf("/srv/%d.pem", port)
	both := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Certificate[0]}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})...)
	if _, err := b.guest.WriteFile(testkit.Context(a.t), file, 0o600, bytes.NewReader(both)); err != nil {
		a.t.Fatal(err)
	}
	b.must("mkdir -p /srv/www && cd /srv/www && [ -d repo.git ] || { git init -q --bare repo.git && git -C repo.git update-server-info; }")
	_, err = b.guest.StartProcess(testkit.Context(a.t), guest.ProcessSpec{Name: fmt.Sprint("web-", port), Command: guest.Command{Cwd: "/srv/www", Argv: []string{"python3", "-c", webServer, file, fmt.Sprint(port)}}})
	if err != nil {
		a.t.Fatal(err)
	}
	if err := b.guest.PortReady(testkit.Context(a.t), uint16(port), testkit.Patience/2); err != nil {
		a.t.Fatal(err)
	}
}

const webServer = `
import http.server, ssl, sys
context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
context.load_cert_chain(sys.argv[1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), http.server.SimpleHTTPRequestHandler)
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
`

// clients reach https://localhost:PORT in their default configuration.
var clients = map[string]string{
	"curl":    "curl -sSf -o /dev/null https://localhost:PORT/",
	"python":  `python3 -c 'import urllib.request; urllib.request.urlopen("https://localhost:PORT/").read()'`,
	"git":     "git ls-remote https://localhost:PORT/repo.git",
	"openssl": "openssl s_client -verify_return_error -verify_hostname localhost -connect localhost:PORT </dev/null",
}

// guided clients need a variable, because they have their own CAs.
var guided = map[string]string{
	"node fetch": `node -e 'fetch("https://localhost:PORT/").then(r => process.exit(r.ok ? 0 : 1), e => { console.error(e.cause); process.exit(1) })'`,
	"node https": `node -e 'require("https").get("https://localhost:PORT/", r => process.exit(0)).on("error", e => { console.error(e); process.exit(1) })'`,
	"npm":        "npm view nothing --registry https://localhost:PORT/ --fetch-retries 0 2>&1 | grep E404",
	"pip":        "! pip download --no-cache-dir --retries 0 --index-url https://localhost:PORT/simple nothing 2>&1 | grep -i certificate",
}

func command(client string, port int) string {
	return strings.ReplaceAll(client, "PORT", fmt.Sprint(port))
}

// wantTrust fails the test unless each client reaches, or refuses, the server.
func wantTrust(b *box, when string, port int, want bool) {
	b.t.Helper()
	check := func(name, client string) {
		b.t.Helper()
		if out, code := b.try(client); (code == 0) != want {
			b.t.Errorf("%s: %s reaches the server: %v, want %v\n%s", when, name, code == 0, want, out)
		}
	}
	for name, client := range clients {
		check(name, command(client, port))
		check(name+" without variables", "env -i HOME=/root PATH=$PATH sh -c "+quote(command(client, port)))
	}
	for name, client := range guided {
		check(name, command(client, port))
	}
}

func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

func (b *box) trust(t guest.Trust) guest.TrustResult {
	b.t.Helper()
	res, err := b.guest.Trust(testkit.Context(b.t), t)
	if err != nil {
		b.t.Fatal(err)
	}
	return res
}

func TestClientsTrustTheNodeByDefault(t *testing.T) {
	b := open(t).boot(t, baseImage)
	older, newer := newAuthority(t), newAuthority(t)
	older.serve(b, 8001)
	newer.serve(b, 8002)
	wantTrust(b, "before", 8001, false)
	if res := b.trust(guest.Trust{CA: older.pem}); res.NeedsRoots {
		t.Error("the base image has no public CAs")
	}
	wantTrust(b, "with the CA", 8001, true)
	if n := b.must("grep -c BEGIN $SSL_CERT_FILE"); len(n) < 3 {
		t.Errorf("the bundle has only %s CAs", n)
	}
	// The distribution's own tool preserves it.
	b.must("update-ca-certificates --fresh")
	wantTrust(b, "after update-ca-certificates", 8001, true)
	b.trust(guest.Trust{CA: older.pem + newer.pem})
	wantTrust(b, "in the overlap", 8001, true)
	wantTrust(b, "in the overlap", 8002, true)
	b.trust(guest.Trust{CA: newer.pem})
	wantTrust(b, "after the renewal", 8001, false)
	wantTrust(b, "after the renewal", 8002, true)

	before := b.must("find /etc/ssl /etc/doze /usr/local/share -newermt '2000-01-01' -printf '%p %T@ %s\\n' | sort")
	if err := b.n.Stop(testkit.Context(t), b.spec.ID, time.Second); err != nil {
		t.Fatal(err)
	}
	b.start()
	if h, err := b.guest.Hello(testkit.Context(t)); err != nil || h.Trust != "" {
		t.Errorf("the next run has the trust %q, %v", h.Trust, err)
	}
	b.trust(guest.Trust{CA: newer.pem})
	if after := b.must("find /etc/ssl /etc/doze /usr/local/share -newermt '2000-01-01' -printf '%p %T@ %s\\n' | sort"); after != before {
		t.Error("the next run wrote the existing files again")
	}
	newer.serve(b, 8002)
	wantTrust(b, "in the next run", 8002, true)
}

// Commands may run as any user.
func TestTrustIsReadableByAll(t *testing.T) {
	b := open(t).boot(t, baseImage)
	b.trust(guest.Trust{CA: newAuthority(t).pem})
	b.must("useradd -m someone && runuser -u someone -- cat $NODE_EXTRA_CA_CERTS $SSL_CERT_FILE >/dev/null")
}

func TestImagesWithoutCAsGetThem(t *testing.T) {
	node, public := newAuthority(t), newAuthority(t)
	for _, image := range everyImage[1:] {
		b := open(t).boot(t, image)
		if res := b.trust(guest.Trust{CA: node.pem}); !res.NeedsRoots {
			t.Errorf("%s has public CAs", image)
		}
		if res := b.trust(guest.Trust{CA: node.pem, Roots: public.pem}); res.NeedsRoots {
			t.Errorf("%s still wants them", image)
		}
		for file, want := range map[string]string{trust.CAFile: node.pem, trust.BundleFile: public.pem + node.pem} {
			content, err := b.guest.ReadFile(testkit.Context(t), file, nil)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(content.Body)
			content.Body.Close()
			if err != nil || string(got) != want {
				t.Errorf("%s: %s has %q, %v", image, file, got, err)
			}
		}
	}
}
