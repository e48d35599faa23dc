package intercept

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
)

// Refusal says why a request was not sent on, or not answered.
type Refusal struct {
	Code   string `json:"code"`   // stable, for programs
	Reason string `json:"reason"` // for people
	Host   string `json:"host"`
	Rule   string `json:"rule"` // that refused, such as node/github; empty if none did
	// Flow names the connection, as the audit log does.
	Flow string `json:"flow,omitempty"`
}

// HeaderRefused is in refusals, with their code: so that a client can tell them from
// answers of the host, of which it is taken out.
const HeaderRefused = "X-Doze-Egress"

// HeaderFlow is in refusals, with their flow: for clients that do not see a body.
const HeaderFlow = "X-Doze-Flow"

// Refuse answers a request with a refusal as JSON. Clients of gRPC, which look
// at the status of their own protocol only, get that. A Connection: close that is set
// already stays.
func Refuse(w http.ResponseWriter, r *http.Request, status int, why Refusal) {
	h := w.Header()
	last := r.ProtoMajor == 1 && (why.Code == CodeFraming || h.Get("Connection") == "close")
	clear(h)
	h.Set("Cache-Control", "no-store")
	h.Set(HeaderRefused, why.Code)
	if why.Flow != "" {
		h.Set(HeaderFlow, why.Flow)
	}
	if status == http.StatusServiceUnavailable {
		h.Set("Retry-After", "1") // second: a limit was reached, for a moment as a rule
	}
	if last { // what follows may be its body or another
		h.Set("Connection", "close")
	}
	if isGRPC(r.Header) {
		h.Set("Content-Type", "application/grpc")
		h.Set("Grpc-Status", strconv.Itoa(grpcStatus(status)))
		message := why.Reason
		if why.Flow != "" {
			message += " (flow " + why.Flow + ")"
		}
		h.Set("Grpc-Message", grpcMessage(message))
		w.WriteHeader(http.StatusOK)
		return
	}
	body, _ := json.Marshal(why) // strings: no error
	body = append(body, '\n')
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		w.Write(body) // the client may have left
	}
}

func isGRPC(h http.Header) bool {
	kind, rest, _ := strings.Cut(h.Get("Content-Type"), "application/grpc")
	return kind == "" && h.Get("Content-Type") != "" && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// grpcStatus is the status of gRPC that is nearest:
// https://github.com/grpc/grpc/blob/master/doc/statuscodes.md
func grpcStatus(status int) int {
	const permissionDenied, unavailable = 7, 14
	if status >= 500 {
		return unavailable
	}
	return permissionDenied
}

// grpcMessage encodes a text for the header of that name, as gRPC over HTTP/2
// asks for.
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
