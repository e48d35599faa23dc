package problem

import (
	"cmp"
	"encoding/json"
	"maps"
	"net/http"
	"strconv"
	"strings"

	"github.com/doze-run/doze/requestid"
)

// Write sends p as the response to r. It sets Content-Type, Content-Length,
// Cache-Control, X-Content-Type-Options, X-Request-Id, Doze-Error, Doze-Flow and
// the headers of p, such as Retry-After; other headers of w stay. The request's id
// is p's, or the X-Request-Id that w already has, or requestid.Of(r).
//
// A gRPC request gets a response of trailers only, with the gRPC status that
// corresponds to p's status.
func (p *Problem) Write(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	sent := p.For(cmp.Or(p.RequestID, h.Get(requestid.Header), requestid.Of(r)))
	maps.Copy(h, sent.GetHeaders())
	h.Set(requestid.Header, sent.RequestID)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if isGRPC(r) {
		sent.writeGRPC(w)
		return
	}
	body, err := json.Marshal(sent)
	if err != nil {
		panic(err) // strings and numbers only
	}
	body = append(body, '\n')
	h.Set("Content-Type", ContentType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(sent.Status)
	if r.Method != http.MethodHead {
		w.Write(body) // fails when the client has disconnected
	}
}

// writeGRPC sends p to a gRPC client, which reads the gRPC status only.
func (p *Problem) writeGRPC(w http.ResponseWriter) {
	message := p.Detail
	if p.Flow != "" {
		message += " (flow " + p.Flow + ")"
	}
	h := w.Header()
	h.Del("Content-Length")
	h.Set("Content-Type", "application/grpc")
	h.Set("Grpc-Status", strconv.Itoa(grpcStatus(p.Status)))
	h.Set("Grpc-Message", grpcMessage(message))
	w.WriteHeader(http.StatusOK)
}

// isGRPC reports whether r is a call of gRPC. A CONNECT is not, whatever its
// Content-Type: the status 200 of a response to a call would accept the tunnel.
func isGRPC(r *http.Request) bool {
	suffix, ok := strings.CutPrefix(r.Header.Get("Content-Type"), "application/grpc")
	return ok && r.Method == http.MethodPost && (suffix == "" || suffix[0] == '+' || suffix[0] == ';')
}

// grpcStatus returns UNIMPLEMENTED for 404, as gRPC clients themselves do,
// PERMISSION_DENIED for other errors of the client, and UNAVAILABLE, which clients
// may retry, for the rest:
// https://github.com/grpc/grpc/blob/master/doc/statuscodes.md
// https://github.com/grpc/grpc/blob/master/doc/http-grpc-status-mapping.md
func grpcStatus(status int) int {
	const permissionDenied, unimplemented, unavailable = 7, 12, 14
	switch {
	case status >= 500:
		return unavailable
	case status == http.StatusNotFound:
		return unimplemented
	}
	return permissionDenied
}

// grpcMessage percent-encodes the value of Grpc-Message:
// https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
func grpcMessage(text string) string {
	var b strings.Builder
	for i := range len(text) {
		if c := text[i]; c >= ' ' && c <= '~' && c != '%' {
			b.WriteByte(c)
		} else {
			const hex = "0123456789ABCDEF"
			b.Write([]byte{'%', hex[c>>4], hex[c&15]})
		}
	}
	return b.String()
}
