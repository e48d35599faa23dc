package server

import (
	"cmp"
	"net/http"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	maxSessions      = 128
	maxEndedSessions = 16
	// maxWaitingCommands bounds the commands that wait for one session.
	maxWaitingCommands = 32
)

func newSessions(s *Server) *registry[*session, guest.Session] {
	return &registry[*session, guest.Session]{
		noun: "session", missing: guest.CodeNoSession, maxRunning: maxSessions, maxEnded: maxEndedSessions,
		publishEvent: func(view guest.Session) { s.events.send(guest.Event{Type: guest.EventSession, Session: &view}) },
		known:        map[string]*registration[*session]{},
	}
}

func (s *Server) openSession(r *http.Request) (any, error) {
	var spec guest.SessionSpec
	if err := readJSON(r, &spec); err != nil {
		return nil, err
	}
	if err := checkName("id", spec.ID); err != nil {
		return nil, err
	}
	spec.ID = cmp.Or(spec.ID, guest.NewSessionID())
	return s.sessions.open(spec.ID, func() (*session, error) { return s.startSession(spec) })
}

func (s *Server) interruptSession(r *http.Request) (any, error) {
	ss, err := s.sessions.find(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	view := ss.shown(false)
	if view.State != guest.ProcessRunning {
		return nil, ss.goneError()
	}
	ss.interrupt()
	return view, nil
}
