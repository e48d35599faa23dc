package node

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/backup"
	"github.com/doze-run/doze/runtime/sandbox"
)

func TestCheckChangeNamesOptionsThatNeedARestart(t *testing.T) {
	running := Config{Home: t.TempDir(), Sandbox: sandbox.DefaultConfig()}
	if err := running.fill(); err != nil {
		t.Fatal(err)
	}
	same := Config{Home: running.Home, Sandbox: sandbox.DefaultConfig()}
	same.Sandbox.MaxSandboxes++
	if err := running.CheckChange(same); err != nil {
		t.Errorf("no option needs a restart: %v", err)
	}
	other := same
	other.Guest, other.TokenFile = "/elsewhere/guest", "/elsewhere/token"
	err := running.CheckChange(other)
	if err == nil {
		t.Fatal("it is accepted")
	}
	for _, want := range []string{
		`guest cannot change from "` + running.Guest + `" to "/elsewhere/guest" while the node runs: restart it`,
		`token_file cannot change from "` + running.TokenFile + `" to "/elsewhere/token"`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v\nlacks %s", err, want)
		}
	}
	other = same
	other.Sandbox.MaxSandboxes = -1
	if err := running.CheckChange(other); err == nil {
		t.Error("invalid settings of sandboxes are accepted")
	}
}

func TestHelpersAreInTheFolderOfTheProgram(t *testing.T) {
	cfg := Config{Home: t.TempDir(), Guest: "/elsewhere/guest"}
	if err := cfg.fill(); err != nil {
		t.Fatal(err)
	}
	folder := filepath.Dir(cfg.DiskHelper)
	if !filepath.IsAbs(folder) || cfg.BackupHelper != folder+"/doze-backup" || cfg.NetnsHelper != folder+"/doze-netns" || cfg.Guest != "/elsewhere/guest" {
		t.Errorf("the configuration is %+v", cfg)
	}
}

func TestCheckChangeRefusesAnotherObjectStoreWithoutSecrets(t *testing.T) {
	store := func(change func(*Backups)) *Backups {
		b := &Backups{backup.ObjectStore{Endpoint: "https://s3.example.com", Bucket: "b", Prefix: "doze/", AccessKey: "secret-id", SecretKey: "secret-key"}, "secret-password"}
		if change != nil {
			change(b)
		}
		return b
	}
	home := t.TempDir()
	config := func(b *Backups) Config { return Config{Home: home, Sandbox: sandbox.DefaultConfig(), Backups: b} }
	for name, c := range map[string]struct {
		from, to *Backups
		want     string
	}{
		"none":     {nil, nil, ""},
		"the same": {store(nil), store(nil), ""},
		"added":    {nil, store(nil), `backups cannot change from "none" to "https://s3.example.com/b/doze/" while the node runs: restart it`},
		"removed":  {store(nil), nil, `backups cannot change from "https://s3.example.com/b/doze/" to "none"`},
		"bucket":   {store(nil), store(func(b *Backups) { b.Bucket = "c" }), `to "https://s3.example.com/c/doze/"`},
		"region":   {store(nil), store(func(b *Backups) { b.Region = "eu" }), `to "https://s3.example.com/b/doze/ in eu"`},
		"key":      {store(nil), store(func(b *Backups) { b.SecretKey = "another-secret" }), "backups cannot change its secrets while the node runs: restart it"},
		"password": {store(nil), store(func(b *Backups) { b.Password = "another-secret" }), "backups cannot change its secrets while the node runs: restart it"},
	} {
		err := config(c.from).CheckChange(config(c.to))
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want %s", name, err, c.want)
		}
		if text := fmt.Sprint(err); strings.Contains(text, "secret-") || strings.Contains(text, "-secret") {
			t.Errorf("%s: the error has a secret: %s", name, text)
		}
	}
	if text := fmt.Sprintf("%v %+v", config(store(nil)), config(store(nil))); strings.Contains(text, "secret-") {
		t.Errorf("the configuration is printed with secrets: %s", text)
	}
}
