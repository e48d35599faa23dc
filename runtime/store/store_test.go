package store

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4/table"

	"github.com/doze-run/doze/runtime/sandbox"
	"github.com/doze-run/doze/testkit"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDirEnv); dir != "" {
		os.Exit(writeUntilKilled(dir))
	}
	if os.Getenv(smallDiskEnv) != "" || os.Getenv(brokenDiskEnv) != "" {
		os.Exit(m.Run()) // a store that cannot close on such a disk leaks goroutines, as documented
	}
	testkit.Main(m)
}

// brokenDiskEnv makes the test binary run one test, which leaves Badger running, in the
// folder that the variable names.
const brokenDiskEnv = "DOZE_STORE_TEST_BROKEN_DISK"

// smallDiskEnv makes the test binary run one test on its own disk.
const smallDiskEnv = "DOZE_STORE_TEST_SMALL_DISK"

// small makes Badger change its files every few hundred writes.
var small = tuning{memTable: 1 << 20, headroom: 16 << 20, stuckAfter: time.Minute}

func openAt(t *testing.T, dir string, tune tuning) *Badger {
	t.Helper()
	s, err := open(dir, "", nil, tune)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestStoredDataSurvivesReopening(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	s := openAt(t, dir, defaultTuning)
	node := s.NodeID()
	if err := s.PutSandbox(t.Context(), testRecord(1)); err != nil {
		t.Fatal(err)
	}
	if err := s.AppendEvents(t.Context(), testEvents(1, 1, 7)); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	s = openAt(t, dir, defaultTuning)
	if got := s.NodeID(); got != node {
		t.Errorf("got node id %s, want %s as before", got, node)
	}
	testkit.Diff(t, "the record", allRecords(t, s)[testID(1)], testRecord(1))
	if seq, err := s.LastSeq(t.Context(), testID(1)); err != nil || seq != 7 {
		t.Errorf("got last seq %d, %v; want 7", seq, err)
	}
	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the folder's mode is %v, %v; want 0700", info.Mode(), err)
	}
}

