package intercept

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/andybalholm/brotli"
	"github.com/coder/websocket"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/zstd"

	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/quota"
	"github.com/doze-run/doze/testkit"
)

const secret = "TOPSECRET"

// mask is a filter that finds the secret wherever its bytes are split, and holds back no
// more bytes than necessary.
type mask struct{}

func (mask) Text(s string) string {
	return strings.ReplaceAll(s, secret, strings.Repeat("*", len(secret)))
}

func (m mask) Header(h http.Header) {
	for _, values := range h {
		for i := range values {
			values[i] = m.Text(values[i])
		}
	}
}

func (m mask) Body(r io.Reader) io.Reader { return &masked{r: r} }

type masked struct {
	r    io.Reader
	held []byte
	err  error
}

func (m *masked) Read(b []byte) (int, error) {
	for {
		m.held = []byte(mask{}.Text(string(m.held)))
		keep := 0
		for n := min(len(secret)-1, len(m.held)); n > 0 && m.err == nil; n-- {
			if strings.HasPrefix(secret, string(m.held[len(m.held)-n:])) {
				keep = n
				break
			}
		}
		if ready := len(m.held) - keep; ready > 0 {
			n := copy(b, m.held[:ready])
			m.held = m.held[n:]
			return n, nil
		}
		if m.err != nil {
			return 0, m.err
		}
		piece := make([]byte, 4096)
		var n int
		n, m.err = m.r.Read(piece)
		m.held = append(m.held, piece[:n]...)
	}
}

var encoders = map[string]func(io.Writer) io.WriteCloser{
	"gzip":    func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
	"x-gzip":  func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
	"deflate": func(w io.Writer) io.WriteCloser { return zlib.NewWriter(w) },
	"br":      func(w io.Writer) io.WriteCloser { return brotli.NewWriter(w) },
	"zstd":    func(w io.Writer) io.WriteCloser { z, _ := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1)); return z },
	"Deflate": func(w io.Writer) io.WriteCloser { f, _ := flate.NewWriter(w, 6); return f }, // without zlib's header
	"identity": func(w io.Writer) io.WriteCloser {
		return struct {
			io.Writer
			io.Closer
		}{w, io.NopCloser(nil)}
	},
}

func TestFilterGetsTheWholeResponse(t *testing.T) {
	for coding, encode := range encoders {
		t.Run(coding, func(t *testing.T) {
			r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				w.Header().Set("X-Echo", secret)
				w.WriteHeader(http.StatusEarlyHints)
				w.Header().Set("Content-Encoding", coding)
				w.Header().Set("Trailer", "X-Sum")
				e := encode(w)
				for _, piece := range []string{"before TOP", "SEC", "RET after"} {
					io.WriteString(e, piece)
					if f, ok := e.(interface{ Flush() error }); ok {
						f.Flush()
					}
					http.NewResponseController(w).Flush()
				}
				e.Close()
				w.Header().Set("X-Sum", secret)
				w.Header().Set(http.TrailerPrefix+"X-Late", secret)
			}), filtered(mask{}))
			conn := r.dialTLS(host, "http/1.1")
			io.WriteString(conn, "GET / HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n")
			all, err := io.ReadAll(conn)
			if err != nil {
				t.Fatal(err)
			}
			if text := string(all); strings.Contains(text, secret) || strings.Count(text, "*********") < 3 || coding != "identity" && strings.Contains(text, "Content-Encoding") {
				t.Errorf("%q", text)
			}
			res, err := r.client(2).Get("https://" + host + "/")
			if err != nil {
				t.Fatal(err)
			}
			if body := testkit.Body(t, res); body != "before ********* after" || res.Header.Get("X-Echo") != "*********" || res.Trailer.Get("X-Sum") != "*********" || res.Trailer.Get("X-Late") != "*********" {
				t.Errorf("%q %v %v", body, res.Header, res.Trailer)
			}
		})
	}
}

