package home_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/api/client"
	"github.com/doze-run/doze/cmd/internal/home"
)

func TestTheLocalTokenIsForTheLocalNodeOnly(t *testing.T) {
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "token"), []byte("local"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"DOZE_HOME": folder}
	find := func() (home.Access, error) { return home.Find(func(key string) string { return env[key] }, "", "") }
	if acc, err := find(); err != nil || acc.Token != "local" || acc.URL != client.DefaultURL {
		t.Errorf("got %+v, %v", acc, err)
	}
	for _, address := range []string{"http://127.0.0.1:9999/api/v1", "HTTP://localhost:9999"} {
		env["DOZE_API"] = address
		if acc, err := find(); err == nil || acc.Token != "" || !strings.Contains(err.Error(), "not encrypted") {
			t.Errorf("%s: got %+v, %v; any program may listen there", address, acc, err)
		}
		env["DOZE_TOKEN"] = "asked"
		if acc, err := find(); err != nil || acc.Token != "asked" {
			t.Errorf("%s: got %+v, %v", address, acc, err)
		}
		delete(env, "DOZE_TOKEN")
	}
	env["DOZE_API"] = "https://node.example.com/api/v1"
	if acc, err := find(); err == nil || acc.Token != "" {
		t.Errorf("got %+v; the token of this machine's node must not be sent elsewhere", acc)
	}
	env["DOZE_TOKEN"] = "other"
	if acc, err := find(); err != nil || acc.Token != "other" || acc.CA != "" {
		t.Errorf("got %+v, %v", acc, err)
	}
}
