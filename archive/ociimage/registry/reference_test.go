package registry

import (
	"strings"
	"testing"

	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestReferencesAreParsed(t *testing.T) {
	digest := "@sha256:" + strings.Repeat("0", 64)
	for text, want := range map[string]Reference{
		"registry.example.com/shop:1":                        {"registry.example.com", "shop", "1"},
		"registry.example.com:5000/team/a/shop:v1.2":         {"registry.example.com:5000", "team/a/shop", "v1.2"},
		"localhost/shop":                                     {"localhost", "shop", "latest"},
		"[::1]:5000/shop:1":                                  {"[::1]:5000", "shop", "1"},
		"docker.io/team/shop:1":                              {"docker.io", "team/shop", "1"},
		"docker.io/shop:1":                                   {"docker.io", "library/shop", "1"},
		"registry.example.com/a__b/c-d.e:Before_the.upgrade": {"registry.example.com", "a__b/c-d.e", "Before_the.upgrade"},
	} {
		got, err := ParseReference(text)
		testkit.NoError(t, text, err)
		testkit.Diff(t, text, got, want)
	}
	for text, want := range map[string]string{
		"":                                     "does not begin with a registry",
		"shop:1":                               "use registry.example.com/shop:1 or, on Docker Hub, docker.io/USER/shop:1",
		"team/shop:1":                          "use registry.example.com/team/shop:1 or, on Docker Hub, docker.io/USER/shop:1",
		"https://registry.example.com/shop:1":  "omit https://, as in registry.example.com/shop:1",
		"registry.example.com/":                `"registry.example.com/" has no repository; use registry.example.com/shop:1, for example`,
		"registry.example.com/:1":              "has no repository",
		"registry.example.com/Shop:1":          `repository "Shop" has capitals; use "shop"`,
		"registry.example.com/shop+1:1":        `"shop+1" is not a repository`,
		"registry.example.com/shop/:1":         `"shop/" is not a repository`,
		"registry.example.com/shop:":           `"" is not a tag`,
		"registry.example.com/shop:a b":        `"a b" is not a tag`,
		"registry.example.com/shop" + digest:   "has a digest, which a push computes; use a tag, as in registry.example.com/shop:latest",
		"registry.example.com/shop:1" + digest: "as in registry.example.com/shop:latest",
		"registry.example.com:port x/shop:1":   "is not the host of a registry",
		"user@registry.example.com/shop:1":     "is not the host of a registry",
	} {
		if got, err := ParseReference(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %+v, %v, want %q", text, got, err, want)
		}
	}
}

func TestLoopbackIsRecognized(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "localhost:5000": true, "127.0.0.1:5000": true, "127.1.2.3": true, "[::1]:5000": true, "[::1]": true,
		"registry.example.com": false, "localhost.example.com": false, "registry.localhost:5000": false, "10.0.0.1:5000": false, "192.168.1.1": false, "[fd00::1]:5000": false,
	} {
		if got := (Reference{Registry: host}).isLoopback(); got != want {
			t.Errorf("%s: %v", host, got)
		}
	}
}
