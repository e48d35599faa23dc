package egress

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"strings"

	"github.com/doze-run/doze/egress/audit"
)

// echo says in header and body what it was sent.
func echo(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Echo", r.Header.Get("Authorization"))
	body, _ := io.ReadAll(r.Body)
	_, _ = io.WriteString(w, r.Header.Get("Authorization")+"\n"+r.RequestURI+"\n"+string(body))
}

// none fails the test if a value is in what is kept or logged.
func (b *box) none(value string) {
	b.t.Helper()
	flows, err := json.Marshal(b.Flows(b.sb.ID, audit.Filter{}))
	if err != nil {
		b.t.Fatal(err)
	}
	for _, v := range []string{value, base64.StdEncoding.EncodeToString([]byte(value))} {
		if strings.Contains(string(flows), v) || strings.Contains(b.log.String(), v) {
			b.t.Errorf("%q is in the audit log or the node's log", value)
		}
	}
}

// contextUntil ends with a channel, which may be nil.
func contextUntil(gone <-chan struct{}) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	if gone == nil {
		return ctx, cancel
	}
	go func() { // ends with either
		select {
		case <-gone:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}