// A decoder must not hold back an event until the next one.
func TestDecodedEventsAreNotDelayed(t *testing.T) {
	for _, coding := range []string{"gzip", "deflate", "br", "zstd"} {
		t.Run(coding, func(t *testing.T) {
			more := make(chan string)
			r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				w.Header().Set("Content-Type", "text/event-stream")
				w.Header().Set("Content-Encoding", coding)
				http.NewResponseController(w).Flush()
				e := encoders[coding](w)
				for event := range more {
					io.WriteString(e, event)
					e.(interface{ Flush() error }).Flush()
					http.NewResponseController(w).Flush()
				}
				e.Close()
			}), filtered(mask{}))
			res, err := r.client(1).Get("https://" + host + "/")
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			sendEvents(t, more, res)
		})
	}
}

func TestUnreadableResponsesAreRefused(t *testing.T) {
	for name, handler := range map[string]http.HandlerFunc{
		"echo":    func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Encoding", secret) },
		"coding":  func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Encoding", "compress") },
		"several": func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Content-Encoding", "gzip, gzip, gzip") },
		"part": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Range", "bytes 0-1/10")
			w.WriteHeader(http.StatusPartialContent)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, handler, filtered(mask{}))
			res, err := r.client(2).Get("https://" + host + "/")
			if err != nil {
				t.Fatal(err)
			}
			if body := testkit.Body(t, res); res.StatusCode != 502 || !strings.Contains(body, problem.UpstreamResponseUnreadable.String()) || strings.Contains(strings.ToUpper(body), secret[:8]) {
				t.Errorf("%d %s", res.StatusCode, body)
			}
		})
	}
}

// Some bytes of brotli make its decoder allocate 16 MiB.
func TestLargeWindowsAreBounded(t *testing.T) {
	accepted := make(chan string, 1)
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		accepted <- req.Header.Get("Accept-Encoding")
		if coding := req.Header.Get("X-Coding"); coding != "" {
			w.Header().Set("Content-Encoding", coding)
			last := coding[strings.LastIndexByte(coding, ' ')+1:]
			encoder := encoders[last](w)
			io.WriteString(encoder, "text")
			encoder.Close()
		}
	}), filtered(mask{}))
	r.windows = quota.New(1)
	get := func(coding, wantAccepted string, wantStatus int, want string) {
		t.Helper()
		req, _ := http.NewRequest("GET", "https://"+host+"/", nil)
		req.Header.Set("X-Coding", coding)
		req.Header.Set("Accept-Encoding", "gzip, br, zstd")
		res, err := r.client(2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body := testkit.Body(t, res)
		if got := <-accepted; got != wantAccepted || res.StatusCode != wantStatus || !strings.Contains(body, want) {
			t.Errorf("%q: accepts %q, got %d %s", coding, got, res.StatusCode, body)
		}
		<-r.results
	}
	get("br", "gzip, br, zstd", 200, "text")
	get("zstd, br", "gzip, br, zstd", 502, "too many such responses")
	if n := r.windows.Used(); n != 0 {
		t.Fatalf("%d windows are held after the requests", n)
	}
	_ = r.windows.TryAcquire(1) // another request's
	get("", "gzip", 200, "")
	get("gzip", "gzip", 200, "text")
	for _, unsolicited := range []string{"br", "zstd"} {
		get(unsolicited, "gzip", 502, "too many such responses")
	}
	if n := r.windows.Used(); n != 1 {
		t.Errorf("%d windows are held, want 1", n)
	}
}

func TestInvalidEncodingAbortsTheResponse(t *testing.T) {
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		io.WriteString(w, secret)
	}), filtered(mask{}))
	res, err := r.client(2).Get("https://" + host + "/")
	if err == nil {
		defer res.Body.Close()
		if body, err := io.ReadAll(res.Body); err == nil || len(body) != 0 {
			t.Errorf("%q, %v", body, err)
		}
	}
	var f *Failure
	if result := <-r.results; !errors.As(result.Err, &f) {
		t.Errorf("%+v", result)
	}
}

func TestFilteredRequestAcceptsReadableResponsesOnly(t *testing.T) {
	for sent, want := range map[string]string{"": "", "gzip, deflate, br, zstd": "gzip, deflate, br, zstd", "compress, GZIP;q=0.5, *": "GZIP;q=0.5", "*": "identity"} {
		got := make(chan http.Header, 1)
		r := start(t, http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { got <- req.Header }), filtered(mask{}))
		req, _ := http.NewRequest("GET", "https://"+host+"/", nil)
		req.Header.Set("Range", "bytes=0-0")
		req.Header.Set("If-Range", `"x"`)
		if sent != "" {
			req.Header.Set("Accept-Encoding", sent)
		}
		res, err := r.client(2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if h := <-got; h.Get("Accept-Encoding") != want || h.Get("Range") != "" || h.Get("If-Range") != "" {
			t.Errorf("%q: %v", sent, h)
		}
	}
}

