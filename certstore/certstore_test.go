package certstore

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/certmagic"
	"go.uber.org/goleak"

	"github.com/doze-run/doze/certstore/certstoretest"
	"github.com/doze-run/doze/egress/secret/seal"
	"github.com/doze-run/doze/runtime/store"
	"github.com/doze-run/doze/testkit"
)

// childEnv makes the test binary a process that holds a lock of the storage in the folder
// that the variable names.
const childEnv = "DOZE_CERTSTORE_TEST_DIR"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		os.Exit(holdLock(dir, os.Args[1]))
	}
	testkit.Main(m, goleak.IgnoreAnyFunction("github.com/caddyserver/certmagic.keepLockfileFresh")) // it ends after seconds
}

// holdLock acquires a lock, reports that, and holds it until the process is killed.
func holdLock(dir, name string) int {
	s, err := openIn(dir)
	if err == nil {
		err = s.Lock(context.Background(), name)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println("locked")
	io.Copy(io.Discard, os.Stdin)
	return 1
}

// openIn opens a storage on a store in a folder.
func openIn(dir string) (*Storage, error) {
	records, err := store.Open(filepath.Join(dir, "store"), nil)
	if err != nil {
		return nil, err
	}
	key, err := seal.Open(filepath.Join(dir, "seal.key"))
	if err != nil {
		return nil, errors.Join(err, records.Close())
	}
	return Open(context.Background(), Config{Store: records, Key: key, Folder: filepath.Join(dir, "caddy")})
}

func mustOpen(t testing.TB, dir string) *Storage {
	t.Helper()
	s, err := openIn(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.cfg.Store.Close() })
	return s
}

func (s *Storage) mustClose(t testing.TB) {
	t.Helper()
	if err := s.cfg.Store.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestStorageConforms(t *testing.T) {
	certstoretest.Run(t, func(t *testing.T) certstoretest.System {
		dir := t.TempDir()
		s := mustOpen(t, dir)
		return certstoretest.System{Storage: s, Abandon: func(t testing.TB, name string) certstoretest.Storage {
			s.mustClose(t)
			killHolder(t, dir, name)
			return mustOpen(t, dir)
		}}
	})
}

// killHolder kills a process that holds a lock.
func killHolder(t testing.TB, dir, name string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], name)
	cmd.Env = append(os.Environ(), childEnv+"="+dir)
	cmd.Stderr = os.Stderr
	_, err := cmd.StdinPipe()
	testkit.NoError(t, "pipe", err)
	out, err := cmd.StdoutPipe()
	testkit.NoError(t, "pipe", err)
	testkit.NoError(t, "start", cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	testkit.NoError(t, "kill", cmd.Process.Kill())
	cmd.Wait()
	if line != "locked\n" {
		t.Fatalf("the holder printed %q, %v", line, err)
	}
}

// The suite describes what Caddy relies on: its own storage passes it, too.
func TestFileStorageConforms(t *testing.T) {
	certstoretest.Run(t, func(t *testing.T) certstoretest.System {
		s := &certmagic.FileStorage{Path: t.TempDir()}
		return certstoretest.System{Storage: s, Abandon: func(t testing.TB, name string) certstoretest.Storage {
			long := time.Now().Add(-time.Hour)
			text, err := json.Marshal(map[string]time.Time{"created": long, "updated": long})
			testkit.NoError(t, "encode", err)
			testkit.NoError(t, "make folder", os.MkdirAll(filepath.Join(s.Path, "locks"), 0o700))
			testkit.NoError(t, "write", os.WriteFile(filepath.Join(s.Path, "locks", name+".lock"), text, 0o600))
			return s
		}}
	})
}

func TestBoundsOfKeysAndValues(t *testing.T) {
	s := mustOpen(t, t.TempDir())
	ctx := t.Context()
	long := strings.Repeat("k", maxKey)
	testkit.NoError(t, "store", s.Store(ctx, long, nil))
	if !s.Exists(ctx, long) {
		t.Error("a value with a long key does not exist")
	}
	for name, err := range map[string]error{
		"a key that is too long":   s.Store(ctx, long+"k", nil),
		"an empty key":             s.Store(ctx, "", nil),
		"a key without components": s.Store(ctx, "//", nil),
		"a value that is too long": s.Store(ctx, "a", make([]byte, 800<<10)),
	} {
		if err == nil {
			t.Errorf("%s was stored", name)
		}
	}
	for _, key := range []string{long + "k", "a"} {
		_, err := s.Load(ctx, key)
		testkit.ErrorIs(t, "load", err, fs.ErrNotExist)
		testkit.NoError(t, "delete", s.Delete(ctx, key))
	}
	testkit.NoError(t, "store", s.Store(ctx, "a", make([]byte, 799<<10)))
}

