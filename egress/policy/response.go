package policy

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/doze-run/doze/problem"
)

// response is a response in memory.
type response struct {
	status  int
	header  http.Header
	trailer http.Header
	body    []byte
	read    *bytes.Reader // the guest's position in body
	written bool          // the guest wrote the body in its current function
}

// write appends to the body. The first write in each function of the guest replaces it.
func (a *response) write(b []byte, limit int) {
	if !a.written {
		a.body, a.written, a.read = nil, true, nil
	}
	if len(a.body)+len(b) > limit {
		failWith(problem.PolicyResponseTooLarge, "it writes more than %d bytes of a response", limit)
	}
	a.body = append(a.body, b...)
}

// next reads the next bytes of the body into b, for the guest.
func (a *response) next(b []byte) (n int, end bool) {
	if a.read == nil {
		a.read = bytes.NewReader(a.body)
	}
	n, _ = a.read.Read(b)
	return n, a.read.Len() == 0
}

// send writes the response to w.
func (a *response) send(w http.ResponseWriter, r *http.Request) {
	h, status := w.Header(), a.statusCode()
	maps.Copy(h, a.header)
	bodyless := status == http.StatusNoContent || status == http.StatusNotModified
	switch {
	case bodyless || r.Method == http.MethodHead && !a.written:
	case len(a.trailer) > 0:
		h.Del("Content-Length") // trailers need chunks
	default:
		h.Set("Content-Length", strconv.Itoa(len(a.body)))
	}
	w.WriteHeader(status)
	if len(a.body) > 0 && !bodyless && r.Method != http.MethodHead {
		_, _ = w.Write(a.body) // fails only if the client has left
	}
	if len(a.trailer) > 0 {
		_ = http.NewResponseController(w).Flush() // otherwise short responses have no chunks
		for key, values := range a.trailer {
			h[http.TrailerPrefix+key] = values
		}
	}
}

// recorder is the ResponseWriter of the handlers after a policy that buffers responses. It
// does not support Flush or Hijack.
type recorder struct {
	response
	live  http.Header // the header that the handler sets
	limit int
	over  bool // the response is longer than limit
	began bool
}

func (w *recorder) Header() http.Header { return w.live }

// WriteHeader records the status of the response. Informational responses (1xx) are
// dropped, because the final response follows soon.
func (w *recorder) WriteHeader(status int) {
	if w.began || status >= 100 && status < 200 && status != http.StatusSwitchingProtocols {
		return
	}
	w.began, w.status, w.header = true, status, w.live.Clone()
}

func (w *recorder) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	if w.over || len(w.body)+len(b) > w.limit {
		w.over, w.body = true, nil
		return 0, fmt.Errorf("the policy buffers responses, and this one has more than %d bytes", w.limit)
	}
	w.body = append(w.body, b...)
	return len(b), nil
}

// finish moves the trailers from the header to trailer.
func (w *recorder) finish() {
	w.WriteHeader(w.statusCode())
	w.trailer = trailersOf(w.live)
	for _, list := range w.header["Trailer"] {
		for name := range strings.SplitSeq(list, ",") {
			key := http.CanonicalHeaderKey(strings.TrimSpace(name))
			if values, ok := w.live[key]; ok && !slices.Equal(values, w.header[key]) {
				w.trailer[key] = values
			}
		}
	}
	maps.DeleteFunc(w.header, func(key string, _ []string) bool {
		return key == "Trailer" || strings.HasPrefix(key, http.TrailerPrefix)
	})
}
