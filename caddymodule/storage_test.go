package caddymodule

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/smallstep/certificates/acme"

	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/store"
	"github.com/doze-run/doze/testkit"
)

// newStorageSite is newSite with the storage in the node's store.
func newStorageSite(t *testing.T) *site {
	t.Helper()
	s := prepareSite(t)
	s.storage = "doze"
	s.start("")
	return s
}

// certificate returns the certificate that the site has for a host.
func (s *site) certificate(host string) *x509.Certificate {
	s.t.Helper()
	conn, err := tls.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)), &tls.Config{ServerName: host, InsecureSkipVerify: true})
	if err != nil {
		s.t.Fatal(err)
	}
	defer conn.Close()
	return conn.ConnectionState().PeerCertificates[0]
}

// restart ends Caddy and starts it again.
func (s *site) restart() {
	s.t.Helper()
	if err := caddy.Stop(); err != nil {
		s.t.Fatal(err)
	}
	if err := store.InUse(node.StoreDir(s.home)); err != nil {
		s.t.Fatalf("after the end: %v", err)
	}
	s.start("")
}

// storageFiles returns the files in the folder that Caddy's own storage would use.
func (s *site) storageFiles() (files []string) {
	s.t.Helper()
	err := filepath.WalkDir(filepath.Join(s.home, "caddy"), func(file string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			files = append(files, strings.TrimPrefix(file, s.home+"/"))
		}
		return err
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return files
}

const rootFile = "caddy/pki/authorities/local/root.crt"

func TestCertificatesOutliveTheProcessInTheNodesStore(t *testing.T) {
	s := newStorageSite(t)
	testkit.Diff(t, "the files of certificates", s.storageFiles(), []string{rootFile})
	root, err := os.ReadFile(filepath.Join(s.home, rootFile))
	if err != nil {
		t.Fatal(err)
	}
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(root)
	before := s.certificate(apiHost)
	s.restart()
	if after := s.certificate(apiHost); after.SerialNumber.Cmp(before.SerialNumber) != 0 {
		t.Errorf("the restart issued certificate %d, before it was %d", after.SerialNumber, before.SerialNumber)
	}
	conn, err := tls.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)), &tls.Config{ServerName: apiHost, RootCAs: trusted})
	if err != nil {
		t.Fatalf("a client that trusts the file: %v", err)
	}
	conn.Close()
}

func TestReloadsShareTheStoreAndTheLastReleasesIt(t *testing.T) {
	s := newStorageSite(t)
	before := s.certificate(apiHost)
	for range 3 {
		s.mustLoad("", "")
		if n, _ := stores.References(s.home); n != 2 { // of the node and the configuration
			t.Fatalf("the store has %d references", n)
		}
		if err := s.load("", "http://:99999 {\n\trespond hello\n}"); err == nil {
			t.Fatal("a listener on port 99999 was made")
		}
		if n, _ := stores.References(s.home); n != 2 {
			t.Fatalf("after a reload that failed the store has %d references", n)
		}
	}
	if after := s.certificate(apiHost); after.SerialNumber.Cmp(before.SerialNumber) != 0 {
		t.Error("a reload issued another certificate")
	}
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	if _, open := stores.References(s.home); open {
		t.Error("the store is open after the end")
	}
}

func TestAReloadFromFilesToTheStoreTakesCertificatesOver(t *testing.T) {
	s := newSite(t)
	before := s.certificate(apiHost)
	s.storage = "doze"
	s.mustLoad("", "")
	s.restart()
	if after := s.certificate(apiHost); after.SerialNumber.Cmp(before.SerialNumber) != 0 {
		t.Errorf("the certificate is %d, before it was %d", after.SerialNumber, before.SerialNumber)
	}
	// A return to the files finds them.
	s.storage = ""
	s.mustLoad("", "")
	s.restart()
	if after := s.certificate(apiHost); after.SerialNumber.Cmp(before.SerialNumber) != 0 {
		t.Errorf("from files again, the certificate is %d, before it was %d", after.SerialNumber, before.SerialNumber)
	}
}

func TestAStoreOfAnotherProcessIsRefused(t *testing.T) {
	s := prepareSite(t)
	s.storage = "doze"
	other, err := node.OpenStore(s.home, testkit.NewLog(t).Logger())
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := s.load("", ""); err == nil || !strings.Contains(err.Error(), store.ErrInUse.Error()) {
		t.Errorf("the load gave %v", err)
	}
	if _, open := stores.References(s.home); open {
		t.Error("the store is open")
	}
}

func TestAReloadToAnotherFolderCreatesNoStoreThere(t *testing.T) {
	s := newStorageSite(t)
	home, other := s.home, t.TempDir()
	s.home = other
	err := s.load("", "")
	s.home = home
	if want := (node.FixedError{Option: "data", Have: home, Want: other}).Error(); err == nil || !strings.Contains(err.Error(), want) {
		t.Fatalf("the reload gave %v, want %s", err, want)
	}
	if entries, err := os.ReadDir(other); err != nil || len(entries) > 0 {
		t.Errorf("the folder has %v, %v", entries, err)
	}
}

// The node and the storage of a real start: the node cannot open because it finds no guest,
// but the storage has opened its store.
func TestTheNodeUsesTheStoreOfTheStorage(t *testing.T) {
	s := prepareSite(t)
	s.storage = "doze"
	if err := s.load("guest "+s.home+"/none", ""); err == nil || !strings.Contains(err.Error(), "read the guest") {
		t.Errorf("the load gave %v", err)
	}
	if _, open := stores.References(s.home); open {
		t.Error("the store is open after a start that failed")
	}
	if err := store.InUse(node.StoreDir(s.home)); err != nil {
		t.Error(err)
	}
}

// An ACME server of Caddy issues a certificate to another site of it. The challenge goes
// through the storage, too.
func TestCertificatesAndAccountsOfACMEAreInTheNodesStore(t *testing.T) {
	t.Setenv("XDG_DATA_HOME", t.TempDir()) // for the database of the server
	s := newStorageSite(t)
	defer func(port int) { acme.InsecurePortTLSALPN01 = port }(acme.InsecurePortTLSALPN01)
	acme.InsecurePortTLSALPN01 = s.port
	server := "127.0.0.1 {\n\ttls internal\n\tacme_server\n}\n"
	client := fmt.Sprintf(`localhost {
	tls {
		issuer acme https://127.0.0.1:%d/acme/local/directory {
			trusted_roots %s/%s
			disable_http_challenge
		}
	}
	respond hello
}
`, s.port, s.home, rootFile)
	s.mustLoad("", server)
	s.awaitCertificate("")
	s.mustLoad("", server+client)
	s.awaitCertificate("localhost")
	before := s.certificate("localhost")

	issuer := fmt.Sprintf("127.0.0.1-%d-acme-local-directory", s.port)
	storage := caddy.ActiveContext().Storage()
	for _, key := range []string{
		"certificates/" + issuer + "/localhost/localhost.crt", "certificates/" + issuer + "/localhost/localhost.key", "acme/" + issuer + "/users/default/default.key",
	} {
		if _, err := storage.Load(t.Context(), key); err != nil {
			t.Errorf("%s: %v", key, err)
		}
	}
	testkit.Diff(t, "the files of certificates", s.storageFiles(), []string{rootFile})

	s.restart()
	s.mustLoad("", server+client)
	s.awaitCertificate("localhost")
	if after := s.certificate("localhost"); after.SerialNumber.Cmp(before.SerialNumber) != 0 {
		t.Errorf("the restart obtained certificate %d, before it was %d", after.SerialNumber, before.SerialNumber)
	}
}
