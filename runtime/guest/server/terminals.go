package server

import (
	"cmp"
	"net/http"
	"strconv"

	"github.com/doze-run/doze/runtime/guest"
)

const (
	maxTerminals      = 128
	maxEndedTerminals = 16
	// maxEndedOutput bounds the memory of their output, so that an idle guest stays below 8 MB.
	maxEndedOutput = 1 << 20
)

func newTerminals(s *Server) *registry[*terminal, guest.Terminal] {
	return &registry[*terminal, guest.Terminal]{
		noun: "terminal", missing: guest.CodeNoTerminal, maxRunning: maxTerminals, maxEnded: maxEndedTerminals, maxEndedOut: maxEndedOutput,
		publishEvent: func(view guest.Terminal) { s.events.send(guest.Event{Type: guest.EventTerminal, Terminal: &view}) },
		known:        map[string]*registration[*terminal]{},
	}
}

func (s *Server) openTerminal(r *http.Request) (any, error) {
	var spec guest.TerminalSpec
	if err := readJSON(r, &spec); err != nil {
		return nil, err
	}
	if err := checkName("id", spec.ID); err != nil {
		return nil, err
	}
	spec.ID = cmp.Or(spec.ID, guest.NewTerminalID())
	var in *surroundings
	if spec.Session != "" {
		err := s.terminals.available(spec.ID)
		if err == nil {
			in, err = s.surroundingsOf(r.Context(), spec.Session)
		}
		if err != nil {
			return nil, err
		}
	}
	return s.terminals.open(spec.ID, func() (*terminal, error) { return s.startTerminal(in, spec) })
}

// attachTerminal connects a viewer.
func (s *Server) attachTerminal(w http.ResponseWriter, r *http.Request) error {
	t, err := s.terminals.find(r.PathValue("id"))
	if err != nil {
		return err
	}
	since := int64(-1)
	if text := r.URL.Query().Get("since"); text != "" {
		if since, err = strconv.ParseInt(text, 10, 64); err != nil || since < 0 {
			return refuse(guest.CodeInvalid, "since %.40q is unusable; it is the cursor of an earlier connection", text)
		}
	}
	if r.Header.Get("Upgrade") != guest.UpgradeTerminal {
		return refuse(guest.CodeInvalid, "a terminal needs the upgrade to %s", guest.UpgradeTerminal)
	}
	v, err := t.join(since)
	if err != nil {
		return err
	}
	defer v.remove()
	tunnel, err := s.openTunnel(w, guest.UpgradeTerminal, viewerBuffer)
	if err != nil {
		return err
	}
	defer tunnel.close()
	v.serve(tunnel)
	return nil
}