func TestKeysNeverLeaveTheRoot(t *testing.T) {
	s := mustOpen(t, t.TempDir())
	for _, key := range []string{"/a/b", "a/b/", "a//b", "a/./b", "../a/b", "c/../a/b", "../../a/b"} {
		testkit.NoError(t, "store", s.Store(t.Context(), key, []byte(key)))
		if got, err := s.Load(t.Context(), "a/b"); err != nil || string(got) != key {
			t.Errorf("%s: the value of a/b is %q, %v", key, got, err)
		}
	}
	keys, err := s.List(t.Context(), "", true)
	testkit.NoError(t, "list", err)
	testkit.Diff(t, "the keys", keys, []string{"a", "a/b"})
}

func TestAnEndedContextChangesNothing(t *testing.T) {
	s := mustOpen(t, t.TempDir())
	testkit.NoError(t, "store", s.Store(t.Context(), "a/b", []byte("value")))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, load := s.Load(ctx, "a/b")
	_, stat := s.Stat(ctx, "a/b")
	_, try := s.TryLock(ctx, "name")
	for name, err := range map[string]error{
		"store": s.Store(ctx, "a/b", []byte("new")), "load": load, "stat": stat,
		"delete": s.Delete(ctx, "a"), "lock": s.Lock(ctx, "name"), "try lock": try,
	} {
		testkit.ErrorIs(t, name, err, context.Canceled)
	}
	if got, err := s.Load(t.Context(), "a/b"); err != nil || string(got) != "value" {
		t.Errorf("the value is %q, %v", got, err)
	}
	if ok, err := s.TryLock(t.Context(), "name"); !ok || err != nil {
		t.Errorf("a canceled caller has the lock: %t, %v", ok, err)
	}
}

// Caddy releases the locks of its process after it has closed the node.
func TestLocksAreReleasedAfterTheStoreIsClosed(t *testing.T) {
	s := mustOpen(t, t.TempDir())
	testkit.NoError(t, "lock", s.Lock(t.Context(), "name"))
	s.mustClose(t)
	testkit.NoError(t, "unlock", s.Unlock(t.Context(), "name"))
	if err := s.Store(t.Context(), "a", nil); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("store after the end: %v", err)
	}
	if _, err := s.Load(t.Context(), "a"); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("load after the end: %v", err)
	}
}

const secretText = "-----BEGIN PRIVATE KEY-----"

func TestNoValueIsStoredInPlainText(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	testkit.NoError(t, "store", s.Store(t.Context(), "certificates/a/b.key", []byte(secretText)))
	s.mustClose(t)
	found := 0
	err := filepath.WalkDir(dir, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		content, err := os.ReadFile(file)
		if bytes.Contains(content, []byte("PRIVATE KEY")) {
			t.Errorf("%s has the key in plain text", file)
		}
		if bytes.Contains(content, []byte("certificates/a/b.key")) {
			found++
		}
		return err
	})
	testkit.NoError(t, "read the files", err)
	if found == 0 {
		t.Error("no file has the value: the test reads the wrong files")
	}
}

// Write access to the store does not suffice to serve one host with the key of another.
func TestAValueIsBoundToItsKey(t *testing.T) {
	s := mustOpen(t, t.TempDir())
	testkit.NoError(t, "store", s.Store(t.Context(), "a", []byte("value")))
	sealed, err := s.cfg.Store.Document(t.Context(), valueKind, "a")
	testkit.NoError(t, "read", err)
	testkit.NoError(t, "write", s.cfg.Store.PutDocument(t.Context(), valueKind, "b", sealed))
	_, err = s.Load(t.Context(), "b")
	testkit.ErrorIs(t, "load", err, seal.ErrBroken)
}

