package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// bundleVariables name a file with all authorities that a program trusts, instead of
// its own list: OpenSSL, and with it Python's ssl and httpx, and Go; curl; Python's requests.
var bundleVariables = []string{"SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE"}

// systemBundles are where systems keep the authorities that they trust: Debian and
// Ubuntu, Fedora, openSUSE, Alpine and macOS.
var systemBundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
	"/etc/ssl/ca-bundle.pem",
	"/etc/ssl/cert.pem",
}

var errNoBundle = errors.New("this system has no bundle of certificate authorities; install ca-certificates, " +
	"or programs such as curl and Python do not trust the node (Node.js does)")

// trustBundle writes a file with the node's CA and the authorities that programs trust
// already (from bundleVariables or the system), so that other hosts stay reachable. It
// returns the file's path, which depends on the node's CA only.
func (a *app) trustBundle(ca string) (string, error) {
	own, err := os.ReadFile(ca)
	if err != nil {
		return "", err
	}
	if block, _ := pem.Decode(own); block == nil {
		return "", fmt.Errorf("%s has no certificate in PEM", ca)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	folder := filepath.Join(cache, "doze")
	file := filepath.Join(folder, fmt.Sprintf("ca-bundle-%.8x.pem", sha256.Sum256(own)))
	trusted, err := a.trusted(folder)
	if err != nil {
		return "", err
	}
	text := bytes.Join(append(trusted, own), []byte("\n"))
	if before, err := os.ReadFile(file); err == nil && bytes.Equal(before, text) {
		return file, nil
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", err
	}
	// By a new file, since programs may be reading the old one.
	temporary, err := os.CreateTemp(folder, "new-*.pem")
	if err != nil {
		return "", err
	}
	_, err = temporary.Write(text)
	if err = errors.Join(err, temporary.Chmod(0o644), temporary.Close()); err == nil {
		err = os.Rename(temporary.Name(), file)
	}
	if err != nil {
		return "", errors.Join(err, os.Remove(temporary.Name()))
	}
	return file, nil
}

// trusted are the bundles in use, but for those that doze wrote into folder.
func (a *app) trusted(folder string) ([][]byte, error) {
	var files []string
	var bundles [][]byte
	for _, variable := range bundleVariables {
		file := a.getenv(variable)
		if file == "" || filepath.Dir(file) == folder || slices.Contains(files, file) {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		files, bundles = append(files, file), append(bundles, text)
	}
	if len(bundles) > 0 {
		return bundles, nil
	}
	for _, file := range systemBundles {
		if text, err := os.ReadFile(file); err == nil {
			return [][]byte{text}, nil
		}
	}
	return nil, errNoBundle
}
