package caddymodule_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	"github.com/doze-run/doze/caddymodule"
	"github.com/doze-run/doze/testkit"
)

const dashes = "\n----------\n"

// TestAdapt: a Caddyfile, a line of dashes, and the JSON it adapts to or the
// error it gives.
func TestAdapt(t *testing.T) {
	files, err := filepath.Glob("testdata/*.caddyfiletest")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".caddyfiletest"), func(t *testing.T) {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			config, _, ok := strings.Cut(string(content), dashes)
			if !ok && !testkit.Update() {
				t.Fatal("no line of dashes")
			}
			testkit.Golden(t, file, []byte(config+dashes+adapt(t, config)+"\n"))
		})
	}
}

// Every documented option is in a Caddyfile that adapts, and in one that is
// refused with the file and the line of that option.
func TestEveryDocumentedOptionHasAGoldenCaddyfile(t *testing.T) {
	files, err := filepath.Glob("testdata/*.caddyfiletest")
	if err != nil {
		t.Fatal(err)
	}
	var adapts strings.Builder
	for _, file := range files {
		if !strings.HasPrefix(filepath.Base(file), "error_") {
			config, _ := golden(t, file)
			adapts.WriteString(config)
		}
	}
	prefixes := map[string]string{
		"doze": "error_global_", "doze_preview": "error_preview_", "size": "error_size_",
		"egress": "error_egress_", "rule": "error_rule_", "backups": "error_backups_", "bucket": "error_bucket_",
	}
	s := readSource(t)
	for _, b := range blocks {
		for _, option := range s.syntax(t, b) {
			name, _, _ := strings.Cut(option, " ")
			line := regexp.MustCompile(`(?m)^\t+` + name + `( |$)`)
			if !line.MatchString(adapts.String()) {
				t.Errorf("no Caddyfile in testdata that adapts has the option %s", name)
			}
			// The wrong option stands last.
			config, want := golden(t, "testdata/"+prefixes[b.section]+name+".caddyfiletest")
			at := line.FindAllStringIndex(config, -1)
			if at == nil {
				t.Fatalf("the Caddyfile with a wrong %s has none:\n%s", name, config)
			}
			number := 1 + strings.Count(config[:at[len(at)-1][0]], "\n")
			if !strings.HasPrefix(want, "error: ") || !strings.HasSuffix(want, fmt.Sprintf(", at Caddyfile:%d", number)) {
				t.Errorf("a wrong %s in line %d gets the message %q", name, number, want)
			}
		}
	}
}

// golden splits a file into a Caddyfile and what it adapts to.
func golden(t *testing.T, file string) (config, want string) {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	config, want, _ = strings.Cut(string(content), dashes)
	return config, strings.TrimSpace(want)
}

func adapt(t *testing.T, config string) string {
	t.Helper()
	adapter := caddyconfig.GetAdapter("caddyfile")
	out, warnings, err := adapter.Adapt([]byte(config), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		return "error: " + err.Error()
	}
	for _, w := range warnings {
		t.Errorf("warning: %s", w)
	}
	var pretty bytes.Buffer
	if err := json.Indent(&pretty, out, "", "\t"); err != nil {
		t.Fatal(err)
	}
	return pretty.String()
}

// The Caddyfiles that we ship adapt, are formatted, name each image that images/build
// builds, and serve previews on the host under which the node makes their URLs.
func TestShippedCaddyfiles(t *testing.T) {
	t.Setenv("DOZE_HOME", "/srv/doze")
	both := []string{`"handler": "doze_api"`, `"handler": "doze_preview"`}
	images, err := os.ReadDir("../images")
	if err != nil {
		t.Fatal(err)
	}
	for _, image := range images {
		if name := image.Name(); image.IsDir() {
			both = append(both, fmt.Sprintf(`%q: "localhost/doze/%s:latest"`, name, name))
		}
	}
	for file, parts := range map[string][]string{
		"../Caddyfile":                      {`"data": "/srv/doze"`, `"module": "doze"`, `admin.sock|0600`},
		"../packaging/Caddyfile.production": {`"data": "/srv/doze"`, `"module": "doze"`, `admin.sock|0600`},
	} {
		t.Run(filepath.Base(file), func(t *testing.T) {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if formatted := caddyfile.Format(content); !bytes.Equal(formatted, content) {
				t.Errorf("not formatted; it should be\n%s", formatted)
			}
			got := adapt(t, string(content))
			for _, part := range append(parts, both...) {
				if !strings.Contains(got, part) {
					t.Errorf("lacks %s in\n%s", part, got)
				}
			}
			checkPreviewHost(t, got)
		})
	}
}

// checkPreviewHost compares the host that doze_preview serves with preview_domain.
func checkPreviewHost(t *testing.T, config string) {
	t.Helper()
	var parsed struct {
		Apps struct {
			Doze caddymodule.App `json:"doze"`
			HTTP struct {
				Servers map[string]struct {
					Routes []struct {
						Match  []struct{ Host []string }
						Handle json.RawMessage
					}
				}
			}
		}
	}
	if err := json.Unmarshal([]byte(config), &parsed); err != nil {
		t.Fatal(err)
	}
	domain := cmp.Or(parsed.Apps.Doze.PreviewDomain, "preview.doze.localhost")
	for _, server := range parsed.Apps.HTTP.Servers {
		for _, route := range server.Routes {
			if !bytes.Contains(route.Handle, []byte(`"doze_preview"`)) {
				continue
			}
			for _, match := range route.Match {
				if !slices.Equal(match.Host, []string{"*." + domain}) {
					t.Errorf("it makes previews under %s and serves them on %v", domain, match.Host)
				}
			}
		}
	}
}