// As fs.ErrNotExist, a lost key would make Caddy create new authorities and accounts.
func TestAValueOfAnotherSealingKeyIsNotMissing(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	testkit.NoError(t, "store", s.Store(t.Context(), "a/b", []byte("value")))
	s.mustClose(t)
	testkit.NoError(t, "remove", os.Remove(filepath.Join(dir, "seal.key")))
	s = mustOpen(t, dir)
	_, load := s.Load(t.Context(), "a/b")
	_, stat := s.Stat(t.Context(), "a/b")
	for name, err := range map[string]error{"load": load, "stat": stat} {
		testkit.ErrorIs(t, name, err, seal.ErrOtherKey)
		if errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOpenSealsWithTheNewKey(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "seal.key")
	s := mustOpen(t, dir)
	for _, key := range []string{"a", "b/c"} {
		testkit.NoError(t, "store", s.Store(t.Context(), key, []byte(key)))
	}
	s.mustClose(t)
	old, err := os.ReadFile(file)
	testkit.NoError(t, "read", err)
	key := make([]byte, 32)
	rand.Read(key)
	newKey := base64.StdEncoding.EncodeToString(key) + "\n"
	testkit.NoError(t, "write", os.WriteFile(file, append([]byte(newKey), old...), 0o600))
	mustOpen(t, dir).mustClose(t)
	testkit.NoError(t, "write", os.WriteFile(file, []byte(newKey), 0o600))
	s = mustOpen(t, dir)
	for _, key := range []string{"a", "b/c"} {
		if got, err := s.Load(t.Context(), key); err != nil || string(got) != key {
			t.Errorf("%s: %q, %v", key, got, err)
		}
	}
}

// tree writes files with their own names as their content.
func tree(t *testing.T, root string, names ...string) {
	t.Helper()
	for _, name := range names {
		file := filepath.Join(root, filepath.FromSlash(name))
		testkit.NoError(t, "make folder", os.MkdirAll(filepath.Dir(file), 0o700))
		testkit.NoError(t, "write", os.WriteFile(file, []byte(name), 0o600))
	}
}

const (
	rootCert = "pki/authorities/local/root.crt"
	rootKey  = "pki/authorities/local/root.key"
)

func TestFilesOfEarlierVersionsAreImportedOnce(t *testing.T) {
	dir := t.TempDir()
	folder := filepath.Join(dir, "caddy")
	tree(t, folder, rootCert, rootKey, "certificates/a/b/b.crt", "acme/a/users/me/me.key", "last_clean.json", "locks/storage_clean.lock")
	modified := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	testkit.NoError(t, "change times", os.Chtimes(filepath.Join(folder, "last_clean.json"), modified, modified))
	s := mustOpen(t, dir)
	for _, key := range []string{rootCert, rootKey, "certificates/a/b/b.crt", "acme/a/users/me/me.key", "last_clean.json"} {
		if got, err := s.Load(t.Context(), key); err != nil || string(got) != key {
			t.Errorf("%s: %q, %v", key, got, err)
		}
	}
	if s.Exists(t.Context(), "locks") {
		t.Error("locks were imported")
	}
	if info, err := s.Stat(t.Context(), "last_clean.json"); err != nil || !info.Modified.Equal(modified) {
		t.Errorf("got %+v, %v", info, err)
	}
	mustHaveFile(t, filepath.Join(folder, rootKey), rootKey) // the configuration may return to the files
	mustHaveFile(t, filepath.Join(folder, rootCert), rootCert)

	testkit.NoError(t, "delete", s.Delete(t.Context(), "acme"))
	s.mustClose(t)
	tree(t, folder, "acme/a/users/me/me.key")
	if mustOpen(t, dir).Exists(t.Context(), "acme") {
		t.Error("a file was imported again")
	}
}

func TestFolderThatIsALinkIsImported(t *testing.T) {
	dir, elsewhere := t.TempDir(), t.TempDir()
	tree(t, elsewhere, rootCert, rootKey)
	testkit.NoError(t, "link", os.Symlink(elsewhere, filepath.Join(dir, "caddy")))
	if got, err := mustOpen(t, dir).Load(t.Context(), rootKey); err != nil || string(got) != rootKey {
		t.Errorf("the key is %q, %v", got, err)
	}
}

func mustHaveFile(t *testing.T, file, want string) {
	t.Helper()
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("%s contains %q, %v; want %q", file, got, err, want)
	}
}

// A process that was killed has imported some files, and renewed one of them.
func TestAnInterruptedImportContinues(t *testing.T) {
	dir := t.TempDir()
	s := mustOpen(t, dir)
	testkit.NoError(t, "store", s.Store(t.Context(), "certificates/a", []byte("renewed")))
	testkit.NoError(t, "delete", s.cfg.Store.DeleteDocument(t.Context(), stateKind, importedName))
	s.mustClose(t)
	tree(t, filepath.Join(dir, "caddy"), "certificates/a", "certificates/b")
	s = mustOpen(t, dir)
	for key, want := range map[string]string{"certificates/a": "renewed", "certificates/b": "certificates/b"} {
		if got, err := s.Load(t.Context(), key); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", key, got, err)
		}
	}
}

func TestForeignFilesAreNotImported(t *testing.T) {
	dir := t.TempDir()
	folder := filepath.Join(dir, "caddy")
	tree(t, folder, "certificates/a", rootCert) // a root that writeRoot wrote has no key next to it
	testkit.NoError(t, "write", os.WriteFile(filepath.Join(folder, "large"), make([]byte, maxFile+1), 0o600))
	testkit.NoError(t, "link", os.Symlink("/etc/passwd", filepath.Join(folder, "link")))
	s := mustOpen(t, dir)
	keys, err := s.List(t.Context(), "", true)
	testkit.NoError(t, "list", err)
	testkit.Diff(t, "the keys", keys, []string{"certificates", "certificates/a"})
}

func TestRootsAreFiles(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "caddy", rootCert)
	s := mustOpen(t, dir)
	testkit.NoError(t, "store", errors.Join(s.Store(t.Context(), rootKey, []byte("key")), s.Store(t.Context(), rootCert, []byte("one"))))
	mustHaveFile(t, file, "one")
	testkit.NoError(t, "store", s.Store(t.Context(), rootCert, []byte("two")))
	mustHaveFile(t, file, "two")
	if _, err := os.Stat(filepath.Join(dir, "caddy", rootKey)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a private key was written to a file: %v", err)
	}
	s.mustClose(t)
	// As after a restored backup.
	testkit.NoError(t, "remove", os.RemoveAll(filepath.Join(dir, "caddy")))
	s = mustOpen(t, dir)
	mustHaveFile(t, file, "two")
	testkit.NoError(t, "delete", s.Delete(t.Context(), "pki"))
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file of a deleted authority: %v", err)
	}
}
