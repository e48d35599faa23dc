package intercept

import (
	"maps"
	"net/http"
	"net/textproto"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// hopByHop are the fields that apply to one connection only (RFC 9110, section
// 7.6.1). net/http writes its own Transfer-Encoding and Trailer.
var hopByHop = []string{
	"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authentication-Info", "Proxy-Authorization",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Http2-Settings",
	// Alternative routes to the same host, which would bypass the node.
	"Alt-Svc", "Alt-Used",
}

// removeHopByHop removes the fields that apply to the connection only.
func removeHopByHop(h http.Header) {
	for _, field := range h["Connection"] {
		for name := range strings.SplitSeq(field, ",") {
			if name = textproto.TrimString(name); name != "" {
				h.Del(name)
			}
		}
	}
	for _, name := range hopByHop {
		delete(h, name)
	}
}

// toHost removes the fields that are only for the node from a request's header. This
// happens before rules and policies see the header: otherwise a client could name a field
// in Connection that a rule matches or a policy sets. The fields that request a WebSocket
// and accept trailers stay.
func toHost(h http.Header) {
	upgrade := isWebSocket(upgradeOf(h))
	trailers := httpguts.HeaderValuesContainsToken(h["Te"], "trailers")
	removeHopByHop(h)
	delete(h, "Host") // sent over HTTP/2 in addition to :authority
	if trailers {
		h["Te"] = []string{"trailers"}
	}
	if upgrade {
		h["Connection"], h["Upgrade"] = []string{"Upgrade"}, []string{"websocket"}
	}
}

// requestHeader returns the header of the forwarded request.
func requestHeader(r *http.Request) http.Header {
	h := r.Header.Clone()
	if h == nil {
		h = http.Header{}
	}
	delete(h, "Content-Length")
	if _, ok := h["User-Agent"]; !ok {
		h["User-Agent"] = nil // otherwise net/http adds its own
	}
	return h
}

// readable restricts a request to responses that a filter can read: whole ones, because a
// secret could be fetched in pieces, and in codings that can be decoded. hold
// acquires the window for a coding with a large one.
func readable(h http.Header, hold func(windows int) bool) {
	delete(h, "Range")
	delete(h, "If-Range")
	delete(h, "Sec-Websocket-Extensions") // compression of frames
	if accepted, ok := h["Accept-Encoding"]; ok {
		h["Accept-Encoding"] = []string{decodable(accepted, hold)}
	}
}

// decodable returns an Accept-Encoding with only those codings that can be decoded.
func decodable(accepted []string, hold func(windows int) bool) string {
	var kept []string
	for _, field := range accepted {
		for element := range strings.SplitSeq(field, ",") {
			element = textproto.TrimString(element)
			name, _, _ := strings.Cut(element, ";")
			name = strings.ToLower(textproto.TrimString(name))
			if _, ok := decoders[name]; ok && (!hasLargeWindow(name) || hold(1)) || name == identity {
				kept = append(kept, element)
			}
		}
	}
	if len(kept) == 0 {
		return identity
	}
	return strings.Join(kept, ", ")
}

// copyHeader copies the header of a response to the client's. It marks missing fields
// that the server would add as absent.
func copyHeader(to, from http.Header) {
	maps.Copy(to, from)
	for _, name := range []string{"Date", "Content-Type"} {
		if _, ok := to[name]; !ok {
			to[name] = nil
		}
	}
}
