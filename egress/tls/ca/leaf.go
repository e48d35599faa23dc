package ca

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"
)

const (
	// leafLife is the validity of a leaf. Clients accept no more than 398 days.
	// Leaves this short-lived need no revocation.
	leafLife = 7 * day
	// leafSpare is the minimum remaining validity of a returned leaf: clients
	// verify it once, when they connect.
	leafSpare = 2 * day
	// maxHost is the length limit of a DNS name, without its final dot.
	maxHost = 253
	// maxCommonName is the limit of X.509 (ub-common-name, RFC 5280).
	maxCommonName = 64
)

// Certificate returns a leaf for host, with its key. host is a clean name (lower
// case, ASCII, no dot at the end), or the text of an address. The leaf is signed at
// the first call, once for all concurrent callers, and then cached for some days.
func (a *Authority) Certificate(ctx context.Context, host string) (*tls.Certificate, error) {
	l := a.cache.get(host)
	l.mu.Lock()
	defer l.mu.Unlock()
	now := a.cfg.Now()
	if l.cert != nil && now.Before(l.until) {
		return l.cert, nil
	}
	signer := a.current(ctx).signer(now)
	cert, err := a.newLeaf(signer, host, now)
	if err != nil {
		return nil, err
	}
	l.cert, l.until = cert, cert.Leaf.NotAfter.Add(-leafSpare)
	return cert, nil
}

func (a *Authority) newLeaf(by root, host string, now time.Time) (*tls.Certificate, error) {
	template := &x509.Certificate{ // with a random serial number of 20 bytes
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(leafLife),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		SubjectKeyId:          a.keyID,
	}
	if template.NotAfter.After(by.cert.NotAfter) {
		template.NotAfter = by.cert.NotAfter
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.Zone() == "" {
		template.IPAddresses = append(template.IPAddresses, ip.AsSlice())
	} else if isName(host) {
		template.DNSNames = []string{host}
		if len(host) <= maxCommonName {
			template.Subject = pkix.Name{CommonName: host} // some clients show it
		}
	} else {
		return nil, fmt.Errorf("sign a certificate for %.80q: %w", host, errNoName)
	}
	leaf, err := sign(template, by.cert, &a.key.PublicKey, by.key)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate for %s: %w", host, err)
	}
	return &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: a.key, Leaf: leaf}, nil
}

// sign returns the certificate of a template and a public key, signed by the key of parent.
func sign(template, parent *x509.Certificate, public *ecdsa.PublicKey, key *ecdsa.PrivateKey) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

var errNoName = errors.New("neither a host name nor an address")

// isName reports whether host is a name that a certificate may contain; above all,
// it rejects wildcards.
func isName(host string) bool {
	if len(host) == 0 || len(host) > maxHost {
		return false
	}
	return strings.Trim(host, "abcdefghijklmnopqrstuvwxyz0123456789-_.") == ""
}
