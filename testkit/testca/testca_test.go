package testca_test

import (
	"bytes"
	"crypto/x509"
	"crypto/x509/pkix"
	"testing"

	"github.com/doze-run/doze/testkit/testca"
)

func TestLeafIsValidForItsNames(t *testing.T) {
	leaf, pem, err := testca.New("a.test", "*.b.test", "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(leaf.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		t.Fatalf("no certificate in %q", pem)
	}
	for name, valid := range map[string]bool{"a.test": true, "x.b.test": true, "127.0.0.1": true, "c.test": false, "127.0.0.2": false} {
		if _, err := cert.Verify(x509.VerifyOptions{DNSName: name, Roots: roots}); (err == nil) != valid {
			t.Errorf("%s: %v", name, err)
		}
	}
	other, err := testca.NewAuthority(pkix.Name{CommonName: "another"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cert.Verify(x509.VerifyOptions{DNSName: "a.test", Roots: other.Pool()}); err == nil {
		t.Error("another authority verifies it")
	}
}

// OpenSSL and Python's TLS need these identifiers.
func TestCertificatesNameTheKeyOfTheirAuthority(t *testing.T) {
	a, err := testca.NewAuthority(pkix.Name{CommonName: "authority"})
	if err != nil {
		t.Fatal(err)
	}
	if id := a.Certificate.AuthorityKeyId; len(id) == 0 || !bytes.Equal(id, a.Certificate.SubjectKeyId) {
		t.Errorf("the authority names the key %x, want its own %x", id, a.Certificate.SubjectKeyId)
	}
	leaf, err := a.Leaf("a.test")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(leaf.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	if len(cert.AuthorityKeyId) == 0 || !bytes.Equal(cert.AuthorityKeyId, a.Certificate.SubjectKeyId) {
		t.Errorf("authority key %x, want %x", cert.AuthorityKeyId, a.Certificate.SubjectKeyId)
	}
}
