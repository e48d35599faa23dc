// Package testca makes certificate authorities and certificates for servers in tests
// and measurements.
package testca

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"net"
	"time"
)

// validity of all certificates, from an hour ago.
const validity = 24 * time.Hour

// Authority signs certificates. It is safe for concurrent use.
type Authority struct {
	Certificate *x509.Certificate
	Key         *ecdsa.PrivateKey
}

// NewAuthority makes an authority with a P-256 key.
func NewAuthority(subject pkix.Name) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := newTemplate(subject)
	template.IsCA, template.BasicConstraintsValid, template.KeyUsage = true, true, x509.KeyUsageCertSign
	// Key identifiers distinguish authorities of one subject for OpenSSL. Leaves name
	// them, too: Python's TLS rejects a chain without.
	template.SubjectKeyId = []byte(rand.Text())
	template.AuthorityKeyId = template.SubjectKeyId
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &Authority{Certificate: cert, Key: key}, nil
}

// PEM returns the authority's certificate.
func (a *Authority) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate.Raw})
}

// Pool returns a pool with the authority's certificate alone.
func (a *Authority) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.Certificate)
	return p
}

// Leaf makes a server's certificate for host names, wildcards and IP addresses.
func (a *Authority) Leaf(names ...string) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	template := newTemplate(pkix.Name{CommonName: "server under test"})
	template.KeyUsage, template.ExtKeyUsage = x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.Certificate, key.Public(), a.Key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// New makes an authority, and a certificate of it for the names.
func New(names ...string) (leaf tls.Certificate, caPEM []byte, err error) {
	a, err := NewAuthority(pkix.Name{CommonName: "authority of the tests"})
	if err != nil {
		return leaf, nil, err
	}
	leaf, err = a.Leaf(names...)
	return leaf, a.PEM(), err
}

// newTemplate returns a certificate without a serial number, to which package x509 adds a
// random one.
func newTemplate(subject pkix.Name) *x509.Certificate {
	now := time.Now()
	return &x509.Certificate{Subject: subject, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(validity - time.Hour)}
}
