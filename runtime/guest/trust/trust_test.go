package trust_test

import (
	"bytes"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/doze-run/doze/runtime/guest/trust"
	"github.com/doze-run/doze/testkit/testca"
)

// newCA makes the PEM of a CA.
func newCA(t testing.TB, name pkix.Name) []byte {
	t.Helper()
	a, err := testca.NewAuthority(name)
	if err != nil {
		t.Fatal(err)
	}
	return a.PEM()
}

func nodeCA(t testing.TB) []byte {
	return newCA(t, pkix.Name{CommonName: "Doze  Node CA", Organization: []string{"Doze"}})
}

func publicCA(t testing.TB) []byte { return newCA(t, pkix.Name{CommonName: "Public Root"}) }

// image is a root folder.
type image struct {
	testing.TB
	root  string
	store trust.Store
	full  map[string]error // errors of writes, by the path in the sandbox
}

// newImage makes one of files, links ("-> target") and folders (with a / at their end).
func newImage(t testing.TB, files map[string]string) *image {
	t.Helper()
	im := &image{TB: t, root: t.TempDir(), full: map[string]error{}}
	im.store = trust.Store{Root: im.root, Write: im.write}
	for name, content := range files {
		path := filepath.Join(im.root, name)
		dir := filepath.Dir(path)
		if strings.HasSuffix(name, "/") {
			dir = path
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if target, ok := strings.CutPrefix(content, "-> "); ok {
			err = os.Symlink(target, path)
		} else if !strings.HasSuffix(name, "/") {
			err = os.WriteFile(path, []byte(content), 0o444)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return im
}

func (im *image) write(path string, content io.Reader) error {
	if err := im.full[strings.TrimPrefix(path, im.root)]; err != nil {
		return &os.PathError{Op: "write", Path: path, Err: err}
	}
	b, err := io.ReadAll(content)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".part", b, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".part", path)
}

func (im *image) install(ca []byte) (needsRoots bool) {
	im.Helper()
	needsRoots, err := im.store.Install(ca, nil)
	if err != nil {
		im.Fatal(err)
	}
	return needsRoots
}

// read follows links as the sandbox would.
func (im *image) read(name string) string {
	im.Helper()
	for range 10 {
		target, err := os.Readlink(filepath.Join(im.root, name))
		if err != nil {
			break
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(filepath.Dir(name), target)
		}
		name = target
	}
	b, err := os.ReadFile(filepath.Join(im.root, name))
	if err != nil {
		im.Error(err)
	}
	return string(b)
}

// all lists all there is with its content.
func (im *image) all() map[string]string {
	im.Helper()
	list := map[string]string{}
	err := filepath.WalkDir(im.root, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		content, linkErr := os.Readlink(path)
		if linkErr != nil {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			content = fmt.Sprint(info.ModTime().UnixNano(), string(b))
		}
		list[strings.TrimPrefix(path, im.root)] = content
		return nil
	})
	if err != nil {
		im.Fatal(err)
	}
	return list
}

// layouts of images, with the file that holds all CAs and the folder of anchors.
var layouts = map[string]struct {
	files           map[string]string
	bundle, anchors string
}{
	"Debian": {map[string]string{
		"/etc/debian_version":                "13.1\n",
		"/etc/ssl/certs/ca-certificates.crt": "PUBLIC",
		"/etc/ssl/certs/Public_Root.pem":     "PUBLIC",
		"/etc/ssl/certs/0a1b2c3d.0":          "-> Public_Root.pem",
		"/usr/local/share/ca-certificates/":  "",
	}, "/etc/ssl/certs/ca-certificates.crt", "/usr/local/share/ca-certificates"},
	"Alpine": {map[string]string{
		"/etc/alpine-release":                "3.22.1\n",
		"/etc/ssl/certs/ca-certificates.crt": "PUBLIC",
		"/etc/ssl/cert.pem":                  "-> certs/ca-certificates.crt",
	}, "/etc/ssl/certs/ca-certificates.crt", "/usr/local/share/ca-certificates"},
	"Fedora": {map[string]string{
		"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem": "# Public Root\nPUBLIC",
		"/etc/pki/ca-trust/source/anchors/":                 "",
		"/etc/pki/tls/certs/ca-bundle.crt":                  "-> /etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
		"/etc/pki/tls/cert.pem":                             "-> /etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
		"/etc/ssl/certs":                                    "-> ../pki/tls/certs",
	}, "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", "/etc/pki/ca-trust/source/anchors"},
	"SUSE": {map[string]string{
		"/var/lib/ca-certificates/ca-bundle.pem": "PUBLIC",
		"/var/lib/ca-certificates/pem/":          "",
		"/etc/ssl/ca-bundle.pem":                 "-> /var/lib/ca-certificates/ca-bundle.pem",
		"/etc/ssl/certs":                         "-> /var/lib/ca-certificates/pem",
		"/etc/pki/trust/anchors/":                "",
	}, "/var/lib/ca-certificates/ca-bundle.pem", "/etc/pki/trust/anchors"},
	"Arch": {map[string]string{
		"/etc/ca-certificates/extracted/tls-ca-bundle.pem": "PUBLIC",
		"/etc/ca-certificates/trust-source/anchors/":       "",
		"/etc/ssl/certs/ca-certificates.crt":               "-> ../../ca-certificates/extracted/tls-ca-bundle.pem",
	}, "/etc/ca-certificates/extracted/tls-ca-bundle.pem", "/etc/ca-certificates/trust-source/anchors"},
	"distroless": {map[string]string{
		"/etc/ssl/certs/ca-certificates.crt": "PUBLIC",
	}, "/etc/ssl/certs/ca-certificates.crt", ""},
}

// newLayout makes an image whose only public CA is the one given.
func newLayout(t testing.TB, name string, public []byte) *image {
	files := map[string]string{}
	for file, content := range layouts[name].files {
		files[file] = strings.Replace(content, "PUBLIC", string(public), 1)
	}
	return newImage(t, files)
}

func TestEachLayoutTrustsTheNodeAndThePublicCAs(t *testing.T) {
	for name, layout := range layouts {
		t.Run(name, func(t *testing.T) {
			public, ca := publicCA(t), nodeCA(t)
			im := newLayout(t, name, public)
			before := im.read(layout.bundle)
			if im.install(ca) {
				t.Error("it wants roots, and has its own")
			}
			for _, file := range []string{layout.bundle, trust.BundleFile} {
				if got := im.read(file); got != before+string(ca) {
					t.Errorf("%s has\n%s", file, got)
				}
			}
			if got := im.read(trust.CAFile); got != string(ca) {
				t.Errorf("%s has\n%s", trust.CAFile, got)
			}
			if layout.anchors != "" {
				if got := im.inFolder(layout.anchors); !slices.Equal(got, []string{string(ca)}) {
					t.Errorf("the anchors are %q", got)
				}
			}
			vars := im.store.Variables()
			if vars["SSL_CERT_FILE"] != trust.BundleFile || vars["NODE_EXTRA_CA_CERTS"] != trust.CAFile {
				t.Errorf("variables %v", vars)
			}
			first := im.all()
			im.install(ca)
			if second := im.all(); !mapsEqual(first, second) {
				t.Errorf("the second time changed something:\n%v\n%v", first, second)
			}
		})
	}
}

func mapsEqual(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if b[k] != v {
			return false
		}
	}
	return true
}

