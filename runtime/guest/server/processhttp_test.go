package server

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/doze-run/doze/runtime/guest"
)

// busyReader reads a response of logs, during which the process writes.
type busyReader struct {
	*httptest.ResponseRecorder
	during func()
	parts  int
}

func (r *busyReader) Flush() { r.during() }

func (r *busyReader) Write(b []byte) (int, error) {
	r.during()
	if r.parts++; r.parts > 100 {
		return 0, errors.New("there is no end of it")
	}
	return r.ResponseRecorder.Write(b)
}

func TestLogsEndHoweverFastTheProcessWrites(t *testing.T) {
	for _, tt := range []struct {
		name  string
		query string
		ended bool // the process, but for what it left in the background
		want  []guest.FrameType
	}{
		{"of a running process", "", false, nil},
		{"of an ended process", "", true, []guest.FrameType{guest.FrameExit}},
		{"of an ended process, followed", "?follow=true", true, []guest.FrameType{guest.FrameExit}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			first := bytes.Repeat([]byte("first"), ringRecord)
			s, p := newLogged(t)
			p.log.add(guest.FrameStdout, first)
			if tt.ended {
				p.log.markEnded()
			}
			w := &busyReader{ResponseRecorder: httptest.NewRecorder(), during: func() { p.log.add(guest.FrameStdout, make([]byte, 4*ringRecord)) }}
			getLogs(t, s, w, tt.query)
			output, other := readFrames(t, w.Body)
			if !bytes.HasPrefix(output, first) || !slices.Equal(other, tt.want) {
				t.Errorf("got %d bytes in %d parts, and frames of the types %v", len(output), w.parts, other)
			}
		})
	}
}

// A process that goes on while its log is read has not ended for that reader,
// who has not got all of it.
func TestLogsEndOnlyAtTheEndOfTheOutput(t *testing.T) {
	s, p := newLogged(t)
	p.log.add(guest.FrameStdout, []byte("read"))
	w := &busyReader{ResponseRecorder: httptest.NewRecorder()}
	w.during = func() { p.log.add(guest.FrameStdout, []byte("not read")); p.log.markEnded() }
	getLogs(t, s, w, "")
	if output, other := readFrames(t, w.Body); string(output) != "read" || len(other) != 0 {
		t.Errorf("got %q and frames of the types %v", output, other)
	}
}

func TestWhatIsWrittenAfterTheHeaderIsReadOrSkipped(t *testing.T) {
	s, p := newLogged(t)
	w := &busyReader{ResponseRecorder: httptest.NewRecorder()}
	w.during = func() {
		w.during = func() {}
		p.log.add(guest.FrameStdout, make([]byte, 2*ringSize))
		p.log.markEnded()
	}
	getLogs(t, s, w, "?follow=true")
	if _, other := readFrames(t, w.Body); !slices.Equal(other, []guest.FrameType{guest.FrameSkipped, guest.FrameExit}) {
		t.Errorf("got frames of the types %v", other)
	}
}

// newLogged is a server with one process, which has a log and nothing else.
func newLogged(t *testing.T) (*Server, *process) {
	s := &Server{cfg: Config{LogDir: t.TempDir()}}
	s.procs = newProcesses(s)
	p := &process{log: &processLog{}, run: &processRun{}, view: guest.Process{ID: "p-aaaaaaaa"}}
	s.procs.history = append(s.procs.history, p)
	return s, p
}

func getLogs(t *testing.T, s *Server, w http.ResponseWriter, query string) {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), "GET", guest.RouteProcess+"/p-aaaaaaaa"+guest.SuffixLogs+query, nil)
	r.SetPathValue("id", "p-aaaaaaaa")
	if err := s.logs(w, r); err != nil {
		t.Fatal(err)
	}
}

// readFrames reads frames to their end: the output, and the types of the others.
func readFrames(t *testing.T, r io.Reader) (output []byte, other []guest.FrameType) {
	t.Helper()
	for {
		kind, payload, err := guest.ReadFrame(r, nil)
		if err == io.EOF {
			return output, other
		}
		if err != nil {
			t.Fatal(err)
		}
		if kind == guest.FrameStdout {
			output = append(output, payload...)
		} else {
			other = append(other, kind)
		}
	}
}
