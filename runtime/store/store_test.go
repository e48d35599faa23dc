package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/runtime/sandbox/storetest"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDirEnv); dir != "" {
		os.Exit(writeUntilKilled(dir))
	}
	if os.Getenv(smallDiskEnv) != "" {
		os.Exit(m.Run()) // a store that cannot close on a full disk leaks by contract
	}
	goleak.VerifyTestMain(m)
}

// smallDiskEnv makes the test binary run one test on a disk of its own.
const smallDiskEnv = "DOZE_STORE_TEST_SMALL_DISK"

// small makes Badger change its files every few hundred writes.
var small = tuning{memTable: 1 << 20, headroom: 16 << 20}

func openAt(t *testing.T, dir string, tune tuning) *Badger {
	t.Helper()
	s, err := open(dir, "", nil, tune)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestMemoryConforms(t *testing.T) {
	storetest.Run(t, func(*testing.T) sandbox.Store { return NewMemory() })
}

func TestBadgerConforms(t *testing.T) {
	storetest.Run(t, func(t *testing.T) sandbox.Store { return openAt(t, t.TempDir(), defaultTuning) })
}

func TestBadgerConformsWhileItsFilesChange(t *testing.T) {
	storetest.Run(t, func(t *testing.T) sandbox.Store { return openAt(t, t.TempDir(), small) })
}

func TestEverythingIsThereAfterAnotherOpen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	s := openAt(t, dir, defaultTuning)
	node := s.NodeID()
	if err := s.PutSandbox(t.Context(), storetest.Record(1)); err != nil {
		t.Fatal(err)
	}
	if err := s.AppendEvents(t.Context(), storetest.Events(1, 1, 7)); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = openAt(t, dir, defaultTuning)
	if got := s.NodeID(); got != node {
		t.Errorf("got node id %s, want %s as before", got, node)
	}
	if got := storetest.All(t, s)[storetest.ID(1)]; !reflect.DeepEqual(got, storetest.Record(1)) {
		t.Errorf("got %+v", got)
	}
	if seq, err := s.LastSeq(t.Context(), storetest.ID(1)); err != nil || seq != 7 {
		t.Errorf("got last seq %d, %v; want 7", seq, err)
	}
	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the folder's mode is %v, %v; want 0700", info.Mode(), err)
	}
}

func TestEventsStayBoundedAfterAnotherOpen(t *testing.T) {
	dir := t.TempDir()
	for from := uint64(1); from < 3000; from += 600 {
		s := openAt(t, dir, small)
		if err := s.AppendEvents(t.Context(), storetest.Events(1, from, from+599)); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	got, err := openAt(t, dir, small).Events(t.Context(), storetest.ID(1), 0, 5000)
	if err != nil || len(got) != sandbox.MaxEvents || got[0].Seq != 2001 {
		t.Fatalf("got %d events, %v; want the newest %d", len(got), err, sandbox.MaxEvents)
	}
}

func TestSecondOpenSaysWhoUsesTheFolder(t *testing.T) {
	dir := t.TempDir()
	first := openAt(t, dir, defaultTuning)
	_, err := Open(dir, nil)
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), fmt.Sprintf("(pid %d)", os.Getpid())) {
		t.Fatalf("got %v, want ErrInUse with the pid", err)
	}
	if err := first.PutSandbox(t.Context(), storetest.Record(1)); err != nil {
		t.Fatalf("the first one was disturbed: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	openAt(t, dir, defaultTuning)
}

func TestOpenSaysWhatIsWrongWithTheFolder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(file, nil); err == nil || !strings.Contains(err.Error(), file) {
		t.Fatalf("got %v, want an error that names %s", err, file)
	}
}

func TestOpenNeedsHeadroom(t *testing.T) {
	dir := t.TempDir()
	if _, err := open(dir, "", nil, tuning{memTable: 8 << 20, headroom: 1 << 62}); !errors.Is(err, sandbox.ErrStoreFull) {
		t.Fatalf("got %v, want ErrStoreFull", err)
	}
	openAt(t, dir, defaultTuning) // nothing was left locked
}

func TestLogsWithoutAByteAreNoObstacle(t *testing.T) {
	dir := t.TempDir()
	s := openAt(t, dir, defaultTuning)
	if err := s.PutSandbox(t.Context(), storetest.Record(1)); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"00009.mem", "000009.vlog"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := storetest.All(t, openAt(t, dir, defaultTuning)); len(got) != 1 {
		t.Fatalf("got %d records, want 1", len(got))
	}
}

func TestNewerEncodingIsRefused(t *testing.T) {
	_, err := decodeSandbox("a", []byte{2, '{', '}'})
	if err == nil || !strings.Contains(err.Error(), "newer doze") {
		t.Fatalf("got %v, want an error that says that the build is too old", err)
	}
}

func FuzzDecodeSandbox(f *testing.F) {
	good, err := encode("sandbox", storetest.Record(1), maxRecord)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte{})
	f.Add([]byte{encodingJSON})
	f.Add([]byte{encodingJSON, '{', '}'})
	f.Add([]byte("\x01{\"id\":\"sb0000000001\",\"sleep_after\":\"1h\"}"))
	f.Fuzz(func(t *testing.T, value []byte) {
		sb, err := decodeSandbox(storetest.ID(1), value)
		if err != nil {
			return
		}
		again, err := encode("sandbox", sb, 2*len(value)+maxRecord)
		if err != nil {
			t.Fatalf("what was decoded cannot be encoded: %v", err)
		}
		if back, err := decodeSandbox(storetest.ID(1), again); err != nil || !reflect.DeepEqual(sb, back) {
			t.Fatalf("%+v became %+v, %v", sb, back, err)
		}
	})
}
