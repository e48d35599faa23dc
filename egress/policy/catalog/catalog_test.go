package catalog_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/store/document"
	"github.com/doze-run/doze/runtime/store/storetest"
)

// kind is the kind of the documents.
const kind = "policies"

func open(t *testing.T, docs document.Store, dir string) *catalog.Modules {
	t.Helper()
	m, err := catalog.Open(context.Background(), docs, dir)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func put(t *testing.T, m *catalog.Modules, owner, name, module string) catalog.Info {
	t.Helper()
	info, err := m.Put(context.Background(), owner, name, []byte(module))
	if err != nil {
		t.Fatal(err)
	}
	return info
}

func files(t *testing.T, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestModulesAreStoredAsPushed(t *testing.T) {
	docs, dir := storetest.New(t), filepath.Join(t.TempDir(), "policies")
	m := open(t, docs, dir)
	put(t, m, "a/b", "sign", "first")
	info := put(t, m, "a/b", "sign", "second")
	put(t, m, "c", "other", "second")
	if info.Size != 6 || info.Digest != catalog.Digest([]byte("second")) || info.UpdatedAt.IsZero() {
		t.Errorf("got %+v", info)
	}
	for _, m := range []*catalog.Modules{m, open(t, docs, dir)} {
		got, module, err := m.Read("a/b", "sign")
		if err != nil || string(module) != "second" || got.Digest != info.Digest {
			t.Errorf("got %+v, %q, %v", got, module, err)
		}
		if list := m.List("a/b"); len(list) != 1 || list[0].Name != "sign" || m.Faults() != nil {
			t.Errorf("got %+v, %v", list, m.Faults())
		}
		if _, err := m.Get("c", "sign"); !errors.Is(err, catalog.ErrUnknown) {
			t.Errorf("another owner: %v, want ErrUnknown", err)
		}
	}
	if n := files(t, dir); n != 1 {
		t.Errorf("%d files for one module with two names", n)
	}
	if err := m.Delete(t.Context(), "a/b", "sign"); err != nil {
		t.Fatal(err)
	}
	if _, module, err := m.Read("c", "other"); err != nil || string(module) != "second" {
		t.Errorf("the same module of another is gone: %q, %v", module, err)
	}
	if err := m.Delete(t.Context(), "c", "other"); err != nil || files(t, dir) != 0 {
		t.Errorf("%v, %d files are left", err, files(t, dir))
	}
	if err := m.Delete(t.Context(), "c", "other"); !errors.Is(err, catalog.ErrUnknown) {
		t.Errorf("again: %v, want ErrUnknown", err)
	}
	if _, _, err := m.Read("c", "other"); !errors.Is(err, catalog.ErrUnknown) {
		t.Errorf("Read: %v, want ErrUnknown", err)
	}
}

func TestOpenRemovesUnreferencedFiles(t *testing.T) {
	docs, dir := storetest.New(t), t.TempDir()
	put(t, open(t, docs, dir), "a", "sign", "module")
	for _, name := range []string{".push-123", strings.Repeat("0", 64) + ".wasm"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m := open(t, docs, dir)
	if _, _, err := m.Read("a", "sign"); err != nil || files(t, dir) != 1 {
		t.Errorf("%v, %d files; want the module only", err, files(t, dir))
	}
}

func TestDamagedModulesAreNotUsed(t *testing.T) {
	docs, dir := storetest.New(t), t.TempDir()
	m := open(t, docs, dir)
	info := put(t, m, "a", "sign", "module")
	file := filepath.Join(dir, strings.TrimPrefix(info.Digest, "sha256:")+".wasm")
	if err := os.WriteFile(file, []byte("forged"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, module, err := m.Read("a", "sign"); module != nil || !errors.Is(err, catalog.ErrDamaged) {
		t.Errorf("changed: %q, %v; want ErrDamaged", module, err)
	}
	put(t, m, "a", "sign", "module")
	if _, _, err := m.Read("a", "sign"); err != nil {
		t.Errorf("pushed again: %v", err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if _, _, err := m.Read("a", "sign"); !errors.Is(err, catalog.ErrDamaged) {
		t.Errorf("gone: %v, want ErrDamaged", err)
	}
}

func TestUnreadableRecordsAreFaults(t *testing.T) {
	docs := storetest.New(t)
	for name, value := range map[string]string{
		"a/sign": `{`, "unowned": `{}`, "a/other": `{"name":"else","digest":"` + catalog.Digest(nil) + `"}`, "a/path": `{"name":"path","digest":"sha256:../../x"}`,
	} {
		if err := docs.PutDocument(t.Context(), kind, name, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	m := open(t, docs, t.TempDir())
	if len(m.Faults()) != 4 || len(m.List("a")) != 0 {
		t.Errorf("faults %v, policies %v", m.Faults(), m.List("a"))
	}
	put(t, m, "a", "sign", "module")
}

func TestInvalidNamesAndModulesAreRefused(t *testing.T) {
	dir := t.TempDir()
	m := open(t, storetest.New(t), dir)
	for _, c := range []struct {
		name   string
		module []byte
		field  string
	}{
		{"../x", []byte("m"), "name"}, {"", []byte("m"), "name"}, {"Sign", []byte("m"), "name"},
		{"sign", nil, "module"}, {"sign", make([]byte, catalog.MaxModule+1), "module"},
	} {
		var invalid *problem.InvalidError
		if _, err := m.Put(t.Context(), "a", c.name, c.module); !errors.As(err, &invalid) || invalid.Field != c.field {
			t.Errorf("%q with %d bytes: %v, want an InvalidError of %s", c.name, len(c.module), err, c.field)
		}
	}
	for _, owner := range []string{"", strings.Repeat("o", 129)} {
		if _, err := m.Put(t.Context(), owner, "sign", []byte("m")); err == nil {
			t.Errorf("the owner %.10q was accepted", owner)
		}
	}
	if files(t, dir) != 0 {
		t.Error("something was written")
	}
}

func TestModulesOfAnOwnerAreBounded(t *testing.T) {
	docs := storetest.New(t)
	store := func(owner string, info catalog.Info) {
		t.Helper()
		info.Digest = catalog.Digest(nil)
		value, err := json.Marshal(info)
		if err == nil {
			err = docs.PutDocument(t.Context(), kind, owner+"/"+info.Name, value)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for n := range catalog.MaxModules {
		store("many", catalog.Info{Name: fmt.Sprint(n)})
	}
	store("large", catalog.Info{Name: "all", Size: catalog.MaxOfOwner})
	m := open(t, docs, t.TempDir())
	for _, owner := range []string{"many", "large"} {
		if _, err := m.Put(t.Context(), owner, "sign", []byte("m")); !errors.Is(err, catalog.ErrTooMany) {
			t.Errorf("%s: %v, want ErrTooMany", owner, err)
		}
	}
	put(t, m, "many", "7", "m")
	put(t, m, "large", "all", "m")
}

func TestNothingChangesIfTheStoreFails(t *testing.T) {
	docs, dir := storetest.New(t), t.TempDir()
	m := open(t, docs, dir)
	put(t, m, "a", "sign", "module")
	docs.Close()
	if _, err := m.Put(t.Context(), "a", "sign", []byte("another")); err == nil {
		t.Error("Put reported success")
	}
	if err := m.Delete(t.Context(), "a", "sign"); err == nil {
		t.Error("Delete reported success")
	}
	if _, module, err := m.Read("a", "sign"); err != nil || string(module) != "module" || files(t, dir) != 1 {
		t.Errorf("got %q, %v, and %d files", module, err, files(t, dir))
	}
}

func TestModulesAreReadWholeDuringAPush(t *testing.T) {
	dir := t.TempDir()
	m := open(t, storetest.New(t), dir)
	put(t, m, "a", "sign", "0")
	var wg sync.WaitGroup
	for n := range 4 {
		wg.Go(func() {
			for round := range 20 {
				if _, err := m.Put(t.Context(), "a", "sign", bytes.Repeat([]byte{byte(n)}, 1000+round)); err != nil {
					t.Error(err)
				}
				if _, _, err := m.Read("a", "sign"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := files(t, dir); n != 1 {
		t.Errorf("%d files are left", n)
	}
}
