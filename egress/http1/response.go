package http1

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"
)

// shortBody is how much of a body is kept back to learn its length.
const shortBody = 2 << 10

// responseWriter is the http.ResponseWriter of a connection, for one request after the
// other.
type responseWriter struct {
	c      *serverConn
	out    *bufio.Writer
	r      *http.Request
	header http.Header

	mu       sync.Mutex // guards out against the "continue" of a body's reader
	status   int        // 0: not yet known; then its line and fields are in out
	sent     bool       // the whole head is in out
	last     bool       // the connection ends with this response
	hijacked bool
	dated    bool // what the header has
	typed    bool
	bodiless bool
	length   int64 // that was announced; -1: none
	written  int64
	chunked  bool
	trailers []string // that were announced
	short    []byte   // body that waits for its length
	err      error    // of writing to the connection
}

// begin prepares for the response to r.
func (w *responseWriter) begin(r *http.Request) {
	w.r, w.header = r, http.Header{}
	w.status, w.sent, w.last = 0, false, r.Close
	w.bodiless, w.length, w.written, w.chunked = false, -1, 0, false
	w.trailers, w.short = nil, w.short[:0]
}

// Header implements http.ResponseWriter.
func (w *responseWriter) Header() http.Header { return w.header }

// proceed tells the client that the body of its request is wanted.
func (w *responseWriter) proceed() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.status != 0 || w.hijacked {
		return nil
	}
	_, _ = w.out.WriteString("HTTP/1.1 100 Continue\r\n\r\n")
	return w.out.Flush()
}

// WriteHeader implements http.ResponseWriter. Informational responses are sent at once,
// others with the first of the body.
func (w *responseWriter) WriteHeader(status int) {
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("http1: invalid status %d", status))
	}
	if w.status != 0 || w.hijacked {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if status < 200 && status != http.StatusSwitchingProtocols {
		w.inform(status)
		return
	}
	h := w.header
	w.status = status
	w.bodiless = w.r.Method == http.MethodHead || status == http.StatusNoContent || status == http.StatusNotModified
	if lengths := h["Content-Length"]; len(lengths) == 1 && status != http.StatusNoContent {
		if n, err := strconv.ParseInt(lengths[0], 10, 64); err == nil && n >= 0 {
			w.length = n
		}
	}
	for _, field := range h["Trailer"] {
		for name := range strings.SplitSeq(field, ",") {
			if name = http.CanonicalHeaderKey(strings.TrimSpace(name)); name != "" {
				w.trailers = append(w.trailers, name)
			}
		}
	}
	w.last = w.last || httpguts.HeaderValuesContainsToken(h["Connection"], "close")
	_, w.dated = h["Date"]
	_, w.typed = h["Content-Type"]
	w.typed = w.typed || h.Get("Content-Encoding") != ""
	w.statusLine(status)
	w.fields(h)
}

// inform sends an informational response. w.mu is held.
func (w *responseWriter) inform(status int) {
	if w.r.ProtoMinor == 0 {
		return
	}
	w.statusLine(status)
	w.fields(w.header)
	_, _ = w.out.WriteString("\r\n")
	w.note(w.out.Flush())
}

func (w *responseWriter) statusLine(status int) {
	version := "HTTP/1.1 "
	if w.r.ProtoMinor == 0 {
		version = "HTTP/1.0 "
	}
	_, _ = w.out.WriteString(version)
	_, _ = w.out.WriteString(strconv.Itoa(status))
	_ = w.out.WriteByte(' ')
	text := http.StatusText(status)
	if text == "" {
		text = "status code " + strconv.Itoa(status)
	}
	_, _ = w.out.WriteString(text)
	_, _ = w.out.WriteString("\r\n")
}

// fields writes the valid fields of a header that are not about framing, in no certain
// order. What a host or a policy sets must not begin another response. w.mu is held.
func (w *responseWriter) fields(h http.Header) {
	for name, values := range h {
		switch name {
		case "Connection", "Content-Length", "Transfer-Encoding":
			continue
		case "Trailer":
			if w.r.ProtoMinor == 0 || w.length >= 0 || w.bodiless { // there are none without chunks
				continue
			}
		}
		if len(values) == 0 || !httpguts.ValidHeaderFieldName(name) { // as those with http.TrailerPrefix
			continue
		}
		for _, value := range values {
			writeField(w.out, name, lineless.Replace(value))
		}
	}
}

var lineless = strings.NewReplacer("\n", " ", "\r", " ")

func (w *responseWriter) note(err error) {
	if w.err == nil {
		w.err = err
	}
}

