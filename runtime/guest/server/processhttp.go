package server

import (
	"net/http"
	"time"

	"github.com/doze-run/doze/runtime/guest"
)

// maxGrace bounds the grace of StopProcess.
const maxGrace = 10 * time.Minute

func (s *Server) startProcess(r *http.Request) (any, error) {
	var spec guest.ProcessSpec
	if err := readJSON(r, &spec); err != nil {
		return nil, err
	}
	return s.procs.start(spec)
}

func (s *Server) listProcesses(*http.Request) (any, error) { return s.procs.list(), nil }

func (s *Server) stopProcess(r *http.Request) (any, error) {
	p, err := s.procs.find(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	grace, err := durationOf(r, "grace", maxGrace)
	if err != nil {
		return nil, err
	}
	return s.procs.stop(p, grace), nil
}

func (s *Server) signalProcess(r *http.Request) (any, error) {
	p, err := s.procs.find(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	sig, err := parseSignal(r.URL.Query().Get("signal"))
	if err != nil {
		return nil, err
	}
	return s.procs.signal(p, sig)
}

// logs sends the output in memory and follows from there: both are reads from one position
// on, so nothing is lost between them. It ends at the position that the log had when it
// began, or with follow when the process had ended, however fast more is written.
func (s *Server) logs(w http.ResponseWriter, r *http.Request) error {
	p, err := s.procs.find(r.PathValue("id"))
	if err != nil {
		return err
	}
	follow := r.URL.Query().Get("follow") == "true"
	out := &frameWriter{w: w, flush: http.NewResponseController(w).Flush}
	w.Header().Set("Content-Type", "application/octet-stream")
	// Before the header: all output after it is sent or counted as skipped.
	at, tail := p.log.span()
	if follow {
		out.flush() // the header; there may be no output for long
	}
	for buf := make([]byte, 0, 4*ringRecord); ; {
		part := p.log.read(at, buf)
		at = part.next
		if part.skipped > 0 {
			out.json(guest.FrameSkipped, guest.Skipped{Bytes: part.skipped}, false)
		}
		if len(part.frames) > 0 && out.write(part.frames, follow) != nil {
			return nil // the client is gone
		}
		switch {
		case at.at < tail:
			continue
		case part.ended:
			out.json(guest.FrameExit, s.procs.viewOf(p), false)
			return nil
		case !follow:
			return nil
		case len(part.frames) > 0:
			continue
		}
		select {
		case <-part.changed:
		case <-r.Context().Done():
			return nil
		}
	}
}

// durationOf reads a duration from a request's query.
func durationOf(r *http.Request, name string, limit time.Duration) (time.Duration, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 || d > limit {
		return 0, refuse(guest.CodeInvalid, "%s %.40q is unusable; it is a duration from \"0s\" to %q", name, text, limit)
	}
	return d, nil
}
