package http1

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"
)

// maxUnsized is how much of a body is buffered to send it with Content-Length.
const maxUnsized = 2 << 10

// responseWriter is a connection's http.ResponseWriter. It is reused for each request.
type responseWriter struct {
	c      *serverConn
	out    *bufio.Writer
	r      *http.Request
	header http.Header

	mu       sync.Mutex // guards out against writeContinue by the body's reader
	status   int        // 0 before WriteHeader, which writes the status line and the fields
	headDone bool       // the rest of the head was written
	last     bool       // the connection ends after this response
	hijacked bool
	hasDate  bool
	hasType  bool
	bodiless bool
	length   int64 // Content-Length, or -1
	written  int64
	chunked  bool
	trailers []string // announced names
	unsized  []byte   // body while its length is unknown
	err      error    // first error of writing to the connection
}

// reset prepares the response to r.
func (w *responseWriter) reset(r *http.Request) {
	w.r, w.header = r, http.Header{}
	w.status, w.headDone, w.last = 0, false, r.Close
	w.bodiless, w.length, w.written, w.chunked = false, -1, 0, false
	w.unsized = w.unsized[:0]
}

// Header implements http.ResponseWriter.
func (w *responseWriter) Header() http.Header { return w.header }

// writeContinue asks the client for the body, unless the response has begun.
func (w *responseWriter) writeContinue() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.status != 0 || w.hijacked {
		return nil
	}
	_, _ = w.out.WriteString("HTTP/1.1 100 Continue\r\n\r\n")
	return w.out.Flush()
}

// WriteHeader implements http.ResponseWriter. It flushes informational responses only.
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
		w.writeInformational(status)
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
	w.trailers = trailerNames(h["Trailer"])
	w.last = w.last || w.c.body.unfinished() || httpguts.HeaderValuesContainsToken(h["Connection"], "close")
	_, w.hasDate = h["Date"]
	_, w.hasType = h["Content-Type"]
	w.hasType = w.hasType || h.Get("Content-Encoding") != ""
	w.writeStatusLine(status)
	w.writeFields(h)
}

// writeInformational sends a 1xx response. w.mu is held.
func (w *responseWriter) writeInformational(status int) {
	if w.r.ProtoMinor == 0 {
		return
	}
	w.writeStatusLine(status)
	w.writeFields(w.header)
	_, _ = w.out.WriteString("\r\n")
	w.recordError(w.out.Flush())
}

func (w *responseWriter) writeStatusLine(status int) {
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

// writeFields writes the valid fields of a header, except for the fields of framing, in
// random order. It replaces line breaks, which could inject another response. w.mu is held.
func (w *responseWriter) writeFields(h http.Header) {
	for name, values := range h {
		switch name {
		case "Connection", "Content-Length", "Transfer-Encoding":
			continue
		case "Trailer":
			if w.r.ProtoMinor == 0 || w.length >= 0 || w.bodiless { // trailers need chunks
				continue
			}
		}
		if len(values) == 0 || !httpguts.ValidHeaderFieldName(name) { // includes those with http.TrailerPrefix
			continue
		}
		for _, value := range values {
			writeField(w.out, name, lineBreaks.Replace(value))
		}
	}
}

var lineBreaks = strings.NewReplacer("\n", " ", "\r", " ")

func (w *responseWriter) recordError(err error) {
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
	if !w.headDone && w.length < 0 && len(w.unsized)+len(b) <= maxUnsized {
		w.unsized = append(w.unsized, b...)
		return len(b), nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.finishHead(b)
	w.writeBody(b)
	if w.err != nil {
		return 0, w.err
	}
	return len(b), nil
}

// finishHead writes the rest of the head and the buffered part of the body, unless that was
// done before. next is the next part of the body. w.mu is held.
func (w *responseWriter) finishHead(next []byte) {
	if w.headDone {
		return
	}
	w.headDone = true
	if w.length < 0 && !w.bodiless {
		w.chunked = w.r.ProtoMinor > 0
		w.last = w.last || !w.chunked // otherwise the end of the connection ends the body
	}
	if !w.hasDate {
		writeField(w.out, "Date", time.Now().UTC().Format(http.TimeFormat))
	}
	start := w.unsized
	if len(start) == 0 {
		start = next
	}
	if !w.hasType && len(start) > 0 {
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
	w.recordError(err)
	if len(w.unsized) > 0 {
		w.writeBody(w.unsized)
		w.unsized = w.unsized[:0]
	}
}

// writeBody writes a part of the body. w.mu is held.
func (w *responseWriter) writeBody(b []byte) {
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
	w.recordError(err)
}

// Flush implements http.Flusher.
func (w *responseWriter) Flush() { _ = w.FlushError() }

// FlushError sends the bytes written so far.
func (w *responseWriter) FlushError() error {
	if w.hijacked {
		return http.ErrHijacked
	}
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.finishHead(nil)
	w.recordError(w.out.Flush())
	return w.err
}

// finish completes the response. An error means that the client did not get all of it.
func (w *responseWriter) finish() error {
	if w.status == 0 {
		w.WriteHeader(http.StatusOK)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	trailers := w.trailerFields()
	if !w.headDone && !w.bodiless && w.length < 0 && len(trailers) == 0 && len(w.trailers) == 0 {
		w.length = int64(len(w.unsized))
	}
	if !w.bodiless && w.length >= 0 && w.written != w.length {
		return io.ErrShortWrite
	}
	w.finishHead(nil)
	if w.chunked {
		_, _ = w.out.WriteString("0\r\n")
		w.writeFields(trailers)
		_, _ = w.out.WriteString("\r\n")
	}
	w.recordError(w.out.Flush())
	return w.err
}

// trailerFields returns the trailers: the announced ones and those with
// http.TrailerPrefix.
func (w *responseWriter) trailerFields() http.Header {
	var t http.Header
	for name, values := range w.header {
		trailer, prefixed := strings.CutPrefix(name, http.TrailerPrefix)
		if !prefixed && !slices.Contains(w.trailers, name) {
			continue
		}
		if t == nil {
			t = http.Header{}
		}
		t[trailer] = values
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
	case w.headDone:
		return nil, nil, errors.New("http1: hijack after the head of the response")
	case !w.c.body.atEOF():
		return nil, nil, errors.New("http1: hijack before the end of the request's body")
	}
	w.hijacked = true
	w.c.source.stopWatch()
	w.c.in.N = unlimited
	return w.c.conn, bufio.NewReadWriter(w.c.r, w.out), nil
}
