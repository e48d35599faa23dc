package trust

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
)

// chromiumPolicies are the folders from which browsers made of Chromium read policies,
// each of its own. Browsers are often installed while a sandbox runs, so the folders
// are made.
var chromiumPolicies = []string{
	"/etc/chromium/policies/managed",
	"/etc/opt/chrome/policies/managed",
	"/etc/opt/chrome_for_testing/policies/managed",
	"/etc/opt/edge/policies/managed",
	"/etc/brave/policies/managed",
}

const (
	// chromiumFile is in a folder with other policies. Where several files have the same
	// policy, Chromium takes the last one's, by name.
	chromiumFile = "zz-doze.json"
	// firefoxFile is the only one from which Firefox reads policies.
	firefoxFile = "/etc/firefox/policies/policies.json"
)

// ownFirefoxFile is how a firefoxFile of ours begins.
var ownFirefoxFile = []byte(`{"policies":{"Certificates":{"Install":["` + ownFolder + `/doze-`)

// browsers adds the CAs by policies: browsers read neither the system's store nor
// variables, and their own stores are in profiles that do not exist yet.
func (in *installation) browsers() {
	var policy struct{ CACertificates [][]byte } // Chromium reads it since version 133
	for _, c := range in.certs {
		policy.CACertificates = append(policy.CACertificates, c.der)
	}
	content, err := json.Marshal(policy)
	in.note(err)
	for _, folder := range chromiumPolicies {
		in.note(in.replace(path.Join(folder, chromiumFile), content))
	}
	in.note(in.firefox(in.files(ownFolder, ".pem"))) // of each file, Firefox reads one certificate
}

// firefox has Firefox read the files, unless the image has policies of its own.
func (in *installation) firefox(files []string) error {
	have, err := in.read(firefoxFile)
	switch {
	case err == nil && !bytes.HasPrefix(have, ownFirefoxFile):
		return fmt.Errorf("%s is the image's own: Firefox does not trust the node", firefoxFile)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("Firefox's policies: %w", err)
	}
	type object map[string]any
	content, err := json.Marshal(object{"policies": object{"Certificates": object{"Install": files}}})
	if err != nil {
		return err
	}
	return in.replace(firefoxFile, content)
}
