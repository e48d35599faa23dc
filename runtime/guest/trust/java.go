package trust

import (
	"bytes"
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// keystoreFiles are where the Java of a distribution, or of an image that is made
// for Java, keeps the CAs that it trusts; a * stands for any name.
var keystoreFiles = []string{
	"/etc/ssl/certs/java/cacerts",              // Debian, Ubuntu, Alpine
	"/etc/pki/ca-trust/extracted/java/cacerts", // Fedora, RHEL
	"/var/lib/ca-certificates/java-cacerts",    // SUSE
	"/usr/lib/jvm/*/lib/security/cacerts",
	"/usr/lib/jvm/*/jre/lib/security/cacerts", // Java 8
	"/opt/java/openjdk/lib/security/cacerts",
	"/opt/java/*/lib/security/cacerts",
}

// keystores adds the CAs to Java's stores. Java has no variable for that, but one
// with which each start of it writes a line to stderr.
func (in *installation) keystores() {
	files := keystoreFiles
	for _, kv := range in.Env {
		if home, ok := strings.CutPrefix(kv, "JAVA_HOME="); ok && path.IsAbs(home) {
			files = append(files[:len(files):len(files)], path.Join(home, "lib/security/cacerts"), path.Join(home, "jre/lib/security/cacerts"))
		}
	}
	seen := map[string]bool{}
	for _, pattern := range files {
		found := []string{pattern}
		if strings.Contains(pattern, "*") {
			found, _ = filepath.Glob(in.host(pattern)) // the pattern is a good one
			for i, file := range found {
				found[i] = path.Join("/", strings.TrimPrefix(file, in.Root))
			}
		}
		for _, file := range found {
			real, err := in.resolve(file)
			if err != nil || seen[real] {
				continue
			}
			seen[real] = true
			if err := in.keystore(real); err != nil {
				in.note(fmt.Errorf("Java's CAs in %s: %w", file, err))
			}
		}
	}
}

// keystore adds the CAs to one store, in the format that it has.
func (in *installation) keystore(file string) error {
	store, err := in.read(file)
	if err != nil {
		return err
	}
	updated, err := updateKeystore(store, in.certs, in.stale)
	if err != nil {
		return err
	}
	return in.replace(file, updated)
}

// updateKeystore returns a store without the stale certificates and with the others.
func updateKeystore(store []byte, certs, stale []*certificate) ([]byte, error) {
	changed := slices.ContainsFunc(certs, func(c *certificate) bool { return !bytes.Contains(store, c.der) }) ||
		slices.ContainsFunc(stale, func(c *certificate) bool { return bytes.Contains(store, c.der) })
	switch {
	case !changed:
		return store, nil
	case bytes.HasPrefix(store, jksMagic):
		return updateJKS(store, certs, stale)
	}
	return updatePKCS12(store, certs, stale)
}
