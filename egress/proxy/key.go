package proxy

import (
	"encoding/base64"
	"net/http"
	"net/netip"
	"strings"

	"github.com/doze-run/doze/problem"
)

// maxKey is longer than any key, and short enough to hash for any client.
const maxKey = 4096

// confidential reports whether the key is protected from third parties: by TLS, or
// because the connection is local.
func confidential(r *http.Request) bool {
	if r.TLS != nil {
		return true
	}
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && from.Addr().Unmap().IsLoopback()
}

// authenticate returns the owner of the request's key.
func (h *Handler) authenticate(r *http.Request) (owner string, ok bool) {
	fields := r.Header["Proxy-Authorization"]
	if len(fields) != 1 {
		return "", false
	}
	key := keyOf(fields[0])
	if key == "" || len(key) > maxKey {
		return "", false
	}
	return h.Authenticate(key)
}

// keyOf returns the key in a Proxy-Authorization: a bearer token, or the password of any
// user for clients that support basic authentication only.
func keyOf(field string) string {
	scheme, value, _ := strings.Cut(field, " ")
	value = strings.TrimSpace(value)
	switch {
	case len(value) > 2*maxKey:
		return ""
	case strings.EqualFold(scheme, "Bearer"):
		return value
	case strings.EqualFold(scheme, "Basic"):
		plain, err := base64.StdEncoding.DecodeString(value)
		if err != nil {
			return ""
		}
		_, password, _ := strings.Cut(string(plain), ":")
		return password
	}
	return ""
}

// requireKey refuses a request without a valid key.
func requireKey(w http.ResponseWriter, r *http.Request) {
	detail := "no API key"
	if r.Header.Get("Proxy-Authorization") != "" {
		detail = "invalid API key"
	}
	detail += "; send a key of this node's API in Proxy-Authorization, as the password of any user or as a bearer token"
	h := w.Header()
	clear(h)
	h["Proxy-Authenticate"] = []string{`Basic realm="doze", charset="UTF-8"`, `Bearer realm="doze"`}
	problem.New(problem.ProxyAuthenticationRequired, detail).Write(w, r)
}
