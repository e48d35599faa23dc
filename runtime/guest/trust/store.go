// Package trust makes the programs of a sandbox trust the node's CAs, in any image:
// it adds them to the system's store as the distribution would, to Java's and, by
// policies, to browsers', and writes two files for clients that read a variable.
// The next Install replaces its additions; everything else stays unchanged.
package trust

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/doze-run/doze/archive"
)

// ownFolder is the only folder whose files all belong to doze.
const ownFolder = "/etc/doze"

// Files in the sandbox, on its own disk.
const (
	// CAFile has the node's CAs alone.
	CAFile = ownFolder + "/ca.pem"
	// BundleFile has them and the public ones. Where the image has a bundle it is a
	// link to that one, so that what the sandbox's user adds there is in both.
	BundleFile = ownFolder + "/ca-bundle.pem"
)

// bundleVariables name a file with all CAs, extraVariables one with CAs in addition to a
// client's own.
var (
	bundleVariables = []string{
		"SSL_CERT_FILE",                      // OpenSSL and what uses it, Go, rustls' native roots, uv, httpx
		"NIX_SSL_CERT_FILE",                  // the same, as built by Nix
		"CURL_CA_BUNDLE",                     // curl of whatever TLS library
		"GIT_SSL_CAINFO",                     // git
		"REQUESTS_CA_BUNDLE",                 // Python's requests, which brings its own
		"PIP_CERT",                           // pip, which brings its own
		"CARGO_HTTP_CAINFO",                  // cargo
		"AWS_CA_BUNDLE",                      // AWS' command line and botocore, which bring their own
		"CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE", // gcloud, which brings its own
		"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",   // gRPC's C core, which brings its own
		"BUNDLE_SSL_CA_CERT",                 // Ruby's bundler
		"HEX_CACERTS_PATH",                   // Elixir's hex
	}
	extraVariables = []string{
		"NODE_EXTRA_CA_CERTS", // Node, npm, yarn, pnpm
		"DENO_CERT",           // Deno
	}
)

// anchors are the folders whose certificates the distributions' own tools put into
// the store when they rebuild it. A missing folder is made where the file os exists: the
// package with the tool may be installed later.
var anchors = []struct{ folder, ext, os string }{
	{"/usr/local/share/ca-certificates", ".crt", "/etc/debian_version"}, // Debian, Ubuntu
	{"/usr/local/share/ca-certificates", ".crt", "/etc/alpine-release"}, // Alpine
	{"/etc/pki/ca-trust/source/anchors", ".pem", ""},                    // Fedora, RHEL, Amazon
	{"/etc/pki/trust/anchors", ".pem", ""},                              // SUSE
	{"/etc/ca-certificates/trust-source/anchors", ".pem", ""},           // Arch
}

// bundles are files with all CAs that distributions make. The first that an image
// has is the one that BundleFile leads to.
var bundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",                // Debian, Ubuntu, Alpine, Arch, distroless
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // Fedora, RHEL
	"/etc/pki/tls/certs/ca-bundle.crt",                  // Fedora, RHEL, Amazon
	"/var/lib/ca-certificates/ca-bundle.pem",            // SUSE
	"/etc/ssl/ca-bundle.pem",                            // SUSE
	"/etc/ssl/cert.pem",                                 // Alpine without the package
	"/etc/pki/tls/cert.pem",                             // Fedora, RHEL
	"/etc/ca-certificates/extracted/tls-ca-bundle.pem",  // Arch
}

const (
	// hashFolder is OpenSSL's: it has a link for each CA, named by its subject.
	hashFolder = "/etc/ssl/certs"
	// maxFile bounds what is read of one file; a bundle has 220 KB, Java's 200 KB.
	maxFile = 8 << 20
	// maxLinks is how many symbolic links are followed, as many as the kernel would.
	maxLinks = 40
)

// Store is the trust of one sandbox. One Install at a time.
type Store struct {
	// Root is where the sandbox's paths begin: "/", but for tests.
	Root string
	// Env is the sandbox's own environment, as NAME=value. A bundle that one of its
	// variables names gets the CAs too.
	Env []string
	// Write replaces a file whole or not at all; a new one can be read by all, and
	// the folders above it are made.
	Write func(path string, content io.Reader) error
}

// Install makes ca the CAs of the node that are trusted; roots are the public ones
// for an image that has none, and may be empty. needsRoots: neither the image nor roots had
// any. It goes on after a failure and returns all errors together.
func (s *Store) Install(ca, roots []byte) (needsRoots bool, err error) {
	certs, err := parse(ca)
	if err != nil {
		return false, err
	}
	before, _ := s.read(CAFile)
	stale, _ := parse(before) // without a valid file nothing is stale
	stale = slices.DeleteFunc(stale, func(old *certificate) bool {
		return slices.ContainsFunc(certs, func(c *certificate) bool { return bytes.Equal(c.der, old.der) })
	})
	in := &installation{Store: s, certs: certs, stale: stale}
	in.anchor()
	system := in.bundles()
	in.hashLinks()
	in.keystores()
	in.browsers()
	needsRoots = in.bundle(system, roots)
	// Last: the next Install replaces the CAs of this file.
	in.note(s.replace(CAFile, with(nil, certs)))
	return needsRoots, errors.Join(in.errs...)
}

// Variables returns the variables that name the files, as far as they exist.
func (s *Store) Variables() map[string]string {
	vars := map[string]string{}
	for file, names := range map[string][]string{BundleFile: bundleVariables, CAFile: extraVariables} {
		if _, err := s.read(file); err == nil {
			for _, name := range names {
				vars[name] = file
			}
		}
	}
	return vars
}

