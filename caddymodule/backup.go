package caddymodule

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/doze-run/doze/node/backup"
)

// handleBackup sends a backup. It holds the store open and not the node, so that the node
// can end meanwhile, which ends the backup.
func handleBackup(w http.ResponseWriter, r *http.Request) error {
	if r.Method != http.MethodGet {
		return caddy.APIError{HTTPStatus: http.StatusMethodNotAllowed, Err: errors.New("method not allowed; use GET")}
	}
	withoutKey := false
	if text := r.URL.Query().Get("without_key"); text != "" {
		var err error
		if withoutKey, err = strconv.ParseBool(text); err != nil {
			return badRequest(errors.New("without_key is true or false"))
		}
	}
	held := runningNode()
	if held == nil {
		return caddy.APIError{HTTPStatus: http.StatusServiceUnavailable, Err: errNotOpen}
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(held.Requests(), cancel)()
	out := newPatientWriter(ctx, w)
	defer out.stop()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Cache-Control", "no-store")
	err := backup.Write(ctx, out, backup.Source{
		Home: held.store.home, Store: held.store.Badger, HoldPolicies: held.Egress.HoldPolicies, Version: version(), WithoutKey: withoutKey,
	})
	if err == nil {
		_ = out.control.SetWriteDeadline(time.Time{}) // for the next request of the connection
		return nil
	}
	if !out.begun {
		return caddy.APIError{HTTPStatus: http.StatusInternalServerError, Err: err}
	}
	caddy.Log().Error("failed to send a backup of the node", zap.Error(err))
	panic(http.ErrAbortHandler) // the client must not take the response for complete
}

// runningNode returns the open node of this process, or nil. It waits for a node that is being
// opened.
func runningNode() (open *heldNode) {
	nodes.Range(func(_, held any) bool {
		if held, ok := held.(*heldNode); ok && held.store != nil {
			open = held
		}
		return open == nil
	})
	return open
}

// stallTimeout is the time after which a client that reads nothing has stalled.
const stallTimeout = time.Minute

// patientWriter writes a response of any length. Each write may take stallTimeout, and ends
// with ctx.
type patientWriter struct {
	http.ResponseWriter
	ctx     context.Context
	control *http.ResponseController
	begun   bool
	stop    func() bool
}

func newPatientWriter(ctx context.Context, w http.ResponseWriter) *patientWriter {
	p := &patientWriter{ResponseWriter: w, ctx: ctx, control: http.NewResponseController(w)}
	// The server's time limit for a request would end the response, too.
	_ = p.control.SetReadDeadline(time.Time{})
	p.stop = context.AfterFunc(ctx, func() { _ = p.control.SetWriteDeadline(time.Unix(1, 0)) })
	return p
}

// Write implements io.Writer.
func (p *patientWriter) Write(b []byte) (int, error) {
	_ = p.control.SetWriteDeadline(time.Now().Add(stallTimeout)) // not supported in tests
	if err := context.Cause(p.ctx); err != nil {
		return 0, err
	}
	p.begun = true
	return p.ResponseWriter.Write(b)
}
