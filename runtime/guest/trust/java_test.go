package trust_test

import (
	"bytes"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest/trust"
)

const keystore = "/etc/ssl/certs/java/cacerts"

// stored reads a store that keytool made: of one public CA, and in the case of JKS a
// key. The password, where it has one, is Java's default, "changeit".
func stored(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// der is the certificate in a PEM.
func der(t testing.TB, text []byte) []byte {
	t.Helper()
	block, _ := pem.Decode(text)
	if block == nil {
		t.Fatal("no PEM")
	}
	return block.Bytes
}

func TestJavaTrustsTheNodeAndThePublicCAs(t *testing.T) {
	public := der(t, []byte(stored(t, "public.pem")))
	for name, keys := range map[string]int{"cacerts.jks": 1, "cacerts.p12": 0} {
		t.Run(name, func(t *testing.T) {
			im := newImage(t, map[string]string{
				keystore:                                  stored(t, name),
				"/usr/lib/jvm/17/lib/security/cacerts":    "-> " + keystore,
				"/usr/lib/jvm/8/jre/lib/security/cacerts": stored(t, name),
				"/opt/jdk/lib/security/cacerts":           stored(t, name),
			})
			im.store.Env = []string{"JAVA_HOME=/opt/jdk"}
			older, newer := nodeCA(t), nodeCA(t)
			for _, step := range []struct {
				ca         []byte
				has, lacks [][]byte
			}{
				{older, [][]byte{public, der(t, older)}, nil},
				{slices.Concat(older, newer), [][]byte{public, der(t, older), der(t, newer)}, nil},
				{newer, [][]byte{public, der(t, newer)}, [][]byte{der(t, older)}},
			} {
				im.install(step.ca)
				before := im.all()
				im.install(step.ca)
				if after := im.all(); !mapsEqual(before, after) {
					t.Error("the second time changed something")
				}
				for _, file := range []string{keystore, "/usr/lib/jvm/8/jre/lib/security/cacerts", "/opt/jdk/lib/security/cacerts"} {
					store := im.read(file)
					for _, c := range step.has {
						if n := strings.Count(store, string(c)); n != 1 {
							t.Errorf("%s has a certificate %d times, want once", file, n)
						}
					}
					for _, c := range step.lacks {
						if strings.Contains(store, string(c)) {
							t.Errorf("%s has a certificate that was replaced", file)
						}
					}
				}
				wantListed(t, filepath.Join(im.root, keystore), len(step.has), keys)
			}
		})
	}
}

// wantListed has keytool read a store, where there is one.
func wantListed(t *testing.T, file string, trusted, keys int) {
	t.Helper()
	keytool, err := exec.LookPath("keytool")
	if err != nil {
		return
	}
	out, err := exec.Command(keytool, "-list", "-keystore", file, "-storepass", "changeit").CombinedOutput()
	if err != nil {
		t.Fatalf("keytool: %v: %s", err, out)
	}
	if got := bytes.Count(out, []byte("trustedCertEntry")); got != trusted {
		t.Errorf("Java trusts %d, want %d:\n%s", got, trusted, out)
	}
	if got := bytes.Count(out, []byte("PrivateKeyEntry")); got != keys {
		t.Errorf("Java finds %d keys, want %d:\n%s", got, keys, out)
	}
}

func TestKeystoreWithAPasswordOfItsOwnIsLeftAndReported(t *testing.T) {
	other := []byte(stored(t, "cacerts.jks"))
	other[len(other)-1]++
	for name, store := range map[string]string{"JKS": string(other), "PKCS #12": stored(t, "password.p12")} {
		im := newImage(t, map[string]string{keystore: store})
		_, err := im.store.Install(nodeCA(t), nil)
		if err == nil || !strings.Contains(err.Error(), "password") || !strings.Contains(err.Error(), keystore) {
			t.Errorf("%s: %v", name, err)
		}
		if im.read(keystore) != store {
			t.Errorf("%s: it was changed", name)
		}
		if vars := im.store.Variables(); vars["SSL_CERT_FILE"] != trust.BundleFile {
			t.Errorf("%s: the others do not trust the node: %v", name, vars)
		}
	}
}
