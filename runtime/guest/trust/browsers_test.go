package trust_test

import (
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest/trust"
)

const firefoxPolicies = "/etc/firefox/policies/policies.json"

// chromiumTrusts are the certificates that a browser made of Chromium gets, as DER.
func (im *image) chromiumTrusts(folder string) (certs []string) {
	im.Helper()
	var policy struct{ CACertificates [][]byte }
	if err := json.Unmarshal([]byte(im.read(folder+"/policies/managed/zz-doze.json")), &policy); err != nil {
		im.Fatal(err)
	}
	for _, c := range policy.CACertificates {
		certs = append(certs, string(c))
	}
	return certs
}

// firefoxTrusts are those that Firefox gets: it reads one from each file.
func (im *image) firefoxTrusts() (certs []string) {
	im.Helper()
	var file struct {
		Policies struct{ Certificates struct{ Install []string } }
	}
	if err := json.Unmarshal([]byte(im.read(firefoxPolicies)), &file); err != nil {
		im.Fatal(err)
	}
	for _, name := range file.Policies.Certificates.Install {
		block, rest := pem.Decode([]byte(im.read(name)))
		if block == nil || len(rest) > 0 {
			im.Fatalf("%s is not one certificate", name)
		}
		certs = append(certs, string(block.Bytes))
	}
	return certs
}

func TestBrowsersTrustTheNode(t *testing.T) {
	const foreign = `{"CACertificates":["AAAA"]}`
	im := newImage(t, map[string]string{"/etc/chromium/policies/managed/corp.json": foreign})
	older, newer := nodeCA(t), nodeCA(t)
	oldDER, newDER := string(der(t, older)), string(der(t, newer))
	for _, step := range []struct {
		ca   []byte
		want []string
	}{
		{older, []string{oldDER}},
		{slices.Concat(older, newer), []string{oldDER, newDER}},
		{newer, []string{newDER}},
	} {
		im.install(step.ca)
		for _, folder := range []string{"/etc/chromium", "/etc/opt/chrome", "/etc/opt/chrome_for_testing", "/etc/opt/edge", "/etc/brave"} {
			if got := im.chromiumTrusts(folder); !slices.Equal(got, step.want) {
				t.Errorf("%s: %d certificates, want %d", folder, len(got), len(step.want))
			}
		}
		if got := im.firefoxTrusts(); !slices.Equal(got, step.want) {
			t.Errorf("Firefox: %d certificates, want %d", len(got), len(step.want))
		}
		if got := im.inFolder("/etc/doze"); len(got) != len(step.want) {
			t.Errorf("/etc/doze has %q", got)
		}
		before := im.all()
		im.install(step.ca)
		if !mapsEqual(before, im.all()) {
			t.Error("the second time something changed")
		}
	}
	if got := im.read("/etc/chromium/policies/managed/corp.json"); got != foreign {
		t.Errorf("the image's own policy is now %s", got)
	}
}

func TestFirefoxPoliciesOfTheImageAreLeftAndReported(t *testing.T) {
	const foreign = `{"policies":{"DisableTelemetry":true}}`
	im := newImage(t, map[string]string{firefoxPolicies: foreign})
	_, err := im.store.Install(nodeCA(t), nil)
	if err == nil || !strings.Contains(err.Error(), firefoxPolicies) {
		t.Errorf("install: %v", err)
	}
	if got := im.read(firefoxPolicies); got != foreign {
		t.Errorf("they are now %s", got)
	}
	if vars := im.store.Variables(); vars["SSL_CERT_FILE"] != trust.BundleFile {
		t.Errorf("the others do not trust the node: %v", vars)
	}
	// Only regular files are policies.
	im = newImage(t, map[string]string{firefoxPolicies + "/": ""})
	if _, err := im.store.Install(nodeCA(t), nil); err == nil || !strings.Contains(err.Error(), "Firefox") {
		t.Errorf("a folder: %v", err)
	}
	if info, err := os.Stat(filepath.Join(im.root, firefoxPolicies)); err != nil || !info.IsDir() {
		t.Errorf("the folder is %v, %v", info, err)
	}
}
