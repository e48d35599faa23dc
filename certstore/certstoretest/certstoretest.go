// Package certstoretest has the conformance suite of certmagic.Storage, which
// certmagic.FileStorage and certstore.Storage pass.
package certstoretest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/certmagic"

	"github.com/doze-run/doze/testkit"
)

// Storage is a certmagic.Storage with locks that a caller need not wait for.
type Storage interface {
	certmagic.Storage
	TryLock(ctx context.Context, name string) (bool, error)
}

// System is an empty storage.
type System struct {
	Storage Storage
	// Abandon leaves a lock as a process that is killed while it holds the lock does. It
	// returns the storage of the next process.
	Abandon func(t testing.TB, name string) Storage
}

// Run runs the suite. open returns a new system each time.
func Run(t *testing.T, open func(t *testing.T) System) {
	for _, c := range []struct {
		name string
		test func(*testing.T, System)
	}{
		{"a value is loaded as it was stored", valueLoaded},
		{"a value replaces the older one", valueReplaced},
		{"a missing key is fs.ErrNotExist", missing},
		{"a deleted value is gone and deleting is idempotent", valueDeleted},
		{"a directory is deleted with all below it", directoryDeleted},
		{"a prefix consists of whole components", componentsExist},
		{"stat describes values and directories", statDescribes},
		{"a directory lists what is in it", directoryListed},
		{"a recursive list has directories", listedRecursively},
		{"an empty storage is empty", emptyStorage},
		{"keys of certificates have long names", certificateKeys},
		{"values have any size that certificates need", largeValue},
		{"concurrent writers leave a whole value", concurrentWriters},
		{"all methods work concurrently", concurrentMethods},
		{"an ended context ends a list", endedContext},
		{"a lock excludes", lockExcludes},
		{"locks have names", locksHaveNames},
		{"a lock waits for its release", lockWaits},
		{"an ended context ends the wait for a lock", lockCanceled},
		{"a lock that is not held cannot be released", unlockUnheld},
		{"the lock of a dead process can be acquired", lockOfTheDead},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, open(t)) })
	}
}

func put(t *testing.T, s Storage, keys ...string) {
	t.Helper()
	for _, key := range keys {
		testkit.NoError(t, "store "+key, s.Store(t.Context(), key, []byte("value of "+key)))
	}
}

func mustHave(t *testing.T, s Storage, key, want string) {
	t.Helper()
	if got, err := s.Load(t.Context(), key); err != nil || string(got) != want {
		t.Errorf("load %s: %.80q, %v; want %.80q", key, got, err, want)
	}
	if !s.Exists(t.Context(), key) {
		t.Errorf("%s does not exist", key)
	}
}

func mustLack(t *testing.T, s Storage, keys ...string) {
	t.Helper()
	for _, key := range keys {
		_, err := s.Load(t.Context(), key)
		testkit.ErrorIs(t, "load "+key, err, fs.ErrNotExist)
		_, err = s.Stat(t.Context(), key)
		testkit.ErrorIs(t, "stat "+key, err, fs.ErrNotExist)
		if s.Exists(t.Context(), key) {
			t.Errorf("%s exists", key)
		}
	}
}

// mustList compares the keys of a directory in any order.
func mustList(t *testing.T, s Storage, directory string, recursive bool, want ...string) {
	t.Helper()
	got, err := s.List(t.Context(), directory, recursive)
	if err != nil {
		t.Fatalf("list %q: %v", directory, err)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("list %q, recursive %t: got %q, want %q", directory, recursive, got, want)
	}
}

func valueLoaded(t *testing.T, s System) {
	for key, value := range map[string]string{"a": "text", "b/c": "\x00\xff\n", "d/e/f": ""} {
		value := []byte(value)
		testkit.NoError(t, "store", s.Storage.Store(t.Context(), key, value))
		want := string(value)
		if len(value) > 0 {
			value[0] = 'X' // the caller's
		}
		mustHave(t, s.Storage, key, want)
	}
}