// Write implements http.ResponseWriter.
func (w *responseWriter) Write(b []byte) (int, error) {
	if w.hijacked {
		return 0, http.ErrHijacked
	}
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	if len(b) == 0 {
		return 0, nil
	}
	if w.bodiless {
		if w.r.Method == http.MethodHead {
			return len(b), nil
		}
		return 0, http.ErrBodyNotAllowed
	}
	w.written += int64(len(b))
	if w.length >= 0 && w.written > w.length {
		return 0, http.ErrContentLength
	}
	if !w.sent && w.length < 0 && len(w.short)+len(b) <= shortBody {
		w.short = append(w.short, b...)
		return len(b), nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begun(b)
	w.data(b)
	if w.err != nil {
		return 0, w.err
	}
	return len(b), nil
}

// begun sends the head and what was kept back, if that was not done. more is what follows.
// w.mu is held.
func (w *responseWriter) begun(more []byte) {
	if w.sent {
		return
	}
	w.sent = true
	if w.length < 0 && !w.bodiless {
		w.chunked = w.r.ProtoMinor > 0
		w.last = w.last || !w.chunked // else its end is that of the connection
	}
	if !w.dated {
		writeField(w.out, "Date", time.Now().UTC().Format(http.TimeFormat))
	}
	start := w.short
	if len(start) == 0 {
		start = more
	}
	if !w.typed && len(start) > 0 {
		writeField(w.out, "Content-Type", http.DetectContentType(start))
	}
	if w.length >= 0 {
		writeField(w.out, "Content-Length", strconv.FormatInt(w.length, 10))
	}
	if w.chunked {
		writeField(w.out, "Transfer-Encoding", "chunked")
	}
	if w.last {
		writeField(w.out, "Connection", "close")
	} else if w.r.ProtoMinor == 0 {
		writeField(w.out, "Connection", "keep-alive")
	}
	_, err := w.out.WriteString("\r\n")
	w.note(err)
	if len(w.short) > 0 {
		w.data(w.short)
		w.short = w.short[:0]
	}
}

// data writes a part of the body. w.mu is held.
func (w *responseWriter) data(b []byte) {
	if len(b) == 0 {
		return
	}
	if w.chunked {
		_, _ = w.out.WriteString(strconv.FormatInt(int64(len(b)), 16))
		_, _ = w.out.WriteString("\r\n")
	}
	_, err := w.out.Write(b)
	if w.chunked {
		_, err = w.out.WriteString("\r\n")
	}
	w.note(err)
}

// Flush implements http.Flusher.
func (w *responseWriter) Flush() { _ = w.FlushError() }

// FlushError sends what was written.
func (w *responseWriter) FlushError() error {
	if w.hijacked {
		return http.ErrHijacked
	}
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begun(nil)
	w.note(w.out.Flush())
	return w.err
}

// EnableFullDuplex is for http.ResponseController: it is always so.
func (w *responseWriter) EnableFullDuplex() error { return nil }

// finish ends the response. An error says that the client did not get the whole.
func (w *responseWriter) finish() error {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	trailers := w.trailing()
	if !w.sent && !w.bodiless && w.length < 0 && len(trailers) == 0 && len(w.trailers) == 0 {
		w.length = int64(len(w.short))
	}
	if !w.bodiless && w.length >= 0 && w.written != w.length {
		return io.ErrShortWrite
	}
	w.begun(nil)
	if w.chunked {
		_, _ = w.out.WriteString("0\r\n")
		w.fields(trailers)
		_, _ = w.out.WriteString("\r\n")
	}
	w.note(w.out.Flush())
	return w.err
}

// trailing are the trailers: those that were announced, and those with the prefix of
// net/http.
func (w *responseWriter) trailing() http.Header {
	var t http.Header
	add := func(name string, values []string) {
		if t == nil {
			t = http.Header{}
		}
		t[name] = values
	}
	for _, name := range w.trailers {
		if values, ok := w.header[name]; ok {
			add(name, values)
		}
	}
	for name, values := range w.header {
		if name, ok := strings.CutPrefix(name, http.TrailerPrefix); ok {
			add(name, values)
		}
	}
	return t
}

// Hijack implements http.Hijacker.
func (w *responseWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.hijacked:
		return nil, nil, http.ErrHijacked
	case w.sent:
		return nil, nil, errors.New("http1: the response has begun")
	case !w.c.body.whole():
		return nil, nil, errors.New("http1: the body of the request was not read")
	}
	w.hijacked = true
	w.c.source.ignore()
	w.c.in.left = unlimited
	return w.c.conn, bufio.NewReadWriter(w.c.r, w.out), nil
}
