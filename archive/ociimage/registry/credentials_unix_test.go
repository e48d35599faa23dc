//go:build unix

package registry

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// The helper is a shell script.
func TestCredentialHelperIsRun(t *testing.T) {
	u := newUser(t)
	bin := t.TempDir()
	write(t, filepath.Join(bin, "docker-credential-test"), `#!/bin/sh
read server
[ "$1 $server" = "get registry.example.com" ] || { echo "credentials not found in native keychain"; exit 1; }
echo '{"ServerURL":"registry.example.com","Username":"helped","Secret":"secret"}'
`)
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	file := write(t, filepath.Join(u.env["HOME"], ".docker", "config.json"), `{"credsStore":"test"}`)
	find := func(registry string) (foundCredentials, error) {
		return findCredentials(testkit.Context(t), authFiles(u.getenv), Reference{registry, "team/shop", "1"})
	}
	found, err := find("registry.example.com")
	if err != nil || found.Username != "helped" || found.Password != "secret" || found.file != file {
		t.Errorf("found %+v, %v", found, err)
	}
	if found, err := find("other.example.com"); err != nil || found.file != "" {
		t.Errorf("of another registry: %+v, %v", found, err)
	}
	write(t, file, `{"credsStore":"missing"}`)
	if _, err := find("registry.example.com"); err == nil || !strings.Contains(err.Error(), "docker-credential-missing") || !strings.Contains(err.Error(), file) {
		t.Errorf("without the helper: %v", err)
	}
}
