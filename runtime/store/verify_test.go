package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

// written returns a folder with a store of several tables and, unless closed, a log. No
// process has the store open.
func written(t *testing.T, closed bool) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	s := openAt(t, dir, small)
	for n := range 8 {
		rec := testRecord(n)
		rec.Env = map[string]string{"PAD": strings.Repeat("x", 60<<10)}
		for range 4 {
			if err := s.PutSandbox(context.Background(), rec); err != nil {
				t.Fatal(err)
			}
		}
	}
	if closed {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	// A log that becomes a table in the background would be deleted while it is copied.
	testkit.Eventually(t, "full logs have become tables", func() bool {
		logs, err := filepath.Glob(filepath.Join(dir, "*.mem"))
		return err == nil && len(logs) == 1
	})
	copied := filepath.Join(t.TempDir(), "copy")
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil { // as a kill leaves it
		t.Fatal(err)
	}
	return copied
}

// found returns the path of the matching file with the most content.
func found(t *testing.T, dir, pattern string) string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(names) == 0 {
		t.Fatalf("no %s in %s: %v", pattern, dir, err)
	}
	return slices.MaxFunc(names, func(a, b string) int { return len(content(t, a)) - len(content(t, b)) })
}

func content(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.TrimRight(data, "\x00")
}

func TestDamagedStoreDoesNotOpen(t *testing.T) {
	overwrite := func(at func(size int) int, b []byte) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			offset := int64(at(len(content(t, path))))
			if len(b) == 1 { // a flip
				if _, err := f.ReadAt(b, offset); err != nil {
					t.Fatal(err)
				}
				b = []byte{b[0] ^ 0x10}
			}
			if _, err := f.WriteAt(b, offset); err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	flip := func(at func(int) int) func(*testing.T, string) { return overwrite(at, make([]byte, 1)) }
	truncate := func(at func(int) int) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			if err := os.Truncate(path, int64(at(len(content(t, path))))); err != nil {
				t.Fatal(err)
			}
		}
	}
	remove := func(t *testing.T, path string) {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	begin := func(int) int { return 3 }
	third := func(n int) int { return n / 3 }
	end := func(n int) int { return n - 2 }
	for name, c := range map[string]struct {
		closed bool
		file   string
		damage func(*testing.T, string)
		words  string
	}{
		"flipped byte in a table":       {true, "*.sst", flip(third), "checksum"},
		"flipped byte at its start":     {true, "*.sst", flip(begin), "checksum"},
		"flipped byte at its end":       {true, "*.sst", flip(end), ""},
		"zeros in a table":              {true, "*.sst", overwrite(third, make([]byte, 4096)), "checksum"},
		"zeros at its end":              {true, "*.sst", overwrite(func(n int) int { return n - 64 }, make([]byte, 64)), "end"},
		"truncated table":               {true, "*.sst", truncate(third), ""},
		"table of 3 bytes":              {true, "*.sst", truncate(begin), "truncated"},
		"empty table":                   {true, "*.sst", truncate(func(int) int { return 0 }), "truncated"},
		"missing table":                 {true, "*.sst", remove, "missing"},
		"missing manifest":              {true, "MANIFEST", remove, "missing"},
		"empty manifest":                {true, "MANIFEST", truncate(func(int) int { return 0 }), "read"},
		"flipped byte in the manifest":  {true, "MANIFEST", flip(end), "read"},
		"truncated manifest":            {true, "MANIFEST", truncate(func(n int) int { return n - 3 }), "truncated"},
		"missing manifest after a kill": {false, "MANIFEST", remove, "missing"},
		"flipped byte in the log":       {false, "*.mem", flip(third), "gap"},
		"zeros in the log":              {false, "*.mem", overwrite(third, make([]byte, 4096)), "gap"},
		"truncated log":                 {false, "*.mem", truncate(begin), "truncated"},
		"truncated value log":           {false, "*.vlog", truncate(begin), "truncated"},
		"overwritten value log":         {false, "*.vlog", overwrite(func(int) int { return 100 }, []byte("garbage")), "overwritten"},
		"overwritten registry":          {true, "KEYREGISTRY", flip(end), ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := written(t, c.closed)
			path := filepath.Join(dir, c.file)
			if strings.Contains(c.file, "*") {
				path = found(t, dir, c.file)
			}
			c.damage(t, path)
			for method, open := range map[string]func() error{
				"Verify": func() error { return Verify(dir) },
				"Open": func() error {
					s, err := open(dir, "", nil, small)
					if err == nil {
						s.Close()
					}
					return err
				},
			} {
				err := open()
				var damage *DamageError
				if !errors.As(err, &damage) {
					t.Fatalf("%s: %v, want a *DamageError", method, err)
				}
				if damage.Path != path || damage.Lost == "" || damage.Remedy == "" || !strings.Contains(damage.Problem, c.words) || len(err.Error()) > 1500 {
					t.Errorf("%s: %v; want it to contain %s and %q", method, err, path, c.words)
				}
			}
		})
	}
}