func TestEventsStayBoundedAcrossOpens(t *testing.T) {
	dir := t.TempDir()
	for from := uint64(1); from < 3000; from += 600 {
		s := openAt(t, dir, small)
		if err := s.AppendEvents(t.Context(), testEvents(1, from, from+599)); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	got, err := openAt(t, dir, small).Events(t.Context(), testID(1), 0, 5000)
	if err != nil || len(got) != sandbox.MaxEvents || got[0].Seq != 2001 {
		t.Fatalf("got %d events, %v; want the newest %d", len(got), err, sandbox.MaxEvents)
	}
}

// A failed write removes no events, although it was about to.
func TestEventsStayBoundedAfterAFailedWrite(t *testing.T) {
	s := openAt(t, t.TempDir(), small)
	if err := s.AppendEvents(t.Context(), testEvents(1, 1, sandbox.MaxEvents)); err != nil {
		t.Fatal(err)
	}
	wantLast(t, s, 1, sandbox.MaxEvents)
	line := timeline{oldest: map[sandbox.ID]uint64{}}
	write := func(extra ...encodedEvent) {
		event := testEvent(1, sandbox.MaxEvents+1)
		value, err := encodeEvent(event, maxEvent)
		must(t, err)
		events := []encodedEvent{{id: event.Sandbox, seq: event.Seq, key: eventKey(event.Sandbox, event.Seq), value: value, expires: time.Now().Add(time.Hour)}}
		s.commit(&line, []*write{{events: append(events, extra...)}})
	}
	write(encodedEvent{id: testID(2), seq: 1, key: make([]byte, 1<<17)}) // longer than Badger's keys
	write()
	got, err := s.Events(t.Context(), testID(1), 0, 5000)
	if err != nil || len(got) != sandbox.MaxEvents || got[0].Seq != 2 {
		t.Errorf("got %d events, %v; want the newest %d", len(got), err, sandbox.MaxEvents)
	}
}

func TestSecondOpenReportsTheProcessThatUsesTheFolder(t *testing.T) {
	dir := t.TempDir()
	first := openAt(t, dir, defaultTuning)
	_, err := Open(dir, nil)
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), fmt.Sprintf("(pid %d)", os.Getpid())) {
		t.Fatalf("got %v, want ErrInUse with the pid", err)
	}
	if err := first.PutSandbox(t.Context(), testRecord(1)); err != nil {
		t.Fatalf("the first one was disturbed: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	openAt(t, dir, defaultTuning)
}

func TestOpenNamesAnUnusableFolder(t *testing.T) {
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
	if _, err := open(dir, "", nil, tuning{memTable: 8 << 20, headroom: 1 << 62, stuckAfter: time.Minute}); !errors.Is(err, sandbox.ErrStoreFull) {
		t.Fatalf("got %v, want ErrStoreFull", err)
	}
	openAt(t, dir, defaultTuning) // nothing was left locked
}

func TestEmptyLogsDoNotPreventOpening(t *testing.T) {
	dir := t.TempDir()
	s := openAt(t, dir, defaultTuning)
	if err := s.PutSandbox(t.Context(), testRecord(1)); err != nil {
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
	if got := allRecords(t, openAt(t, dir, defaultTuning)); len(got) != 1 {
		t.Fatalf("got %d records, want 1", len(got))
	}
}

func TestNewerEncodingIsRefused(t *testing.T) {
	_, err := decodeSandbox("a", []byte{2, '{', '}'})
	if err == nil || !strings.Contains(err.Error(), "newer doze") {
		t.Fatalf("got %v, want an error that reports a build that is too old", err)
	}
}

func FuzzDecodeSandbox(f *testing.F) {
	good, err := encode("sandbox", testRecord(1), maxRecord)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte{})
	f.Add([]byte{encodingJSON})
	f.Add([]byte{encodingJSON, '{', '}'})
	f.Add([]byte("\x01{\"id\":\"sb0000000001\",\"sleep_after\":\"1h\"}"))
	f.Fuzz(func(t *testing.T, value []byte) {
		sb, err := decodeSandbox(testID(1), value)
		if err != nil {
			return
		}
		again, err := encode("sandbox", sb, 2*len(value)+maxRecord)
		if err != nil {
			t.Fatalf("the decoded record cannot be encoded: %v", err)
		}
		back, err := decodeSandbox(testID(1), again)
		must(t, err)
		testkit.Diff(t, "the record decoded again", back, sb)
	})
}

// runOnBrokenDisk runs the test in another process. The folder is removed after that has
// ended, because Badger continues to write there.
func runOnBrokenDisk(t *testing.T) {
	t.Helper()
	child := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	child.Env = append(os.Environ(), brokenDiskEnv+"="+t.TempDir())
	if out, err := child.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// onBrokenDisk returns a store whose disk accepts no tables, in a process for this test. It
// returns nil in the process that ran that one.
func onBrokenDisk(t *testing.T) *Badger {
	t.Helper()
	dir := os.Getenv(brokenDiskEnv)
	if dir == "" {
		runOnBrokenDisk(t)
		return nil
	}
	tune := small
	tune.stuckAfter = 500 * time.Millisecond
	s, err := open(dir, "", nil, tune)
	if err != nil {
		t.Fatal(err)
	}
	for n := range 64 { // in place of the tables
		if err := os.Mkdir(filepath.Join(dir, table.IDToFilename(uint64(n))), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// On a disk that returns errors, Badger retries indefinitely.
func TestDiskWithoutTablesBlocksNeitherWritersNorClose(t *testing.T) {
	s := onBrokenDisk(t)
	if s == nil {
		return
	}
	rec := testRecord(1)
	rec.Env = map[string]string{"PAD": strings.Repeat("x", 60<<10)}
	acknowledged := 0
	var err error
	for err == nil {
		if err = s.PutSandbox(t.Context(), rec); err == nil {
			acknowledged++
		}
	}
	if !errors.Is(err, ErrStuck) || acknowledged == 0 {
		t.Errorf("after %d writes: %v", acknowledged, err)
	}
	if err := s.DeleteSandbox(t.Context(), rec.ID); !errors.Is(err, ErrStuck) {
		t.Errorf("the next write: %v", err)
	}
	if err := s.Close(); !errors.Is(err, ErrStuck) {
		t.Errorf("close: %v", err)
	}
}

func TestCloseReturnsOnADiskWithoutTables(t *testing.T) {
	s := onBrokenDisk(t)
	if s == nil {
		return
	}
	if err := s.PutSandbox(t.Context(), testRecord(1)); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); !errors.Is(err, ErrStuck) {
		t.Errorf("close: %v", err)
	}
}
