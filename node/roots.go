package node

import (
	"cmp"
	"errors"
	"fmt"
	"os"
)

// rootFiles are the distributions' files of public CAs, as crypto/x509 searches them.
var rootFiles = []string{
	"/etc/ssl/certs/ca-certificates.crt",                // Debian, Ubuntu, Alpine, Arch
	"/etc/pki/tls/certs/ca-bundle.crt",                  // Fedora, RHEL
	"/etc/ssl/ca-bundle.pem",                            // SUSE
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // RHEL
	"/etc/ssl/cert.pem",                                 // Alpine
}

// publicRoots returns the PEM of the CAs that this host trusts, for sandboxes of images
// without any. It reads them again each time, because the host renews them.
func publicRoots() ([]byte, error) {
	if file := os.Getenv("SSL_CERT_FILE"); file != "" {
		return os.ReadFile(file)
	}
	var failed error
	for _, file := range rootFiles {
		roots, err := os.ReadFile(file)
		if err == nil {
			return roots, nil
		}
		if !errors.Is(err, os.ErrNotExist) {
			failed = cmp.Or(failed, err)
		}
	}
	return nil, fmt.Errorf("this host has no public CAs, and an image has none either: install ca-certificates: %w", cmp.Or(failed, os.ErrNotExist))
}
