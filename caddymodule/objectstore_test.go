package caddymodule

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/doze-run/doze/node"
	"github.com/doze-run/doze/runtime/backup"
	"github.com/doze-run/doze/runtime/bucket"
	"github.com/doze-run/doze/testkit"
)

// withBackups returns the configuration of an object store, and what a node gets.
func withBackups(change func(*Backups)) (*Backups, *node.Backups) {
	b := &Backups{ObjectStore{Endpoint: "https://s3.example.com:9000", Bucket: "disks", AccessKey: "id", SecretKey: "key"}, "long enough password"}
	if change != nil {
		change(b)
	}
	return b, &node.Backups{
		ObjectStore: backup.ObjectStore{Endpoint: "https://s3.example.com:9000", Bucket: "disks", AccessKey: "id", SecretKey: "key"}, Password: "long enough password",
	}
}

func TestSecretsOfBackupsAreReplacedWhenTheNodeLoadsThem(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	testkit.NoError(t, "write", os.WriteFile(file, []byte("password of {a} file\n"), 0o600))
	t.Setenv("TEST_KEY", "key{of}env")
	b, want := withBackups(func(b *Backups) {
		b.Endpoint += "/"
		b.Prefix, b.Region, b.SecretKey, b.Password = "doze/node", "eu", "{env.TEST_KEY}", "{file."+file+"}"
	})
	before := *b
	got, err := b.settings()
	testkit.NoError(t, "settings", err)
	want.Prefix, want.Region, want.SecretKey, want.Password = "doze/node/", "eu", "key{of}env", "password of {a} file"
	if *got != *want {
		t.Errorf("got %s with %q and %q", got, got.SecretKey, got.Password)
	}
	if *b != before {
		t.Error("the configuration has changed")
	}
	if got, err := (*Backups)(nil).settings(); got != nil || err != nil {
		t.Errorf("without a configuration: %v, %v", got, err)
	}
}

func TestInvalidSettingsOfBackupsAreRefusedWithoutSecrets(t *testing.T) {
	t.Setenv("TEST_SHORT", "hushed{")
	t.Setenv("TEST_PATH", "http://hush@s3.example.com/path")
	for _, c := range []struct {
		change func(*Backups)
		want   string
	}{
		{func(b *Backups) { b.Endpoint = "" }, "endpoint is missing"},
		{func(b *Backups) { b.Endpoint = "{env.TEST_PATH}" }, "invalid endpoint"},
		{func(b *Backups) { b.Endpoint = "ftp://s3.example.com" }, "invalid endpoint"},
		{func(b *Backups) { b.Endpoint = "http://s3.example.com?hush" }, "invalid endpoint"},
		{func(b *Backups) { b.Endpoint = "http://" }, "invalid endpoint"},
		{func(b *Backups) { b.Endpoint = "http://[hush" }, "invalid endpoint"},
		{func(b *Backups) { b.Bucket = "" }, "bucket is missing"},
		{func(b *Backups) { b.Bucket = "a/b" }, `bucket is "a/b"`},
		{func(b *Backups) { b.Bucket = "b" }, `bucket is "b"; a bucket's name has 3 to 63 letters`},
		{func(b *Backups) { b.Bucket = "-backups" }, `bucket is "-backups"; a bucket's name has`},
		{func(b *Backups) { b.Prefix = "/doze/" }, `prefix is "/doze/"`},
		{func(b *Backups) { b.AccessKey = "" }, "access_key is missing"},
		{func(b *Backups) { b.SecretKey = "" }, "secret_key is missing"},
		{func(b *Backups) { b.SecretKey = "{env.NO_SUCH_VARIABLE}" }, "secret_key is {env.NO_SUCH_VARIABLE}, which is missing or empty"},
		{func(b *Backups) { b.SecretKey = "{file./nonexistent}" }, "secret_key is {file./nonexistent}, which is missing or empty"},
		{func(b *Backups) { b.SecretKey = "a{hush}b" }, "secret_key has a placeholder that is unknown or empty"},
		{func(b *Backups) { b.SecretKey = "{env.NO_SUCH_VARIABLE}hush" }, "secret_key has a placeholder that is unknown or empty"},
		{func(b *Backups) { b.Password = "" }, "password is missing"},
		{func(b *Backups) { b.Password = "hush" }, "password has 4 characters; use at least 12"},
		{func(b *Backups) { b.Password = "{env.TEST_SHORT}" }, "password has 7 characters; use at least 12"},
		{func(b *Backups) { b.Password = "ääääääääääää" }, ""},
	} {
		b, _ := withBackups(c.change)
		_, err := b.settings()
		if c.want == "" {
			testkit.NoError(t, "settings", err)
			continue
		}
		if err == nil || !strings.HasPrefix(err.Error(), "backups: ") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %s", err, c.want)
			continue
		}
		if strings.Contains(err.Error(), "hush") {
			t.Errorf("the error has a secret: %v", err)
		}
	}
}

func TestArchiveAfterRequiresAnObjectStore(t *testing.T) {
	store, _ := withBackups(nil)
	for _, c := range []struct {
		after   *caddy.Duration
		backups *Backups
		want    time.Duration
		refused bool
	}{
		{nil, nil, 0, false},
		{nil, store, 0, false},
		{new(caddy.Duration), nil, 0, false},
		{new(caddy.Duration(time.Hour)), store, time.Hour, false},
		{new(caddy.Duration(time.Hour)), nil, 0, true},
	} {
		a := App{Data: t.TempDir(), ArchiveAfter: c.after, Backups: c.backups}
		got, err := a.nodeConfig()
		if refused := err != nil && strings.Contains(err.Error(), "archive_after requires an object store"); refused != c.refused || !refused && err != nil {
			t.Errorf("%v with %v: %v", c.after, c.backups, err)
		}
		if got.Sandbox.ArchiveAfter != c.want {
			t.Errorf("%v: the node archives after %v", c.after, got.Sandbox.ArchiveAfter)
		}
	}
}

func TestBucketsAreConfigured(t *testing.T) {
	t.Setenv("TEST_KEY", "key{of}env")
	store := ObjectStore{Endpoint: "http://127.0.0.1:9000/", Bucket: "disks", AccessKey: "id", SecretKey: "{env.TEST_KEY}"}
	a := &App{Buckets: map[string]*Bucket{"data": {store, true}, "scratch.1": {store, false}}}
	a.Buckets["data"].Prefix = "public"
	got, err := a.bucketSettings()
	testkit.NoError(t, "bucketSettings", err)
	want := bucket.Bucket{Endpoint: "http://127.0.0.1:9000", Bucket: "disks", AccessKey: "id", SecretKey: "key{of}env"}
	if got["scratch.1"] != want {
		t.Errorf("got %+v", got["scratch.1"])
	}
	want.Prefix, want.ReadOnly = "public/", true
	if got["data"] != want {
		t.Errorf("got %+v", got["data"])
	}
	for name, change := range map[string]func(*Bucket){
		"/":    func(*Bucket) {},
		"data": func(b *Bucket) { b.SecretKey = "a{hush}b" },
		"d":    func(b *Bucket) { b.Endpoint = "http://hush@s3.example.com" },
		"e":    func(b *Bucket) { b.Bucket = "" },
	} {
		b := &Bucket{ObjectStore: store}
		change(b)
		_, err := (&App{Buckets: map[string]*Bucket{name: b}}).bucketSettings()
		if err == nil || strings.Contains(err.Error(), "hush") || !strings.Contains(err.Error(), `"`+name+`"`) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}