func valueReplaced(t *testing.T, s System) {
	put(t, s.Storage, "a/b")
	testkit.NoError(t, "store", s.Storage.Store(t.Context(), "a/b", []byte("new")))
	mustHave(t, s.Storage, "a/b", "new")
	mustList(t, s.Storage, "a", true, "a/b")
}

func missing(t *testing.T, s System) {
	put(t, s.Storage, "a/b")
	mustLack(t, s.Storage, "b", "a/c", "aa", "b/a/b")
	for _, recursive := range []bool{false, true} {
		_, err := s.Storage.List(t.Context(), "nothing/here", recursive)
		testkit.ErrorIs(t, "list", err, fs.ErrNotExist)
	}
}

func valueDeleted(t *testing.T, s System) {
	put(t, s.Storage, "a/b", "a/c")
	for range 2 {
		testkit.NoError(t, "delete", s.Storage.Delete(t.Context(), "a/b"))
	}
	mustLack(t, s.Storage, "a/b")
	mustHave(t, s.Storage, "a/c", "value of a/c")
	testkit.NoError(t, "delete", s.Storage.Delete(t.Context(), "never/stored"))
}

func directoryDeleted(t *testing.T, s System) {
	put(t, s.Storage, "a/b", "a/c/d", "a/c/e/f", "a.b/c", "ab", "b/a/b")
	testkit.NoError(t, "delete", s.Storage.Delete(t.Context(), "a"))
	mustLack(t, s.Storage, "a/b", "a/c/d", "a/c/e/f", "a/c", "a")
	for _, key := range []string{"a.b/c", "ab", "b/a/b"} {
		mustHave(t, s.Storage, key, "value of "+key)
	}
}

func componentsExist(t *testing.T, s System) {
	put(t, s.Storage, "ab/cd/ef")
	for key, want := range map[string]bool{"ab": true, "ab/cd": true, "ab/cd/ef": true, "a": false, "ab/c": false, "ab/cd/e": false, "abc": false} {
		if got := s.Storage.Exists(t.Context(), key); got != want {
			t.Errorf("%s: exists is %t, want %t", key, got, want)
		}
	}
}

func statDescribes(t *testing.T, s System) {
	before := time.Now().Add(-time.Minute) // the clock of a file system may be another
	put(t, s.Storage, "a/b")
	info, err := s.Storage.Stat(t.Context(), "a/b")
	testkit.NoError(t, "stat", err)
	if info.Modified.Before(before) || info.Modified.After(time.Now().Add(time.Minute)) {
		t.Errorf("modified at %s", info.Modified)
	}
	info.Modified = time.Time{}
	testkit.Diff(t, "the value", info, certmagic.KeyInfo{Key: "a/b", Size: int64(len("value of a/b")), IsTerminal: true})
	info, err = s.Storage.Stat(t.Context(), "a")
	testkit.NoError(t, "stat", err)
	if info.Key != "a" || info.IsTerminal {
		t.Errorf("the directory is %+v", info)
	}
}

func directoryListed(t *testing.T, s System) {
	put(t, s.Storage, "a/b", "a/c/d", "a/c/e/f", "a/c.d", "a/c-d/e", "a/c0", "aa/b", "z")
	mustList(t, s.Storage, "a", false, "a/b", "a/c", "a/c.d", "a/c-d", "a/c0")
	mustList(t, s.Storage, "a/c", false, "a/c/d", "a/c/e")
	mustList(t, s.Storage, "", false, "a", "aa", "z")
	mustList(t, s.Storage, "a/b", false) // a value
}

func listedRecursively(t *testing.T, s System) {
	put(t, s.Storage, "a/b", "a/c/d", "a/c/e/f", "a/c/e/g", "a/c.d", "a/c-d/e", "aa/b")
	all := []string{"a/b", "a/c", "a/c/d", "a/c/e", "a/c/e/f", "a/c/e/g", "a/c.d", "a/c-d", "a/c-d/e"}
	mustList(t, s.Storage, "a", true, all...)
	mustList(t, s.Storage, "", true, append(all, "a", "aa", "aa/b")...)
	mustList(t, s.Storage, "a/b", true)
}

