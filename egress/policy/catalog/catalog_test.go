package catalog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/store/document"
	"github.com/doze-run/doze/runtime/store/storetest"
)

func open(t *testing.T, docs document.Store, dir string) *Modules {
	t.Helper()
	m, err := Open(context.Background(), docs, dir)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func put(t *testing.T, m *Modules, owner, name, module string) Info {
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
	if info.Size != 6 || info.Digest != Digest([]byte("second")) || info.UpdatedAt.IsZero() {
		t.Errorf("got %+v", info)
	}
	for _, m := range []*Modules{m, open(t, docs, dir)} {
		got, module, err := m.Read("a/b", "sign")
		if err != nil || string(module) != "second" || got.Digest != info.Digest {
			t.Errorf("got %+v, %q, %v", got, module, err)
		}
		if list := m.List("a/b"); len(list) != 1 || list[0].Name != "sign" || m.Faults() != nil {
			t.Errorf("got %+v, %v", list, m.Faults())
		}
		if _, err := m.Get("c", "sign"); !errors.Is(err, ErrUnknown) {
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
	if err := m.Delete(t.Context(), "c", "other"); !errors.Is(err, ErrUnknown) {
		t.Errorf("again: %v, want ErrUnknown", err)
	}
	if _, _, err := m.Read("c", "other"); !errors.Is(err, ErrUnknown) {
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
	if err := os.WriteFile(m.path(info.Digest), []byte("forged"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, module, err := m.Read("a", "sign"); module != nil || !errors.Is(err, ErrDamaged) {
		t.Errorf("changed: %q, %v; want ErrDamaged", module, err)
	}
	put(t, m, "a", "sign", "module")
	if _, _, err := m.Read("a", "sign"); err != nil {
		t.Errorf("pushed again: %v", err)
	}
	if err := os.Remove(m.path(info.Digest)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := m.Read("a", "sign"); !errors.Is(err, ErrDamaged) {
		t.Errorf("gone: %v, want ErrDamaged", err)
	}
}

func TestUnreadableRecordsAreFaults(t *testing.T) {
	docs := storetest.New(t)
	for name, value := range map[string]string{
		"a/sign": `{`, "nobody": `{}`, "a/other": `{"name":"else","digest":"` + Digest(nil) + `"}`, "a/path": `{"name":"path","digest":"sha256:../../x"}`,
	} {
		if err := docs.PutDocument(t.Context(), documentKind, name, []byte(value)); err != nil {
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
	m := open(t, storetest.New(t), t.TempDir())
	for _, c := range []struct {
		name   string
		module []byte
		field  string
	}{
		{"../x", []byte("m"), "name"}, {"", []byte("m"), "name"}, {"Sign", []byte("m"), "name"},
		{"sign", nil, "module"}, {"sign", make([]byte, MaxModule+1), "module"},
	} {
		var invalid *problem.InvalidError
		if _, err := m.Put(t.Context(), "a", c.name, c.module); !errors.As(err, &invalid) || invalid.Field != c.field {
			t.Errorf("%q with %d bytes: %v, want an InvalidError of %s", c.name, len(c.module), err, c.field)
		}
	}
	for _, owner := range []string{"", strings.Repeat("o", maxOwner+1)} {
		if _, err := m.Put(t.Context(), owner, "sign", []byte("m")); err == nil {
			t.Errorf("the owner %.10q was taken", owner)
		}
	}
	if files(t, m.dir) != 0 {
		t.Error("something was written")
	}
}

func TestModulesOfAnOwnerAreBounded(t *testing.T) {
	m := open(t, storetest.New(t), t.TempDir())
	for n := range MaxModules {
		m.set("many", Info{Name: fmt.Sprint(n), Digest: Digest(nil)})
	}
	m.set("large", Info{Name: "all", Digest: Digest(nil), Size: MaxOfOwner})
	for _, owner := range []string{"many", "large"} {
		if _, err := m.Put(t.Context(), owner, "sign", []byte("m")); !errors.Is(err, ErrTooMany) {
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
	m := open(t, storetest.New(t), t.TempDir())
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
	if n := files(t, m.dir); n != 1 {
		t.Errorf("%d files are left", n)
	}
}