// inFolder returns the contents of the files of doze in a folder.
func (im *image) inFolder(folder string) (contents []string) {
	im.Helper()
	files, err := filepath.Glob(filepath.Join(im.root, folder, "doze-*"))
	if err != nil {
		im.Fatal(err)
	}
	for _, file := range files {
		contents = append(contents, im.read(strings.TrimPrefix(file, im.root)))
	}
	return contents
}

func TestRenewalReplacesOursAndKeepsTheRest(t *testing.T) {
	for name, layout := range layouts {
		t.Run(name, func(t *testing.T) {
			public, older, newer := publicCA(t), nodeCA(t), nodeCA(t)
			im := newLayout(t, name, public)
			before := im.read(layout.bundle)
			im.install(older)
			users := string(newCA(t, pkix.Name{CommonName: "The user's own"}))
			if err := os.WriteFile(filepath.Join(im.root, layout.bundle+".new"), []byte(im.read(layout.bundle)+users), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(filepath.Join(im.root, layout.bundle+".new"), filepath.Join(im.root, layout.bundle)); err != nil {
				t.Fatal(err)
			}
			im.install(slices.Concat(older, newer)) // the overlap
			if got := im.read(trust.BundleFile); got != before+string(older)+users+string(newer) {
				t.Errorf("in the overlap the bundle has\n%s", got)
			}
			im.install(newer)
			if got := im.read(trust.BundleFile); got != before+users+string(newer) {
				t.Errorf("after the renewal the bundle has\n%s", got)
			}
			for file, content := range im.all() {
				if strings.Contains(content, string(older)) {
					t.Errorf("%s still has the old one", file)
				}
			}
		})
	}
}

func TestImageWithoutRootsGetsTheNodesRoots(t *testing.T) {
	im := newImage(t, map[string]string{"/etc/debian_version": "13.1\n", "/etc/ssl/certs/": ""})
	public, ca := publicCA(t), nodeCA(t)
	if !im.install(ca) {
		t.Fatal("it wants no roots and has none")
	}
	if got := im.read(trust.BundleFile); got != string(ca) {
		t.Errorf("meanwhile the bundle has\n%s", got)
	}
	needsRoots, err := im.store.Install(ca, public)
	if err != nil || needsRoots {
		t.Fatalf("with roots: %v, %v", needsRoots, err)
	}
	if got := im.read(trust.BundleFile); got != string(public)+string(ca) {
		t.Errorf("the bundle has\n%s", got)
	}
	newer := nodeCA(t)
	if im.install(newer) {
		t.Error("it wants the roots again")
	}
	if got := im.read(trust.BundleFile); got != string(public)+string(newer) {
		t.Errorf("later the bundle has\n%s", got)
	}
	// The package comes later, and finds the anchor.
	if got := im.inFolder("/usr/local/share/ca-certificates"); len(got) != 1 {
		t.Errorf("the anchors are %q", got)
	}
	other := publicCA(t)
	if err := im.write(filepath.Join(im.root, "/etc/ssl/certs/ca-certificates.crt"), bytes.NewReader(other)); err != nil {
		t.Fatal(err)
	}
	im.install(newer)
	if got := im.read(trust.BundleFile); got != string(other)+string(newer) {
		t.Errorf("with the package the bundle has\n%s", got)
	}
	// And it goes.
	if err := os.Remove(filepath.Join(im.root, "/etc/ssl/certs/ca-certificates.crt")); err != nil {
		t.Fatal(err)
	}
	if !im.install(newer) {
		t.Error("without the package it wants no roots")
	}
}

func TestBundleThatTheImageNamesGetsTheCA(t *testing.T) {
	public, ca := publicCA(t), nodeCA(t)
	im := newImage(t, map[string]string{"/nix/certs/bundle.crt": string(public)})
	im.store.Env = []string{"NIX_SSL_CERT_FILE=/nix/certs/bundle.crt", "CURL_CA_BUNDLE=relative", "PIP_CERT=/missing", "SSL_CERT_FILE=" + trust.BundleFile}
	if im.install(ca) {
		t.Error("it wants roots")
	}
	for _, file := range []string{"/nix/certs/bundle.crt", trust.BundleFile} {
		if got := im.read(file); got != string(public)+string(ca) {
			t.Errorf("%s has\n%s", file, got)
		}
	}
}

func TestFilesThatCannotBeWrittenAreReportedAndTheRestIsDone(t *testing.T) {
	public, ca := publicCA(t), nodeCA(t)
	im := newLayout(t, "Debian", public)
	bundle := layouts["Debian"].bundle
	im.full[bundle] = syscall.ENOSPC
	if _, err := im.store.Install(ca, nil); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), bundle) {
		t.Errorf("install: %v", err)
	}
	if got := im.read(bundle); got != string(public) {
		t.Errorf("the bundle has\n%s", got)
	}
	if got := im.read(trust.CAFile); got != string(ca) {
		t.Errorf("%s has\n%s", trust.CAFile, got)
	}
	delete(im.full, bundle)
	im.install(ca)
	if got := im.read(trust.BundleFile); got != string(public)+string(ca) {
		t.Errorf("later the bundle has\n%s", got)
	}
}