// installation is one Install.
type installation struct {
	*Store
	certs, stale []*certificate
	errs         []error
}

func (in *installation) note(err error) {
	if err != nil {
		in.errs = append(in.errs, err)
	}
}

// files puts each CA into a folder, removes the stale ones, and returns the paths.
func (in *installation) files(folder, ext string) (paths []string) {
	for _, c := range in.certs {
		paths = append(paths, path.Join(folder, c.name+ext))
		in.note(in.replace(paths[len(paths)-1], c.pem))
	}
	for _, c := range in.stale {
		in.note(in.remove(path.Join(folder, c.name+ext)))
	}
	return paths
}

func (in *installation) anchor() {
	for _, a := range anchors {
		folder, ok := in.folder(a.folder)
		if !ok {
			folder = a.folder
		}
		if ok || a.os != "" && in.exists(a.os) {
			in.files(folder, a.ext)
		}
	}
}

// bundles adds the CAs to the system's bundles and returns the first.
func (in *installation) bundles() (first string) {
	files := slices.Clone(bundles)
	for _, name := range slices.Concat(bundleVariables, extraVariables) {
		for _, kv := range in.Env {
			if file, ok := strings.CutPrefix(kv, name+"="); ok && path.IsAbs(file) {
				files = append(files, file)
			}
		}
	}
	seen := map[string]bool{}
	for _, file := range files {
		real, err := in.resolve(file)
		if err != nil || seen[real] || archive.Within(real, ownFolder) {
			continue // the most are missing in any one image
		}
		seen[real] = true
		text, err := in.read(real)
		if err != nil {
			in.note(err)
			continue
		}
		public := without(text, in.certs)
		if !bytes.Contains(public, beginCertificate) {
			continue // the package that made it has been removed
		}
		if first == "" {
			first = file
		}
		in.note(in.replace(real, with(without(text, in.stale), in.certs)))
	}
	return first
}

// bundle makes BundleFile. It reports whether there are no public CAs.
func (in *installation) bundle(system string, roots []byte) (needsRoots bool) {
	if system != "" {
		in.note(in.link(BundleFile, system))
		return false
	}
	if len(roots) == 0 {
		// The CAs of an earlier Install.
		if info, err := os.Lstat(in.host(BundleFile)); err == nil && info.Mode().IsRegular() {
			before, err := in.read(BundleFile)
			in.note(err)
			roots = without(without(before, in.stale), in.certs)
		}
	}
	if _, err := os.Readlink(in.host(BundleFile)); err == nil { // a link to a bundle that no longer exists
		in.note(in.remove(BundleFile))
	}
	in.note(in.replace(BundleFile, with(roots, in.certs)))
	return !bytes.Contains(roots, beginCertificate)
}

// host is where a path of the sandbox is for this process.
func (s *Store) host(name string) string { return filepath.Join(s.Root, name) }

func (s *Store) exists(name string) bool {
	_, err := os.Stat(s.host(name))
	return err == nil
}

// folder follows the links in the path of a folder, if there is one.
func (s *Store) folder(name string) (real string, ok bool) {
	real, err := s.resolve(name)
	if err != nil {
		return "", false
	}
	info, err := os.Stat(s.host(real))
	return real, err == nil && info.IsDir()
}

// resolve follows the symbolic links in a path of the sandbox, all of which must
// exist.
func (s *Store) resolve(name string) (string, error) {
	real, rest := "/", strings.Split(name, "/")
	for links := 0; len(rest) > 0; {
		next := path.Join(real, rest[0])
		rest = rest[1:]
		target, err := os.Readlink(s.host(next))
		switch {
		case errors.Is(err, syscall.EINVAL): // no link
			real = next
			continue
		case err != nil:
			return "", err
		}
		if links++; links > maxLinks {
			return "", &fs.PathError{Op: "open", Path: name, Err: syscall.ELOOP}
		}
		if path.IsAbs(target) {
			real = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return real, nil
}

// read reads a file of the sandbox. It never blocks on a pipe or touches a device.
func (s *Store) read(name string) ([]byte, error) {
	real, err := s.resolve(name)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(s.host(real), os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s is not a regular file", name)
	case info.Size() > maxFile:
		return nil, fmt.Errorf("%s has %d bytes, at most %d are read", name, info.Size(), maxFile)
	}
	content := make([]byte, info.Size())
	n, err := io.ReadFull(f, content)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) { // it has just been shortened
		err = nil
	}
	return content[:n], err
}

// replace writes a file of the sandbox, or the one that a link there leads to, unless
// it has that content.
func (s *Store) replace(name string, content []byte) error {
	have, err := s.read(name)
	if err == nil && bytes.Equal(have, content) {
		return nil
	}
	real, err := s.resolve(name)
	if err != nil { // it is not there yet
		real = name
	}
	if err := s.Write(s.host(real), bytes.NewReader(content)); err != nil {
		// Without the path, which names a temporary file.
		if p, ok := errors.AsType[*fs.PathError](err); ok {
			err = p.Err
		}
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

func (s *Store) remove(name string) error {
	err := os.Remove(s.host(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// link replaces a file by a symbolic link, atomically.
func (s *Store) link(name, target string) error {
	at := s.host(name)
	if have, err := os.Readlink(at); err == nil && have == target {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	part := name + ".doze-part"
	if err := s.remove(part); err != nil {
		return err
	}
	if err := os.Symlink(target, s.host(part)); err != nil {
		return err
	}
	return os.Rename(s.host(part), at)
}
