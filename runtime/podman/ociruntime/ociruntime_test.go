package ociruntime

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"syscall"
	"testing"
)

func TestOnlyCreatedSandboxesHaveQuotas(t *testing.T) {
	bundle := func(config string) string {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	sandbox := bundle(`{"ociVersion":"1.0.0","annotations":{"doze.quotas":"/srv/quotas"}}`)
	other := bundle(`{"ociVersion":"1.0.0"}`)
	broken := bundle(`{"ociVersion":`)
	for _, c := range []struct {
		name string
		args []string
		want string
		fail bool
	}{
		{"create", []string{"--log-format=json", "--log", "log", "create", "--bundle", sandbox, "--pid-file", "pid", "id"}, "/srv/quotas", false},
		{"create with =", []string{"create", "--bundle=" + sandbox, "id"}, "/srv/quotas", false},
		{"create with -b", []string{"create", "-b", sandbox, "id"}, "/srv/quotas", false},
		{"another container", []string{"create", "--bundle", other, "id"}, "", false},
		{"another command", []string{"start", "id"}, "", false},
		{"no command", nil, "", false},
		{"a broken bundle", []string{"create", "--bundle", broken, "id"}, "", true},
		{"a missing bundle", []string{"create", "--bundle", broken + "x", "id"}, "", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := configOf(c.args)
			if (path == "") != (c.name == "another command" || c.name == "no command") {
				t.Fatalf("its configuration is %q", path)
			}
			if path == "" {
				return
			}
			var got config
			err := readJSON(path, &got)
			if got.Annotations[Annotation] != c.want || (err != nil) != c.fail {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}

func TestQuotasAreReadAsTheyWereWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "quotas")
	for _, want := range []Quotas{
		{Sysctls: map[string]int64{"max_user_namespaces": 1, "max_inotify_watches": 300}, NPROC: 64, SIGPENDING: 50, MSGQUEUE: 1000},
		{Sysctls: map[string]int64{"max_user_namespaces": 9}},
	} {
		if err := want.Write(path); err != nil {
			t.Fatal(err)
		}
		got, err := read(path)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, %v; want %+v", got, err, want)
		}
	}
	// On a full disk, a sandbox can still start with unchanged quotas.
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := (Quotas{Sysctls: map[string]int64{"max_user_namespaces": 9}}).Write(path); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Errorf("the same quotas were written again: %v", err)
	}
	for _, text := range []string{"", "{", `{"sysctls":{"../kernel/x":1}}`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if q, err := read(path); err == nil {
			t.Errorf("%q is read as %+v", text, q)
		}
	}
}

func TestSandboxJoinsTheNamespaceCreatedForIt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	const before = `{"ociVersion":"1.0.0","process":{"args":["<&>"]},"linux":{"uidMappings":[{"containerID":0,"hostID":1,"size":65535}],` +
		`"gidMappings":[{"containerID":0,"hostID":1,"size":65535}],"namespaces":[{"type":"pid"},{"type":"network","path":"/n"},{"type":"user"}],"maskedPaths":["/p"]}}`
	const after = `{"ociVersion":"1.0.0","process":{"args":["<&>"]},"linux":{` +
		`"namespaces":[{"type":"pid"},{"type":"network","path":"/n"},{"type":"user","path":"/proc/7/ns/user"}],"maskedPaths":["/p"]}}`
	if err := os.WriteFile(path, []byte(before), 0o640); err != nil {
		t.Fatal(err)
	}
	var c config
	err := readJSON(path, &c)
	if want := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 1, Size: 65535}}; err != nil || !reflect.DeepEqual(c.Linux.UIDMappings, want) || !reflect.DeepEqual(c.Linux.GIDMappings, want) {
		t.Errorf("its mappings are %+v, %v", c.Linux, err)
	}
	if err := joinNamespace(path, "/proc/7/ns/user"); err != nil {
		t.Fatal(err)
	}
	var got, want any
	text, err := os.ReadFile(path)
	if err := errors.Join(err, json.Unmarshal(text, &got), json.Unmarshal([]byte(after), &want)); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("it is now %s, want %s", text, after)
	}
	for _, text := range []string{`{}`, `{"linux":{"namespaces":7}}`, `{"linux":{"namespaces":[{"type":"pid"}]}}`} {
		if err := os.WriteFile(path, []byte(text), 0o640); err != nil {
			t.Fatal(err)
		}
		if err := joinNamespace(path, "/proc/7/ns/user"); err == nil {
			t.Errorf("%s has a namespace to join", text)
		}
	}
}

func TestIdentityMapsTheIDsOfThisNamespace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "uid_map")
	if err := os.WriteFile(path, []byte("         0        999          1\n         1     131072      65536\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := identity(path)
	if err != nil || len(got) != 2 {
		t.Fatalf("%+v, %v", got, err)
	}
	if a := got[0]; a.ContainerID != 0 || a.HostID != 0 || a.Size != 1 {
		t.Errorf("%+v", a)
	}
	if a := got[1]; a.ContainerID != 1 || a.HostID != 1 || a.Size != 65536 {
		t.Errorf("%+v", a)
	}
}
