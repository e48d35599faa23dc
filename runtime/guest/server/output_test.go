package server

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"syscall"
	"testing"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// The client takes the first part of it only after the time for draining is
// over, and another process holds the pipe open.
func TestWhatWasWrittenBeforeTheEndIsReadHoweverLate(t *testing.T) {
	file, fd, err := newPipe(readEnd)
	if err != nil {
		t.Fatal(err)
	}
	pipe := &outputPipe{file: file, drain: drainMax}
	defer file.Close()
	defer syscall.Close(fd)
	want := bytes.Repeat([]byte("0123456789abcdef"), 4<<10) // as much as a pipe holds
	if n, err := syscall.Write(fd, want); n != len(want) {
		t.Fatal(n, err)
	}
	var got []byte
	open, err := pipe.copy(make([]byte, execBuffer), func(data []byte) error {
		if got == nil {
			pipe.commandEnded()
			over := time.Now().Add(-time.Second)
			pipe.last.Store(over.UnixNano())
		}
		got = append(got, data...)
		return nil
	})
	if !open || err != nil || !bytes.Equal(got, want) {
		t.Errorf("read %d of %d bytes, open %v, %v", len(got), len(want), open, err)
	}
}

func TestCommandThatEndedInTimeIsNotTimedOut(t *testing.T) {
	srv, err := New(Config{RunDir: t.TempDir(), LogDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Close()
	for range 20 { // the end and the time-out are both there, in no order
		cmd, err := srv.command(guest.Command{Command: "exit 1"})
		if err != nil {
			t.Fatal(err)
		}
		in, err := stdin(nil)
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		run, err := srv.start(cmd, in)
		if err != nil {
			t.Fatal(err)
		}
		<-run.tree.root.done
		x := &execution{program: run.tree, outputs: run.outputs, server: srv, timeout: time.Minute, began: time.Now().Add(-time.Hour)}
		w := httptest.NewRecorder()
		if err := x.serve(t.Context(), &frameWriter{w: w, flush: http.NewResponseController(w).Flush}); err != nil {
			t.Fatal(err)
		}
		var res guest.ExecResult
		kind, data, err := guest.ReadFrame(w.Body, nil)
		if err != nil || kind != guest.FrameComplete || json.Unmarshal(data, &res) != nil || res.TimedOut || res.ExitCode != 1 {
			t.Fatalf("frame %d, result %+v, %v", kind, res, err)
		}
	}
}

// A deadline that passed while the sandbox slept would close a connection that
// the node has kept, at the moment when it wakes.
func TestNoDeadlineEndsASilentConnectionOfTheNode(t *testing.T) {
	srv, err := New(Config{RunDir: t.TempDir(), LogDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Close()
	if h := srv.http; h.ReadHeaderTimeout != 0 || h.ReadTimeout != 0 || h.IdleTimeout != 0 || h.WriteTimeout != 0 {
		t.Errorf("there is one: %s, %s, %s, %s", h.ReadHeaderTimeout, h.ReadTimeout, h.IdleTimeout, h.WriteTimeout)
	}
}
