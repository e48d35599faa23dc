//go:build integration

package egress

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/andybalholm/brotli"
	"github.com/coder/websocket"
	"github.com/klauspost/compress/zstd"
)

// control is another text of the mirror: a test that finds it has searched the bytes
// that could have contained the secret.
const control = "control-of-the-mirror"

// reflections are the forms in which the mirror sends a text in a body.
var reflections = map[string]func(string) string{
	"plain":     func(s string) string { return s },
	"base64":    func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) },
	"base64-1":  func(s string) string { return base64.StdEncoding.EncodeToString([]byte("u" + s + ":x")) },
	"base64-2":  func(s string) string { return base64.StdEncoding.EncodeToString([]byte("u:" + s + ":x")) },
	"base64url": func(s string) string { return base64.RawURLEncoding.EncodeToString([]byte(s)) },
	"hex":       func(s string) string { return hex.EncodeToString([]byte(s)) },
	"HEX":       func(s string) string { return strings.ToUpper(hex.EncodeToString([]byte(s))) },
	"percent":   func(s string) string { return each(s, "%%%02X") },
	"json":      func(s string) string { return each(s, `\u%04x`) },
}

func each(s, format string) string {
	var b strings.Builder
	for _, c := range []byte(s) {
		fmt.Fprintf(&b, format, c)
	}
	return b.String()
}

// compressions are the codings of a body.
var compressions = map[string]func(io.Writer) io.WriteCloser{
	"gzip":    func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
	"deflate": func(w io.Writer) io.WriteCloser { return zlib.NewWriter(w) },
	"br":      func(w io.Writer) io.WriteCloser { return brotli.NewWriter(w) },
	"zstd":    func(w io.Writer) io.WriteCloser { z, _ := zstd.NewWriter(w); return z },
}

func secretOf(r *http.Request) string {
	return strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
}

// mirror sends the request's secret in the form that the path names.
func (s *servers) mirror(w http.ResponseWriter, r *http.Request) {
	secret, form, h := secretOf(r), r.PathValue("form"), w.Header()
	h.Set("Content-Type", "text/plain")
	if reflect := reflections[form]; reflect != nil {
		fmt.Fprintln(w, control, reflect(secret), control)
		return
	}
	if compress := compressions[form]; compress != nil {
		h.Set("Content-Encoding", form)
		var body bytes.Buffer
		c := compress(&body)
		fmt.Fprintln(c, control, secret, control)
		c.Close()
		_, _ = w.Write(body.Bytes())
		return
	}
	flush := http.NewResponseController(w).Flush
	switch form {
	case "split": // each byte in a chunk, or a frame
		for _, c := range []byte(control + secret + control) {
			_, _ = w.Write([]byte{c})
			_ = flush()
		}
	case "split-gzip":
		h.Set("Content-Encoding", "gzip")
		var body bytes.Buffer
		z := gzip.NewWriter(&body)
		fmt.Fprintln(z, control, secret)
		z.Close()
		for _, c := range body.Bytes() {
			_, _ = w.Write([]byte{c})
			_ = flush()
		}
	case "trailer":
		h.Set("Trailer", "X-Secret, X-Digits")
		fmt.Fprintln(w, control)
		h.Set("X-Secret", secret)
		h.Set("X-Digits", hex.EncodeToString([]byte(secret)))
	case "header":
		h.Set("X-Secret", secret)
		h.Set("X-Basic", "Basic "+base64.StdEncoding.EncodeToString([]byte("user:"+secret)))
		h.Set("Set-Cookie", "t="+secret)
		h.Set("X-"+secret, "1")
		fmt.Fprintln(w, control)
	case "early":
		h.Set("Link", "</"+secret+">; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		h.Del("Link")
		fmt.Fprintln(w, control)
	case "error":
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprintln(w, control, "unknown key:", secret)
	case "redirect":
		h.Set("Location", "https://other.look.test/?key="+secret)
		w.WriteHeader(http.StatusFound)
		fmt.Fprintln(w, control)
	case "document":
		_ = json.NewEncoder(w).Encode(map[string]any{"control": control, secret: []string{secret, "\"" + secret}})
	case "unknown-coding":
		h.Set("Content-Encoding", "doze-unknown")
		fmt.Fprintln(w, control, secret)
	case "range":
		w.Header().Set("Content-Range", "bytes 0-99/"+secret)
		w.WriteHeader(http.StatusPartialContent)
		fmt.Fprintln(w, control, secret)
	case "websocket":
		s.mirrorMessages(w, r, secret)
	default:
		http.NotFound(w, r)
	}
}

// mirrorMessages sends it in a message of one frame, and in one of many.
func (s *servers) mirrorMessages(w http.ResponseWriter, r *http.Request, secret string) {
	conn, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer conn.CloseNow()
	_ = conn.Write(r.Context(), websocket.MessageText, []byte(control+" "+secret))
	m, err := conn.Writer(r.Context(), websocket.MessageBinary)
	if err != nil {
		return
	}
	for _, c := range []byte(secret) {
		_, _ = m.Write([]byte{c})
	}
	_ = m.Close()
	_ = conn.Close(websocket.StatusNormalClosure, "bye "+secret)
}

// broken writes an invalid response, with the secret where an error may repeat it.
// Its client speaks HTTP/1.1.
func (s *servers) broken(w http.ResponseWriter, r *http.Request) {
	secret := secretOf(r)
	if secret == "" { // it came in the query
		secret = r.URL.Query().Get("key")
	}
	answers := map[string]string{
		"protocol": secret + "\r\n\r\n",
		"version":  "HTTP/" + secret + " 200 OK\r\n\r\n",
		"status":   "HTTP/1.1 " + secret + " OK\r\n\r\n",
		"reason":   "HTTP/1.1 200 " + secret + "\r\nContent-Length: 2\r\n\r\nok",
		"line":     "HTTP/1.1 200 OK\r\n" + secret + "\r\n\r\n",
		"name":     "HTTP/1.1 200 OK\r\n" + secret + " : x\r\n\r\n",
		"length":   "HTTP/1.1 200 OK\r\nContent-Length: " + secret + "\r\n\r\n",
		"lengths":  "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: " + secret + "\r\n\r\n",
		"transfer": "HTTP/1.1 200 OK\r\nTransfer-Encoding: " + secret + "\r\n\r\n",
		"chunk":    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + secret + "\r\n",
		"cut":      "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + secret,
		"coding":   "HTTP/1.1 200 OK\r\nContent-Encoding: " + secret + "\r\nContent-Length: 2\r\n\r\nok",
		"gzip":     "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: " + fmt.Sprint(len(secret)) + "\r\n\r\n" + secret,
		"upgrade":  "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + secret + "\r\n\r\n" + secret,
		"location": "HTTP/1.1 302 Found\r\nLocation: ://" + secret + "\r\nContent-Length: 0\r\n\r\n",
		"abort":    "",
		"204":      "HTTP/1.1 204 No Content\r\n\r\n" + secret,
		"304":      "HTTP/1.1 304 Not Modified\r\n\r\n" + secret,
		"between":  "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + secret + "\r\n",
		"trailer":  "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-A\r\n\r\n2\r\nok\r\n0\r\nX-A: " + secret + "\r\n\r\n",
		"trailers": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n" + secret + "\r\n\r\n",
	}
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	_, _ = io.WriteString(conn, answers[r.PathValue("form")])
}