func TestWebSocket(t *testing.T) {
	for name, options := range map[string][]option{"untouched": nil, "filtered": {filtered(mask{})}, "plain": {withoutTLS, filtered(mask{})}} {
		t.Run(name, func(t *testing.T) {
			r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				if len(options) > 0 && req.Header.Get("Sec-Websocket-Extensions") != "" {
					t.Error("frames may be compressed")
				}
				c, err := websocket.Accept(w, req, &websocket.AcceptOptions{CompressionMode: websocket.CompressionContextTakeover})
				if err != nil {
					t.Error(err)
					return
				}
				c.SetReadLimit(1 << 20)
				for {
					kind, message, err := c.Read(req.Context())
					if err != nil {
						return
					}
					// Several frames, split within the secret.
					out, _ := c.Writer(req.Context(), kind)
					for piece := range slices.Chunk(message, 5) {
						out.Write(piece)
					}
					out.Close()
				}
			}), options...)
			r.windows = quota.New(1)
			scheme := "wss"
			if name == "plain" {
				scheme = "ws"
			}
			c, _, err := websocket.Dial(t.Context(), scheme+"://"+host+"/", &websocket.DialOptions{
				HTTPClient: r.client(1), CompressionMode: websocket.CompressionContextTakeover, HTTPHeader: http.Header{"Accept-Encoding": {"br"}},
			})
			if err != nil {
				t.Fatal(err)
			}
			defer c.CloseNow()
			if n := r.windows.Used(); n != 0 {
				t.Errorf("it holds %d windows of a decoder", n)
			}
			for _, message := range []string{"hello", "a " + secret + " b", "ends in TOPSECRE", "", strings.Repeat("x", 70000)} {
				if err := c.Write(t.Context(), websocket.MessageText, []byte(message)); err != nil {
					t.Fatal(err)
				}
				want := message
				if len(options) > 0 {
					want = mask{}.Text(message)
				}
				c.SetReadLimit(1 << 20)
				if _, got, err := c.Read(t.Context()); err != nil || string(got) != want {
					t.Errorf("%.40q, %v", got, err)
				}
			}
			c.Close(websocket.StatusNormalClosure, "bye")
			if result := <-r.results; result.Status != 101 || result.BytesIn == 0 || result.BytesOut == 0 || len(options) > 0 && (result.BytesIn < 70000 || result.BytesOut < 70000) || result.Err != nil {
				t.Errorf("%+v", result)
			}
		})
	}
}

func TestWebSocketWithUnrequestedCompressionIsRefused(t *testing.T) {
	r := start(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n")
	}), filtered(mask{}))
	res := r.send(r.dialTLS(host, "http/1.1"), "GET / HTTP/1.1\r\nHost: api.example.com\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	if body := testkit.Body(t, res); res.StatusCode != 502 || !strings.Contains(body, problem.UpstreamResponseUnreadable.String()) {
		t.Errorf("%d %s", res.StatusCode, body)
	}
}

// wsFrame returns a frame of an upstream.
func wsFrame(first byte, payload string) []byte {
	b := []byte{first}
	switch n := len(payload); {
	case n < 126:
		b = append(b, byte(n))
	case n < 1<<16:
		b = binary.BigEndian.AppendUint16(append(b, 126), uint16(n))
	default:
		b = binary.BigEndian.AppendUint64(append(b, 127), uint64(n))
	}
	return append(b, payload...)
}

