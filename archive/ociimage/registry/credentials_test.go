package registry

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

// userFolders are the folders of a user's credentials.
type userFolders struct{ env map[string]string }

func newUser(t *testing.T) userFolders {
	dir := t.TempDir()
	return userFolders{map[string]string{"HOME": filepath.Join(dir, "home"), "XDG_RUNTIME_DIR": filepath.Join(dir, "run")}}
}

func (u userFolders) getenv(key string) string { return u.env[key] }

func write(t *testing.T, file, content string) string {
	t.Helper()
	testkit.NoError(t, "create folder", os.MkdirAll(filepath.Dir(file), 0o700))
	testkit.NoError(t, "write", os.WriteFile(file, []byte(content), 0o700))
	return file
}

// auths returns the content of a file with a user, whose password is secret, for a key.
func auths(key, user string) string {
	return fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, key, base64.StdEncoding.EncodeToString([]byte(user+":secret")))
}

func TestCredentialsAreFound(t *testing.T) {
	u := newUser(t)
	home, run := u.env["HOME"], u.env["XDG_RUNTIME_DIR"]
	docker := filepath.Join(home, ".docker", "config.json")
	config := filepath.Join(home, ".config", "containers", "auth.json")
	runtimeFile := filepath.Join(run, "containers", "auth.json")
	find := func(reference string) (user, file string) {
		t.Helper()
		r, err := ParseReference(reference)
		testkit.NoError(t, "parse", err)
		found, err := findCredentials(testkit.Context(t), authFiles(u.getenv), r)
		testkit.NoError(t, "find", err)
		if found.Username != "" && found.Password != "secret" {
			t.Errorf("password %q", found.Password)
		}
		return found.Username, found.file
	}
	expect := func(reference, wantUser, wantFile string) {
		t.Helper()
		if user, file := find(reference); user != wantUser || file != wantFile {
			t.Errorf("%s: user %q of %s, want %q of %s", reference, user, file, wantUser, wantFile)
		}
	}
	const shop = "registry.example.com:5000/team/shop:1"
	expect(shop, "", "")
	// Each precedes the files before.
	write(t, docker, auths("registry.example.com:5000", "docker"))
	expect(shop, "docker", docker)
	expect("registry.example.com/team/shop:1", "", "")
	write(t, config, auths("registry.example.com:5000", "podman"))
	expect(shop, "podman", config)
	write(t, runtimeFile, auths("registry.example.com:5000", "session"))
	expect(shop, "session", runtimeFile)
	write(t, runtimeFile, auths("registry.example.com:5000/team", "team"))
	expect(shop, "team", runtimeFile)
	write(t, runtimeFile, auths("registry.example.com:5000/other", "other"))
	expect(shop, "podman", config)
	write(t, runtimeFile, auths("https://registry.example.com:5000/v1/", "url"))
	expect(shop, "url", runtimeFile)
	write(t, runtimeFile, auths("registry.example.com:5000/team", "team"))
	u.env["DOCKER_CONFIG"] = filepath.Join(home, "other")
	other := write(t, filepath.Join(home, "other", "config.json"), auths("https://index.docker.io/v1/", "hub"))
	expect("docker.io/team/shop:1", "hub", other)
	u.env["REGISTRY_AUTH_FILE"] = filepath.Join(home, "missing")
	expect(shop, "", "")
	u.env["REGISTRY_AUTH_FILE"] = write(t, filepath.Join(home, "named"), auths("docker.io", "named"))
	expect("docker.io/team/shop:1", "named", u.env["REGISTRY_AUTH_FILE"])
	expect(shop, "", "")
}

func TestUnreadableCredentialsAreAnError(t *testing.T) {
	u := newUser(t)
	file := write(t, filepath.Join(u.env["HOME"], ".docker", "config.json"), "{")
	_, err := findCredentials(testkit.Context(t), authFiles(u.getenv), Reference{"registry.example.com", "shop", "1"})
	if err == nil || !strings.Contains(err.Error(), "read the credentials for registry.example.com in "+file) {
		t.Errorf("error %v", err)
	}
}