func emptyStorage(t *testing.T, s System) {
	put(t, s.Storage, "a/b")
	testkit.NoError(t, "delete", s.Storage.Delete(t.Context(), "a"))
	mustLack(t, s.Storage, "a", "a/b")
	_, err := s.Storage.List(t.Context(), "a", true)
	testkit.ErrorIs(t, "list", err, fs.ErrNotExist)
}

func certificateKeys(t *testing.T, s System) {
	const issuer = "acme-v02.api.letsencrypt.org-directory"
	host := strings.Repeat("a123456789.", 22) + "example"
	for _, domain := range []string{"example.com", "*.preview.example.com", "127.0.0.1", "2001:db8::1", host} {
		keys := certmagic.StorageKeys
		files := []string{keys.SiteCert(issuer, domain), keys.SitePrivateKey(issuer, domain), keys.SiteMeta(issuer, domain)}
		put(t, s.Storage, files...)
		for _, key := range files {
			mustHave(t, s.Storage, key, "value of "+key)
		}
		mustList(t, s.Storage, keys.CertsSitePrefix(issuer, domain), false, files...)
		mustHaveDirectory(t, s.Storage, path.Dir(files[0]))
	}
}

func mustHaveDirectory(t *testing.T, s Storage, key string) {
	t.Helper()
	if info, err := s.Stat(t.Context(), key); err != nil || info.IsTerminal {
		t.Errorf("%s is %+v, %v", key, info, err)
	}
}

func largeValue(t *testing.T, s System) {
	value := bytes.Repeat([]byte("certificate"), 50_000)
	testkit.NoError(t, "store", s.Storage.Store(t.Context(), "large", value))
	if got, err := s.Storage.Load(t.Context(), "large"); err != nil || !bytes.Equal(got, value) {
		t.Errorf("got %d bytes, %v", len(got), err)
	}
}

func concurrentWriters(t *testing.T, s System) {
	var all sync.WaitGroup
	values := map[string]bool{}
	for n := range 8 {
		value := strings.Repeat(string(rune('a'+n)), 20_000+n)
		values[value] = true
		all.Go(func() {
			for range 5 {
				if err := s.Storage.Store(t.Context(), "a/b", []byte(value)); err != nil {
					t.Error(err)
				}
			}
		})
		all.Go(func() {
			for range 5 {
				got, err := s.Storage.Load(t.Context(), "a/b")
				if err == nil && len(got) < 20_000 || err != nil && !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("load during writes: %d bytes, %v", len(got), err)
				}
			}
		})
	}
	all.Wait()
	if got, err := s.Storage.Load(t.Context(), "a/b"); err != nil || !values[string(got)] {
		t.Errorf("the value has %d bytes, %v", len(got), err)
	}
}