func TestStoreThatIsNotDamagedVerifies(t *testing.T) {
	for name, closed := range map[string]bool{"closed": true, "killed": false} {
		t.Run(name, func(t *testing.T) {
			dir := written(t, closed)
			before := os.DirFS(dir)
			if err := Verify(dir); err != nil {
				t.Fatal(err)
			}
			sizes := func() (list []int64) {
				err := fs.WalkDir(before, ".", func(_ string, d fs.DirEntry, err error) error {
					if info, ierr := d.Info(); err == nil && ierr == nil {
						list = append(list, info.Size())
					}
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
				return list
			}
			had := sizes()
			if err := Verify(dir); err != nil || !slices.Equal(sizes(), had) {
				t.Errorf("verified again: %v; sizes %v, before %v", err, sizes(), had)
			}
			s := openAt(t, dir, small)
			if got := len(allRecords(t, s)); got != 8 {
				t.Errorf("%d records, want 8", got)
			}
		})
	}
	if err := Verify(t.TempDir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an empty folder: %v", err)
	}
	if err := Verify(filepath.Join(t.TempDir(), "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no folder: %v", err)
	}
}

// After a loss of power, a log ends in the middle of an entry.
func TestLogWithATornEndIsNotDamaged(t *testing.T) {
	dir := written(t, false)
	path := found(t, dir, "*.mem")
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{64, 0, 20, 200, 1, 0, 's', '/', 'x'}, int64(len(content(t, path))+4)); err != nil {
		t.Fatal(err)
	}
	s := openAt(t, dir, small)
	if got := len(allRecords(t, s)); got != 8 {
		t.Errorf("%d records, want 8", got)
	}
}

// lastEntry returns the log of a killed node's store, and the start and end of its last
// entry. If large is set, the entry is longer than a page.
func lastEntry(t *testing.T, large bool) (dir, path string, begin, end int) {
	t.Helper()
	for try := range 20 {
		source := filepath.Join(t.TempDir(), "store")
		s := openAt(t, source, small)
		pad := strings.Repeat("x", 100+try)
		if large {
			pad = strings.Repeat("y", 20<<10+try)
		}
		rec := testRecord(1)
		rec.Env = map[string]string{"PAD": pad}
		if err := s.PutSandbox(t.Context(), rec); err != nil {
			t.Fatal(err)
		}
		dir = filepath.Join(t.TempDir(), "copy")
		if err := os.CopyFS(dir, os.DirFS(source)); err != nil {
			t.Fatal(err)
		}
		path = found(t, dir, "*.mem")
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		begin, end = 0, logHeader
		for {
			n, _ := logEntry(data[end:])
			if n == 0 {
				break
			}
			if end += n; n > 20<<10 && large {
				begin = end - n
				break
			}
			begin = end - n
		}
		clear(data[end:]) // the end mark of the transaction, after the large entry
		if data[end-1] != 0 {
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			return dir, path, begin, end
		}
	}
	t.Fatal("the last byte of each log is zero")
	return "", "", 0, 0
}

func TestWrongByteInTheLastEntryIsDetected(t *testing.T) {
	for name, large := range map[string]bool{"small": false, "of several pages": true} {
		t.Run(name, func(t *testing.T) {
			dir, path, begin, end := lastEntry(t, large)
			if err := Verify(dir); err != nil {
				t.Fatal(err)
			}
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			for offset := begin; offset < end; offset += max(1, (end-begin)/50) {
				var b [1]byte
				if _, err := f.ReadAt(b[:], int64(offset)); err != nil {
					t.Fatal(err)
				}
				if _, err := f.WriteAt([]byte{b[0] ^ 0x10}, int64(offset)); err != nil {
					t.Fatal(err)
				}
				var damage *DamageError
				if err := Verify(dir); !errors.As(err, &damage) || damage.Path != path || !strings.Contains(damage.Problem, "last entry") {
					t.Errorf("byte %d of %d: %v", offset-begin, end-begin, err)
				}
				if _, err := f.WriteAt(b[:], int64(offset)); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// A kill or a loss of power leaves the start of the last entry, or some of its pages.
func TestPartialLastEntryIsNotDamage(t *testing.T) {
	for name, large := range map[string]bool{"small": false, "of several pages": true} {
		t.Run(name, func(t *testing.T) {
			dir, path, begin, end := lastEntry(t, large)
			whole, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			write := func(what string, from, to int) {
				data := slices.Clone(whole)
				clear(data[from:to])
				if err := os.WriteFile(path, data, 0o600); err != nil {
					t.Fatal(err)
				}
				if err := Verify(dir); err != nil {
					t.Errorf("%s: %v", what, err)
				}
			}
			for from := begin; from < end; from += max(1, (end-begin)/50) {
				write(fmt.Sprintf("%d of %d bytes", from-begin, end-begin), from, end)
			}
			const page = 4096
			for at := begin / page * page; at < end; at += page {
				write(fmt.Sprintf("all but the page at %d", at), max(at, begin), min(at+page, end))
				// A page that was written during the copy.
				write(fmt.Sprintf("half of the page at %d", at), min(max(at+page/2, begin), end), min(at+page, end))
			}
		})
	}
}

func TestStoreMustBelongToTheNode(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	s := openAt(t, dir, small)
	id := s.NodeID()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, err := open(dir, id, nil, small); err != nil {
		t.Errorf("the node's own: %v", err)
	} else if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := open(dir, string(sandbox.NewID()), nil, small); err == nil || !strings.Contains(err.Error(), id) {
		t.Errorf("of another node: %v", err)
	}
	var damage *DamageError
	if _, err := open(filepath.Join(t.TempDir(), "none"), id, nil, small); !errors.As(err, &damage) {
		t.Errorf("a missing store: %v", err)
	}
	aside, err := Reset(dir, id)
	if err != nil {
		t.Fatal(err)
	}
	if err := Verify(aside); err != nil {
		t.Errorf("the store that was moved aside: %v", err)
	}
	s, err = open(dir, id, nil, small)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if len(allRecords(t, s)) != 0 {
		t.Error("the new one is not empty")
	}
	if _, err := Reset(dir, id); !errors.Is(err, ErrInUse) {
		t.Errorf("an open store: %v", err)
	}
}

func TestResetNamesThePreviousContentIfThereWasAny(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	if aside, err := Reset(dir, string(sandbox.NewID())); aside != "" || err != nil {
		t.Errorf("of a missing store: %q, %v", aside, err)
	}
	if aside, err := Reset(dir, string(sandbox.NewID())); err != nil || Verify(aside) != nil {
		t.Errorf("of a store: %q, %v", aside, err)
	}
}

func TestCommitsOnlyRise(t *testing.T) {
	dir := t.TempDir()
	s := openAt(t, dir, small)
	var seen []uint64
	s.Witness(func(n uint64) { seen = append(seen, n) })
	for n := range 3 {
		if err := s.PutSandbox(t.Context(), testRecord(n)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.AppendEvents(t.Context(), testEvents(1, 1, 7)); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(seen, []uint64{1, 2, 3}) {
		t.Errorf("the witness saw %v", seen)
	}
	s = openAt(t, dir, small)
	if got := s.Commits(); got != 3 {
		t.Errorf("%d commits, want 3", got)
	}
	s.AdvanceCommits(100)
	if err := s.DeleteSandbox(t.Context(), testID(1)); err != nil {
		t.Fatal(err)
	}
	if got := s.Commits(); got != 101 {
		t.Errorf("%d commits, want 101", got)
	}
}

func TestStoreWithoutItsNodeIDDoesNotOpen(t *testing.T) {
	dir := t.TempDir()
	s := openAt(t, dir, small)
	if err := s.PutSandbox(t.Context(), testRecord(1)); err != nil {
		t.Fatal(err)
	}
	if err := s.db.Update(func(txn *badger.Txn) error { return txn.Delete(nodeIDKey) }); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, err := open(dir, "", nil, small); err == nil {
		s.Close()
		t.Error("it opened")
	}
}

func TestLockOfAProcessThatHasEndedIsAwaited(t *testing.T) {
	dir := t.TempDir()
	child := exec.Command("true")
	if err := child.Run(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, lockName)
	held, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	if err := Lock(held, path); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintln(held, os.Getpid()); err != nil {
		t.Fatal(err)
	}
	if err := InUse(dir); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
		t.Errorf("of a running process: %v", err)
	}
	if err := os.WriteFile(path, fmt.Appendln(nil, child.Process.Pid), 0o600); err != nil {
		t.Fatal(err)
	}
	opened := make(chan error, 1)
	go func() {
		s, err := open(dir, "", nil, small)
		if err == nil {
			err = s.Close()
		}
		opened <- err
	}()
	select {
	case err := <-opened:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(20 * time.Millisecond): // a wait cannot be observed otherwise
	}
	held.Close()
	if err := <-opened; err != nil {
		t.Errorf("after the lock was free: %v", err)
	}
}