func TestInvalidCAsAreRefused(t *testing.T) {
	im := newImage(t, nil)
	leaf, _, err := testca.New("a.test")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{
		"nothing":      nil,
		"text":         []byte("hello"),
		"a key":        pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("x")}),
		"garbage":      pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")}),
		"a leaf":       pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Certificate[0]}),
		"far too many": bytes.Repeat(nodeCA(t), 17),
	} {
		if _, err := im.store.Install(text, nil); !errors.Is(err, trust.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if all := im.all(); len(all) > 0 {
		t.Errorf("something was written: %v", all)
	}
}

// A sandbox may put anything in the place of its files.
func TestStrangeFilesEndNothing(t *testing.T) {
	ca := nodeCA(t)
	im := newImage(t, map[string]string{
		"/etc/ssl/certs/ca-certificates.crt/":    "", // a folder
		"/etc/ssl/cert.pem":                      "-> cert.pem",
		"/etc/ssl/ca-bundle.pem":                 "-> /dev/zero",
		"/etc/pki/tls/cert.pem":                  "",
		"/etc/ssl/certs/java/cacerts":            "no store",
		"/opt/java/openjdk/lib/security/cacerts": "\xfe\xed\xfe\xed\x00\x00\x00\x02\xff\xff\xff\xff01234567890123456789",
		"/etc/doze/ca.pem":                       "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
	})
	if err := syscall.Mkfifo(filepath.Join(im.root, "etc/pki/tls/pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	im.store.Env = []string{"SSL_CERT_FILE=/etc/pki/tls/pipe"}
	needsRoots, err := im.store.Install(ca, nil)
	if err == nil || !needsRoots {
		t.Errorf("install: %v, %v", needsRoots, err)
	}
	if got := im.read(trust.CAFile); got != string(ca) {
		t.Errorf("%s has\n%s", trust.CAFile, got)
	}
	if got := im.read(trust.BundleFile); got != string(ca) {
		t.Errorf("%s has\n%s", trust.BundleFile, got)
	}
}

func TestOpenSSLFindsTheCAInItsFolder(t *testing.T) {
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Fatal("there is no openssl: run packaging/host/setup --with-tests")
	}
	for _, subject := range []pkix.Name{
		{CommonName: "Doze  Node CA", Organization: []string{"Doze"}},
		{CommonName: " Ünïcode  ŠTUFF\t", Country: []string{"DE"}, OrganizationalUnit: []string{"b", "a"}},
		{CommonName: "node-k3f9x2m7q2az", SerialNumber: "12 34"},
	} {
		im := newLayout(t, "Debian", publicCA(t))
		older, newer := newCA(t, subject), newCA(t, subject)
		file := filepath.Join(t.TempDir(), "ca.pem")
		hash := func(ca []byte) string {
			t.Helper()
			if err := os.WriteFile(file, ca, 0o644); err != nil {
				t.Fatal(err)
			}
			out, err := exec.Command(openssl, "x509", "-subject_hash", "-noout", "-in", file).Output()
			if err != nil {
				t.Fatal(err)
			}
			return strings.TrimSpace(string(out))
		}
		verify := func(ca []byte) error {
			if err := os.WriteFile(file, ca, 0o644); err != nil {
				t.Fatal(err)
			}
			out, err := exec.Command(openssl, "verify", "-no-CAfile", "-no-CAstore", "-CApath", filepath.Join(im.root, "etc/ssl/certs"), file).CombinedOutput()
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		}
		// Another CA of the very same subject is there already.
		foreign := newCA(t, subject)
		at := filepath.Join(im.root, "etc/ssl/certs")
		if err := errors.Join(os.WriteFile(at+"/foreign.pem", foreign, 0o644), os.Symlink("foreign.pem", at+"/"+hash(foreign)+".0")); err != nil {
			t.Fatal(err)
		}
		links := func() int {
			found, err := filepath.Glob(at + "/" + hash(older) + ".*")
			if err != nil {
				t.Fatal(err)
			}
			return len(found)
		}
		for _, step := range []struct {
			ca    []byte
			links int
			older bool
			newer bool
		}{{older, 2, true, false}, {slices.Concat(older, newer), 3, true, true}, {newer, 2, false, true}} {
			im.install(step.ca)
			if n := links(); n != step.links {
				t.Errorf("%s: %d links, want %d", subject, n, step.links)
			}
			if err := verify(older); (err == nil) != step.older {
				t.Errorf("%s: verifying the older one: %v", subject, err)
			}
			if err := verify(newer); (err == nil) != step.newer {
				t.Errorf("%s: verifying the newer one: %v", subject, err)
			}
			if err := verify(foreign); err != nil {
				t.Errorf("%s: verifying another's: %v", subject, err)
			}
		}
	}
}

func BenchmarkInstallOfWhatIsInstalled(b *testing.B) {
	var public []byte
	for range 140 { // as many as there are
		public = append(public, publicCA(b)...)
	}
	im := newLayout(b, "Debian", public)
	ca := nodeCA(b)
	im.install(ca)
	for b.Loop() {
		im.install(ca)
	}
}