func concurrentMethods(t *testing.T, s System) {
	put(t, s.Storage, "shared/key")
	var all sync.WaitGroup
	for n := range 8 {
		all.Go(func() {
			for round := range 5 {
				key := fmt.Sprintf("shared/%d/%d", n, round)
				err := s.Storage.Store(t.Context(), key, []byte(key))
				if got, loaded := s.Storage.Load(t.Context(), key); loaded != nil || string(got) != key {
					t.Errorf("%s: %q, %v", key, got, loaded)
				}
				_, stat := s.Storage.Stat(t.Context(), "shared/key")
				_, list := s.Storage.List(t.Context(), fmt.Sprintf("shared/%d", n), true)
				if err := errors.Join(err, stat, list, s.Storage.Delete(t.Context(), key)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	mustHave(t, s.Storage, "shared/key", "value of shared/key")
}

func endedContext(t *testing.T, s System) {
	put(t, s.Storage, "a/b")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Storage.List(ctx, "a", true)
	testkit.ErrorIs(t, "list", err, context.Canceled)
}

func lockExcludes(t *testing.T, s System) {
	var all sync.WaitGroup
	var held, count atomic.Int32
	for range 3 {
		all.Go(func() {
			if err := s.Storage.Lock(t.Context(), "name"); err != nil {
				t.Error(err)
				return
			}
			// Atomic, because locks of files order nothing for the race detector.
			if n := held.Add(1); n != 1 {
				t.Errorf("%d callers have the lock", n)
			}
			if ok, err := s.Storage.TryLock(t.Context(), "name"); ok || err != nil {
				t.Errorf("TryLock of a lock that is held: %t, %v", ok, err)
			}
			held.Add(-1)
			count.Add(1)
			if err := s.Storage.Unlock(t.Context(), "name"); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if n := count.Load(); n != 3 {
		t.Errorf("%d callers had the lock, want 3", n)
	}
	if ok, err := s.Storage.TryLock(t.Context(), "name"); !ok || err != nil {
		t.Errorf("TryLock of a free lock: %t, %v", ok, err)
	}
	testkit.NoError(t, "unlock", s.Storage.Unlock(t.Context(), "name"))
}

func locksHaveNames(t *testing.T, s System) {
	names := []string{"a", "b", "issue_cert_example.com", "issue_cert_*.example.com"}
	for _, name := range names {
		testkit.NoError(t, "lock "+name, s.Storage.Lock(t.Context(), name))
	}
	for _, name := range names {
		testkit.NoError(t, "unlock "+name, s.Storage.Unlock(t.Context(), name))
	}
	mustLack(t, s.Storage, names...) // a lock is not a value
}

func lockWaits(t *testing.T, s System) {
	testkit.NoError(t, "lock", s.Storage.Lock(t.Context(), "name"))
	acquired := make(chan error, 1)
	go func() { acquired <- s.Storage.Lock(t.Context(), "name") }()
	put(t, s.Storage, "a") // values are independent of locks
	select {
	case err := <-acquired:
		t.Fatalf("two callers have the lock: %v", err)
	default:
	}
	testkit.NoError(t, "unlock", s.Storage.Unlock(t.Context(), "name"))
	testkit.NoError(t, "lock", testkit.Receive(t, "the lock is acquired", acquired))
	testkit.NoError(t, "unlock", s.Storage.Unlock(t.Context(), "name"))
}

func lockCanceled(t *testing.T, s System) {
	testkit.NoError(t, "lock", s.Storage.Lock(t.Context(), "name"))
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() { failed <- s.Storage.Lock(ctx, "name") }()
	cancel()
	testkit.ErrorIs(t, "lock", testkit.Receive(t, "the wait ends", failed), context.Canceled)
	testkit.NoError(t, "unlock", s.Storage.Unlock(t.Context(), "name"))
	if ok, err := s.Storage.TryLock(t.Context(), "name"); !ok || err != nil {
		t.Errorf("the canceled caller has the lock: %t, %v", ok, err)
	}
	testkit.NoError(t, "unlock", s.Storage.Unlock(t.Context(), "name"))
}

func unlockUnheld(t *testing.T, s System) {
	if err := s.Storage.Unlock(t.Context(), "name"); err == nil {
		t.Error("a lock that is not held was released")
	}
	testkit.NoError(t, "lock", s.Storage.Lock(t.Context(), "name"))
	testkit.NoError(t, "unlock", s.Storage.Unlock(t.Context(), "name"))
	if err := s.Storage.Unlock(t.Context(), "name"); err == nil {
		t.Error("a lock was released twice")
	}
}

func lockOfTheDead(t *testing.T, s System) {
	put(t, s.Storage, "a/b")
	next := s.Abandon(t, "name")
	testkit.NoError(t, "lock", next.Lock(testkit.Context(t), "name"))
	if ok, err := next.TryLock(t.Context(), "name"); ok || err != nil {
		t.Errorf("TryLock of a lock that is held: %t, %v", ok, err)
	}
	testkit.NoError(t, "unlock", next.Unlock(t.Context(), "name"))
	mustHave(t, next, "a/b", "value of a/b")
}
