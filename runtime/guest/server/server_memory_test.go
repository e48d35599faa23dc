//go:build !race

package server_test

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
	"github.com/doze-run/doze/testkit"
)

func TestMemoryOfAGigabyteOfOutput(t *testing.T) {
	c := start(t, nil)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	s, err := c.Exec(t.Context(), guest.ExecRequest{Command: guest.Command{Argv: []string{"head", "-c", "1073741824", "/dev/zero"}}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	total := 0
	for {
		ev, err := s.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		total += len(ev.Data)
	}
	runtime.ReadMemStats(&after)
	if total != 1<<30 {
		t.Errorf("got %d bytes", total)
	}
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 64<<20 {
		t.Errorf("allocated %d bytes", grown)
	}
}

func TestMemoryOfAProcessThatPrintsAGigabyte(t *testing.T) {
	c := start(t, nil)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: "head -c 1073741824 /dev/zero; echo end"}})
	follow, err := c.Logs(t.Context(), p.ID, true)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil { // as long as it takes
		_, err = follow.Next()
	}
	if follow.Close(); err != io.EOF {
		t.Fatal(err)
	}
	out, _, end := readLog(t, c, p.ID, true)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if !strings.HasSuffix(out, "end\n") || len(out) > 256<<10 || len(out) < 200<<10 || end == nil {
		t.Errorf("log has %d bytes, %+v", len(out), end)
	}
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 4<<20 {
		t.Errorf("%d bytes stay in memory", grown)
	}
	var disk int64
	files, _ := filepath.Glob(p.LogFile + "*")
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			t.Fatal(err)
		}
		disk += info.Size()
	}
	if len(files) != 2 || disk > 16<<20 || disk < 8<<20 {
		t.Errorf("%d bytes on disk in %q", disk, files)
	}
}

func TestMemoryOfALargeFile(t *testing.T) {
	const size = 100 << 20
	c := start(t, nil)
	path := filepath.Join(t.TempDir(), "large")
	zeros := func() io.Reader { return io.LimitReader(zeroes{}, size) }
	h := sha256.New()
	if _, err := io.Copy(h, zeros()); err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for _, o := range []guest.WriteOptions{
		{}, // then of the existing file
		{SHA256: h.Sum(nil)},
		{IfMatch: fmt.Sprintf(`"sha256-%x"`, h.Sum(nil))},
		{Range: &guest.WriteRange{Offset: 1, Length: size, Size: -1}},
		{Range: &guest.WriteRange{Length: size, Size: size}, SHA256: h.Sum(nil)},
	} {
		if info, err := c.Write(t.Context(), path, o, zeros()); err != nil || info.Size < size {
			t.Fatalf("%+v: %+v, %v", o, info, err)
		}
	}
	if info, err := c.Stat(t.Context(), path, guest.StatOptions{Digest: true}); err != nil || info.SHA256 != hex.EncodeToString(h.Sum(nil)) {
		t.Errorf("%+v, %v", info, err)
	}
	f, err := c.ReadFile(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Body.Close()
	n, err := io.Copy(io.Discard, f.Body)
	if err != nil || n != size || f.Size != size || f.Status != 200 {
		t.Fatalf("read %d bytes of %+v, %v", n, f, err)
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 8<<20 {
		t.Errorf("allocated %d bytes", grown)
	}
}

// Programs that have ended leave little, also of output that clients may still read.
func TestMemoryOfWhatHasEnded(t *testing.T) {
	c := start(t, nil)
	dir := searchTree(t)
	last := ""
	use := func() {
		term := openTerminal(t, c, "head", "-c", "1048576", "/dev/zero")
		last = term.ID
		screen, err := c.AttachTerminal(t.Context(), last, -1)
		for err == nil {
			_, err = screen.Next()
		}
		if screen.Close(); err != io.EOF {
			t.Fatal(err)
		}
		session, err := c.OpenSession(t.Context(), guest.SessionSpec{Cwd: dir})
		if err != nil {
			t.Fatal(err)
		}
		run(t, c, guest.ExecRequest{Session: session.ID, Command: guest.Command{Command: "head -c 1048576 /dev/zero; exit"}})
		if _, err := c.Search(t.Context(), dir, guest.SearchOptions{Content: "(a|b){100}", Limit: 10}); err != nil {
			t.Fatal(err)
		}
	}
	memory := func() int64 {
		var stats runtime.MemStats
		runtime.GC()
		runtime.GC() // empties each sync.Pool, too
		runtime.ReadMemStats(&stats)
		return int64(stats.HeapAlloc)
	}
	use()
	before := memory()
	for range 20 {
		use()
	}
	if grown := memory() - before; grown > 3<<19 {
		t.Errorf("%d bytes stay in memory", grown)
	}
	attach(t, c, last, -1).end() // the output of the last one is left
}

// As many as the guest remembers, all with as much output as it stores of one that runs.
func TestMemoryOfTheLogsOfEndedProcesses(t *testing.T) {
	c := start(t, nil)
	memory := func() int64 {
		var stats runtime.MemStats
		runtime.GC()
		runtime.GC() // empties each sync.Pool, too
		runtime.ReadMemStats(&stats)
		return int64(stats.HeapAlloc)
	}
	const size = 300_000
	print := func() guest.Process {
		p := startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Command: fmt.Sprintf("head -c %d /dev/zero | tr '\\0' x; echo; echo end", size)}})
		waitFor(t, c, p.ID, guest.Wait{Exit: true, Timeout: long})
		return p
	}
	print()
	before := memory()
	list := make([]guest.Process, 64)
	for i := range list {
		list[i] = print()
	}
	if grown := memory() - before; grown > 3<<20 {
		t.Errorf("%d bytes stay in memory", grown)
	}
	for i, least := range map[int]int{0: 4 << 10, 32: 4 << 10, 63: 240 << 10} {
		if out, _, _ := readLog(t, c, list[i].ID, true); len(out) < least || !strings.HasSuffix(out, "x\nend\n") {
			t.Errorf("of process %d %d bytes are left, which end with %.20q", i, len(out), out[max(0, len(out)-20):])
		}
	}
	// The output of background processes of ended ones counts, too.
	for i := range list[:16] {
		dir := t.TempDir()
		list[i] = startProcess(t, c, guest.ProcessSpec{Command: guest.Command{Cwd: dir, Command: fmt.Sprintf(
			"mkfifo go; (read x <go; head -c %d /dev/zero | tr '\\0' x; echo; echo end) &", size)}})
		waitFor(t, c, list[i].ID, guest.Wait{Exit: true, Timeout: long})
		readLog(t, c, list[i].ID, true) // it is not restarted
		if err := os.WriteFile(filepath.Join(dir, "go"), []byte("\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "the background process has written", func() bool {
			out, _, _ := readLog(t, c, list[i].ID, false)
			return strings.HasSuffix(out, "\nend\n")
		})
	}
	if grown := memory() - before; grown > 3<<20 {
		t.Errorf("%d bytes stay in memory", grown)
	}
}
