package ca

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/runtime/store"
	"github.com/doze-run/doze/runtime/store/storetest"
)

// node implements the parts of a node that an authority uses: a store, sealing keys, a
// clock.
type node struct {
	*store.Badger
	keys []string // the first seals

	mu   sync.Mutex
	puts int
	err  error // returned by PutDocument
	now  time.Time
}

func newNode(t testing.TB) *node {
	return &node{Badger: storetest.New(t), keys: []string{newSealKey()}, now: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
}

func newSealKey() string {
	key := make([]byte, 32)
	rand.Read(key)
	return base64.StdEncoding.EncodeToString(key)
}

func (n *node) PutDocument(ctx context.Context, kind, name string, value []byte) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.err != nil {
		return n.err
	}
	n.puts++
	return n.Badger.PutDocument(ctx, kind, name, value)
}

func (n *node) fail(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err = err
}

// stored returns the record.
func (n *node) stored(t testing.TB) (record []byte) {
	t.Helper()
	if err := n.Documents(t.Context(), documentKind, func(_ string, value []byte) error { record = value; return nil }); err != nil {
		t.Fatal(err)
	}
	return record
}

func (n *node) config(t testing.TB) Config {
	t.Helper()
	file := filepath.Join(t.TempDir(), "seal.key")
	if err := os.WriteFile(file, []byte(strings.Join(n.keys, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	key, err := seal.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	return Config{Documents: n, Key: key, Now: n.clock, Log: slog.New(slog.DiscardHandler)}
}

func (n *node) clock() time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.now
}

func (n *node) after(d time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.now = n.now.Add(d)
}

func (n *node) open(t testing.TB) *Authority {
	t.Helper()
	a, err := Open(t.Context(), n.config(t))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func pool(t testing.TB, bundle []byte) *x509.CertPool {
	t.Helper()
	p := x509.NewCertPool()
	if !p.AppendCertsFromPEM(bundle) {
		t.Fatalf("no certificates in %q", bundle)
	}
	return p
}

func rootsOf(bundle []byte) int { return bytes.Count(bundle, []byte("BEGIN CERTIFICATE")) }

// trusts returns an error unless a client that has this bundle accepts the leaf.
func trusts(t testing.TB, bundle []byte, cert *tls.Certificate, host string, now time.Time) error {
	t.Helper()
	_, err := cert.Leaf.Verify(x509.VerifyOptions{DNSName: host, Roots: pool(t, bundle), CurrentTime: now})
	return err
}

func certificate(t testing.TB, a *Authority, host string) *tls.Certificate {
	t.Helper()
	cert, err := a.Certificate(t.Context(), host)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func TestLeafIsTrustedForItsHostOnly(t *testing.T) {
	n := newNode(t)
	a := n.open(t)
	long := strings.Repeat("a.", 100) + "example"
	for _, host := range []string{"api.github.com", "a_b.example", long, "192.0.2.7", "2001:db8::7"} {
		cert := certificate(t, a, host)
		if err := trusts(t, a.Bundle(), cert, host, n.now); err != nil {
			t.Errorf("%s: %v", host, err)
		}
		if err := trusts(t, a.Bundle(), cert, "other.example", n.now); err == nil {
			t.Errorf("the leaf of %s is good for another host", host)
		}
		leaf := cert.Leaf
		if life := leaf.NotAfter.Sub(leaf.NotBefore); life > 398*day || leaf.IsCA || len(leaf.AuthorityKeyId) == 0 || len(leaf.SubjectKeyId) == 0 {
			t.Errorf("%s: lives %v, is a CA: %t, identifiers %x %x", host, life, leaf.IsCA, leaf.AuthorityKeyId, leaf.SubjectKeyId)
		}
		if err := trusts(t, a.Bundle(), cert, host, n.now.Add(-backdate/2)); err != nil {
			t.Errorf("a client whose clock is behind: %v", err)
		}
	}
}

func TestInvalidHostsGetNoCertificate(t *testing.T) {
	a := newNode(t).open(t)
	for _, host := range []string{"", "*.example.com", "Upper.example", "a b", "bücher.example", "fe80::1%eth0", "a\x00b", strings.Repeat("a", 254)} {
		if cert, err := a.Certificate(t.Context(), host); !errors.Is(err, errNoName) {
			t.Errorf("%q: %v, %v", host, cert, err)
		}
	}
}

func TestAuthorityIsMadeOnce(t *testing.T) {
	n := newNode(t)
	first := n.open(t).Bundle()
	again := n.open(t)
	if !bytes.Equal(first, again.Bundle()) || n.puts != 1 {
		t.Errorf("after a start of the node sandboxes are given another root (%d writes)", n.puts)
	}
	if err := trusts(t, first, certificate(t, again, "a.example"), "a.example", n.now); err != nil {
		t.Error(err)
	}
}

func TestKeyIsStoredSealed(t *testing.T) {
	n := newNode(t)
	n.open(t)
	if stored := n.stored(t); len(stored) == 0 || bytes.Contains(stored, []byte(`"key"`)) {
		t.Errorf("the record is %q", stored)
	}
}

// No sandbox would trust a new authority.
func TestRecordIsSealedAgainWhenTheKeyWasReplaced(t *testing.T) {
	n := newNode(t)
	before := n.open(t).Bundle()
	n.keys = []string{newSealKey(), n.keys[0]}
	n.fail(errors.New("the disk is full"))
	if !bytes.Equal(n.open(t).Bundle(), before) {
		t.Error("the roots are others")
	}
	n.fail(nil)
	n.open(t)
	puts := n.puts
	n.open(t)
	if n.puts != puts {
		t.Error("it is sealed again each time")
	}
	n.keys = n.keys[:1] // the old key is removed
	if !bytes.Equal(n.open(t).Bundle(), before) {
		t.Error("the roots are others")
	}
}

func TestAuthorityThatCannotBeOpenedIsNotReplaced(t *testing.T) {
	n := newNode(t)
	n.open(t)
	n.keys = []string{newSealKey()}
	if _, err := Open(t.Context(), n.config(t)); !errors.Is(err, seal.ErrOtherKey) || !strings.Contains(err.Error(), documentName) {
		t.Errorf("opened: %v", err)
	}
	if n.puts != 1 {
		t.Error("it was written over")
	}
	cfg := n.config(t)
	record := seal.Document{Store: n, Key: cfg.Key, Kind: documentKind, Name: documentName}
	if err := record.Write(t.Context(), []byte("[{}]")); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), cfg); err == nil {
		t.Error("a record of nonsense was opened")
	}
}

func TestOldRootSignsUntilSandboxesKnowTheNew(t *testing.T) {
	n := newNode(t)
	a := n.open(t)
	old := a.Bundle()

	n.after(rootLife - overlap - time.Minute)
	if got := rootsOf(a.Bundle()); got != 1 {
		t.Fatalf("%d roots before one is due", got)
	}
	n.after(time.Minute)
	both := a.Bundle()
	if got := rootsOf(both); got != 2 || !bytes.HasPrefix(both, old) {
		t.Fatalf("%d roots when one is due, the old among them: %t", got, bytes.HasPrefix(both, old))
	}
	if reopened := n.open(t).Bundle(); !bytes.Equal(both, reopened) {
		t.Error("the new root was not stored")
	}
	if err := trusts(t, old, certificate(t, a, "a.example"), "a.example", n.now); err != nil {
		t.Errorf("a sandbox that runs since before: %v", err)
	}

	n.after(overlap - handover)
	cert := certificate(t, a, "a.example")
	if err := trusts(t, both, cert, "a.example", n.now); err != nil {
		t.Errorf("a sandbox that was given both: %v", err)
	}
	if err := trusts(t, old, cert, "a.example", n.now); err == nil {
		t.Error("the old root signs until it ends")
	}

	n.after(handover)
	last := a.Bundle()
	if rootsOf(last) != 1 || bytes.Contains(last, old) {
		t.Error("the root that has ended is still handed out")
	}
	if err := trusts(t, both, certificate(t, a, "a.example"), "a.example", n.now); err != nil {
		t.Error(err)
	}
}

func TestNodeThatWasOffForYearsHasARootAgain(t *testing.T) {
	n := newNode(t)
	n.open(t)
	n.after(3 * rootLife)
	a := n.open(t)
	if err := trusts(t, a.Bundle(), certificate(t, a, "a.example"), "a.example", n.now); err != nil || rootsOf(a.Bundle()) != 1 {
		t.Errorf("%d roots: %v", rootsOf(a.Bundle()), err)
	}
}

// If a returned root were lost in a crash, sandboxes would trust a root that signs
// nothing.
func TestUnstoredRootIsNotHandedOut(t *testing.T) {
	n := newNode(t)
	a := n.open(t)
	before := a.Bundle()
	n.after(rootLife - overlap)
	n.fail(errors.New("disk full"))
	if !bytes.Equal(a.Bundle(), before) {
		t.Error("a root that is not stored was handed out")
	}
	if err := trusts(t, before, certificate(t, a, "a.example"), "a.example", n.now); err != nil {
		t.Errorf("meanwhile: %v", err)
	}
	n.fail(nil)
	if rootsOf(a.Bundle()) != 2 {
		t.Error("it was not tried again")
	}
}

func TestLeafIsSignedOnceAndAgainBeforeItEnds(t *testing.T) {
	n := newNode(t)
	a := n.open(t)
	var wg sync.WaitGroup
	serials := make([]string, 32)
	for i := range serials {
		wg.Go(func() { serials[i] = certificate(t, a, "a.example").Leaf.SerialNumber.String() })
	}
	wg.Wait()
	for _, s := range serials[1:] {
		if s != serials[0] {
			t.Fatal("several were signed")
		}
	}
	n.after(leafLife - leafSpare)
	cert := certificate(t, a, "a.example")
	if cert.Leaf.SerialNumber.String() == serials[0] || cert.Leaf.NotAfter.Sub(n.now) < leafSpare {
		t.Errorf("the leaf ends in %v", cert.Leaf.NotAfter.Sub(n.now))
	}
}

func TestCacheEvictsUnusedHosts(t *testing.T) {
	var c cache
	used, unused := c.get("used"), c.get("unused")
	for i := range 2 * cacheSize {
		c.get(fmt.Sprint(i))
		if c.get("used") != used {
			t.Fatalf("a host in use was evicted after %d others", i)
		}
		if n := len(c.recent) + len(c.older); n > cacheSize {
			t.Fatalf("%d leaves", n)
		}
	}
	if c.get("unused") == unused {
		t.Error("the unused host is cached")
	}
}

// Sandboxes also use verifiers other than Go's.
func TestOpenSSLAcceptsLeaf(t *testing.T) {
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Fatal("openssl is missing: run packaging/host/setup --with-tests")
	}
	cfg := newNode(t).config(t)
	cfg.Now = nil // openssl uses the real time
	a, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	bundle := filepath.Join(t.TempDir(), "roots.pem")
	if err := os.WriteFile(bundle, a.Bundle(), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	served := make(chan error, 1)
	go func() {
		conn, err := l.Accept()
		if err == nil {
			err = tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{*certificate(t, a, "api.example.com")}}).Handshake()
			conn.Close()
		}
		served <- err
	}()
	cmd := exec.Command(openssl, "s_client", "-connect", l.Addr().String(), "-servername", "api.example.com",
		"-verify_hostname", "api.example.com", "-verify_return_error", "-x509_strict", "-no-CApath", "-CAfile", bundle)
	out, err := cmd.CombinedOutput()
	if served := <-served; served != nil || !strings.Contains(string(out), "Verify return code: 0") {
		t.Errorf("%v, %v: %s", err, served, out)
	}
}

func BenchmarkFirstCertificateOfHost(b *testing.B) {
	a := newNode(b).open(b)
	i := 0
	b.ReportAllocs()
	for b.Loop() {
		i++
		certificate(b, a, fmt.Sprintf("host-%d.example", i))
	}
}

func BenchmarkCertificateAgain(b *testing.B) {
	a := newNode(b).open(b)
	b.ReportAllocs()
	for b.Loop() {
		certificate(b, a, "a.example")
	}
}
