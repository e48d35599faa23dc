package egress

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"strings"

	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/testkit"
)

// echo responds with the request's Authorization, URI and body.
func echo(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Echo", r.Header.Get("Authorization"))
	body, _ := io.ReadAll(r.Body)
	_, _ = io.WriteString(w, r.Header.Get("Authorization")+"\n"+r.RequestURI+"\n"+string(body))
}

// none fails the test if a value, plain or in base64, is in the audit log or the node's log.
func (b *box) none(value string) {
	b.t.Helper()
	flows, err := json.Marshal(b.Flows.Entries(string(b.sb.ID), audit.Filter{}))
	if err != nil {
		b.t.Fatal(err)
	}
	for _, v := range []string{value, base64.StdEncoding.EncodeToString([]byte(value))} {
		if strings.Contains(string(flows), v) || strings.Contains(b.log.String(), v) {
			b.t.Errorf("%q is in the audit log or the node's log", value)
		}
	}
}

// contextUntil returns a context that ends when gone is closed. gone may be nil.
func contextUntil(gone <-chan struct{}) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	if gone == nil {
		return ctx, cancel
	}
	go func() { // ends with gone or ctx
		select {
		case <-gone:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}