func TestMessagesAreFilteredWhole(t *testing.T) {
	stars := strings.Repeat("*", len(secret))
	frames := func(all ...[]byte) []byte { return bytes.Join(all, nil) }
	long := strings.Repeat("x", 300)
	for name, c := range map[string]struct{ in, want []byte }{
		"one frame":       {wsFrame(0x81, "a"+secret), wsFrame(0x81, "a"+stars)},
		"three frames":    {frames(wsFrame(0x01, "aTOP"), wsFrame(0x00, ""), wsFrame(0x00, "SEC"), wsFrame(0x80, "RETb")), frames(wsFrame(0x01, "a***"), wsFrame(0x00, ""), wsFrame(0x00, "***"), wsFrame(0x80, "***b"))},
		"ping between":    {frames(wsFrame(0x01, "TOP"), wsFrame(0x89, "hi"), wsFrame(0x80, "SECRET")), frames(wsFrame(0x01, "***"), wsFrame(0x89, "hi"), wsFrame(0x80, "******"))},
		"in control":      {wsFrame(0x88, "\x03\xe8"+secret), wsFrame(0x88, "\x03\xe8"+stars)},
		"two messages":    {frames(wsFrame(0x81, "TOP"), wsFrame(0x82, "SECRET"), wsFrame(0x8a, "")), frames(wsFrame(0x81, "TOP"), wsFrame(0x82, "SECRET"), wsFrame(0x8a, ""))},
		"longer lengths":  {frames(wsFrame(0x82, long+secret), wsFrame(0x82, strings.Repeat(long, 300)+secret)), frames(wsFrame(0x82, long+stars), wsFrame(0x82, strings.Repeat(long, 300)+stars))},
		"nothing":         {nil, nil},
		"empty, and more": {frames(wsFrame(0x01, ""), wsFrame(0x80, ""), wsFrame(0x81, "a")), frames(wsFrame(0x01, ""), wsFrame(0x80, ""), wsFrame(0x81, "a"))},
	} {
		for how, in := range map[string]io.Reader{"in one piece": bytes.NewReader(c.in), "byte by byte": iotest.OneByteReader(bytes.NewReader(c.in))} {
			got, err := io.ReadAll(newMessages(in, mask{}))
			if err != nil || !bytes.Equal(got, c.want) {
				t.Errorf("%s, %s: %.60q, %v", name, how, got, err)
			}
		}
	}
}

func TestInvalidFramesEndTheWebSocket(t *testing.T) {
	for name, c := range map[string]struct {
		in   []byte
		want error
	}{
		"masked":              {[]byte{0x81, 0x81, 1, 2, 3, 4, 'a'}, errMasked},
		"compressed":          {wsFrame(0xc1, "a"), errExtension},
		"long ping":           {wsFrame(0x89, strings.Repeat("a", 126)), errControl},
		"ping in parts":       {wsFrame(0x09, "a"), errControl},
		"begins in a message": {append(wsFrame(0x01, "a"), wsFrame(0x81, "b")...), errOrder},
		"continues nothing":   {wsFrame(0x80, "a"), errOrder},
		"empty parts":         {append(wsFrame(0x01, "T"), bytes.Repeat(wsFrame(0x00, ""), maxFragments+1)...), errFragments},
		"pings between":       {append(wsFrame(0x01, "T"), bytes.Repeat(wsFrame(0x89, ""), maxFragments+1)...), errFragments},
		"cut":                 {wsFrame(0x81, "abc")[:4], io.ErrUnexpectedEOF},
		"cut in a header":     {wsFrame(0x81, strings.Repeat("a", 200))[:3], io.ErrUnexpectedEOF},
		"cut between frames":  {wsFrame(0x01, "abc"), io.ErrUnexpectedEOF},
	} {
		if got, err := io.ReadAll(newMessages(bytes.NewReader(c.in), mask{})); !errors.Is(err, c.want) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// However an upstream splits its messages, the filtered ones have the same length and no
// secret.
func FuzzMessages(f *testing.F) {
	f.Add(wsFrame(0x81, "a"+secret))
	f.Add(append(wsFrame(0x01, "TOP"), wsFrame(0x80, "SECRET")...))
	f.Add(append(append(wsFrame(0x01, "TOP"), wsFrame(0x89, "")...), wsFrame(0x80, "SECRET")...))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := io.ReadAll(newMessages(bytes.NewReader(b), mask{}))
		if len(got) > len(b) || err == nil && len(got) != len(b) {
			t.Errorf("%d bytes of %d, %v", len(got), len(b), err)
		}
		if bytes.Contains(got, []byte(secret)) && err == nil && len(b) < 126 && b[0] == 0x81 && int(b[1]) == len(b)-2 {
			t.Errorf("%q", got)
		}
	})
}
