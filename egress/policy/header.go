package policy

import (
	"net/http"
	"net/textproto"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"
)

// Limits on a message's header after the changes of policies.
const (
	maxFields      = 256
	maxHeaderBytes = 64 << 10
)

// reserved are the header fields that only the node sets, because they decide where a
// message goes and where it ends. Upgrade and Trailer depend on how the message is sent.
var reserved = map[string]bool{
	"Host": true, "Connection": true, "Keep-Alive": true, "Proxy-Connection": true, "Te": true, "Trailer": true,
	"Transfer-Encoding": true, "Upgrade": true, "Http2-Settings": true,
	"Proxy-Authorization": true, "Proxy-Authenticate": true,
}

// weight bounds the fields that a policy adds to a header or trailer.
type weight struct {
	known         bool
	fields, bytes int
}

func isName(name string) bool {
	return len(name) <= maxHeaderBytes && httpguts.ValidHeaderFieldName(name)
}

// canonical returns the name in the form of http.Header. It ends the guest if the name is
// invalid.
func canonical(name string) string {
	if !isName(name) {
		fail("%.40q is not a name of a header", name)
	}
	return textproto.CanonicalMIMEHeaderKey(name)
}

// change sets or adds a field.
func (w *weight) change(h http.Header, name, value string, add bool) {
	key := canonical(name)
	if !mutable(key) {
		return
	}
	if !httpguts.ValidHeaderFieldValue(value) {
		fail("its value of header %.40q holds a line break or another control character", key)
	}
	if !add {
		w.drop(h, key)
	}
	if !w.known {
		w.measure(h)
	}
	w.fields++
	w.bytes += len(key) + len(value)
	if w.fields > maxFields || w.bytes > maxHeaderBytes {
		fail("a header has more than %d fields or %d bytes", maxFields, maxHeaderBytes)
	}
	h[key] = append(h[key], value)
}

func (w *weight) measure(h http.Header) {
	w.known = true
	for key, values := range h {
		for _, v := range values {
			w.fields++
			w.bytes += len(key) + len(v)
		}
	}
}

func (w *weight) remove(h http.Header, name string) {
	if key := canonical(name); mutable(key) {
		w.drop(h, key)
	}
}

func (w *weight) drop(h http.Header, key string) {
	if w.known {
		for _, v := range h[key] {
			w.fields--
			w.bytes -= len(key) + len(v)
		}
	}
	delete(h, key)
}

// mutable reports whether a policy may change a field. It ends the guest for a reserved
// field. Changes of Content-Length are ignored: guests that change bodies set it by habit,
// and the node computes it anyway.
func mutable(key string) bool {
	if reserved[key] {
		fail("it changes header %s, which is the node's", key)
	}
	return key != "Content-Length"
}

// names returns the names of header fields and more, in lower case and sorted, without
// trailers.
func names(h http.Header, more ...string) []string {
	list := make([]string, 0, len(h)+len(more))
	for key, values := range h {
		if len(values) > 0 && !strings.HasPrefix(key, http.TrailerPrefix) {
			list = append(list, strings.ToLower(key))
		}
	}
	list = append(list, more...)
	slices.Sort(list)
	return list
}
