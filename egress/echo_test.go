package egress

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/andybalholm/brotli"
	"github.com/coder/websocket"
	"github.com/klauspost/compress/zstd"

	"github.com/doze-run/doze/testkit"
)

// echoing returns a sandbox whose requests to a.web.test get a secret. The server calls
// serve with it.
func echoing(t *testing.T, serve func(w http.ResponseWriter, r *http.Request, secret string)) *box {
	t.Helper()
	b := newRig(t).box("k3f9x2m7q1az")
	b.push("bearer", bearer(1))
	b.secret("api", token, "a.web.test")
	b.rules(through("a.web.test", "bearer", "api"))
	b.servers.handle(func(w http.ResponseWriter, r *http.Request) {
		serve(w, r, strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "))
	})
	return b
}

// speaks returns b with a client of one version of HTTP.
func (b *box) speaks(major int) *box {
	either := b.Client.Transport.(*http.Transport)
	transport := &http.Transport{
		DialContext: either.DialContext, TLSClientConfig: &tls.Config{RootCAs: either.TLSClientConfig.RootCAs},
		Protocols: new(http.Protocols), DisableCompression: true,
	}
	transport.Protocols.SetHTTP1(major == 1)
	transport.Protocols.SetHTTP2(major == 2)
	b.t.Cleanup(transport.CloseIdleConnections)
	one := *b
	one.Client = &http.Client{Transport: transport, Timeout: testkit.Patience}
	return &one
}

// codings holds the writer constructor of each content coding.
var codings = map[string]func(io.Writer) io.WriteCloser{
	"":        func(w io.Writer) io.WriteCloser { return whole{w} },
	"gzip":    func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
	"deflate": func(w io.Writer) io.WriteCloser { return zlib.NewWriter(w) },
	"br":      func(w io.Writer) io.WriteCloser { return brotli.NewWriter(w) },
	"zstd":    func(w io.Writer) io.WriteCloser { z, _ := zstd.NewWriter(w); return z },
}

type whole struct{ io.Writer }

func (whole) Close() error { return nil }

// hidden reports whether got, the scrubbed form of a token cut at offset at, shows none of
// the token except a prefix before the cut that is too short to be held back: see package
// scrub.
func hidden(got string, at int) bool {
	shown := strings.TrimRight(got, "*")
	return len(got) == len(token) && len(shown) <= min(at, 3) && strings.HasPrefix(token, shown)
}

// The server sends the secret in two chunks or DATA frames, cut at each offset in turn. With
// a content coding, the compressed bytes are cut.
func TestSecretsSplitOverChunksAndFramesAreRemoved(t *testing.T) {
	b := echoing(t, func(w http.ResponseWriter, r *http.Request, secret string) {
		coding, cut, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
		at, _ := strconv.Atoi(cut)
		var body bytes.Buffer
		c := codings[coding](&body)
		_, _ = io.WriteString(c, secret)
		_ = c.Close()
		if coding != "" {
			w.Header().Set("Content-Encoding", coding)
		}
		text := body.Bytes()
		at = min(at, len(text))
		_, _ = w.Write(text[:at])
		_ = http.NewResponseController(w).Flush()
		_, _ = w.Write(text[at:])
	})
	for major := 1; major <= 2; major++ {
		client := b.speaks(major)
		for coding := range codings {
			for at := 1; at < len(token); at++ {
				a := client.get("https://a.web.test/" + coding + "/" + strconv.Itoa(at))
				if !hidden(a.body, at) {
					t.Errorf("HTTP/%d, %q, cut at %d: %q", major, coding, at, a.body)
				}
			}
		}
	}
	b.none(token)
}

func TestSecretsInTrailersAreRemoved(t *testing.T) {
	b := echoing(t, func(w http.ResponseWriter, _ *http.Request, secret string) {
		w.Header().Set("Trailer", "X-Announced")
		_, _ = io.WriteString(w, "body")
		w.Header().Set("X-Announced", secret)
		w.Header().Set(http.TrailerPrefix+"X-Other", "in hexadecimal: "+hex.EncodeToString([]byte(secret)))
	})
	for major := 1; major <= 2; major++ {
		res, err := b.speaks(major).Client.Do(newRequest(t, "GET", "https://a.web.test/", nil))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || string(body) != "body" {
			t.Fatalf("HTTP/%d: %q, %v", major, body, err)
		}
		if got := res.Trailer.Get("X-Announced"); got != strings.Repeat("*", len(token)) {
			t.Errorf("HTTP/%d: %q", major, got)
		}
		if got := res.Trailer.Get("X-Other"); got != "in hexadecimal: "+strings.Repeat("*", 2*len(token)) {
			t.Errorf("HTTP/%d: %q", major, got)
		}
	}
	b.none(token)
}

func TestSecretsSplitOverWebSocketFramesAreRemoved(t *testing.T) {
	b := echoing(t, func(w http.ResponseWriter, r *http.Request, secret string) {
		conn, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.CloseNow()
		for at := range secret { // each message in two DATA frames
			m, err := conn.Writer(r.Context(), websocket.MessageText)
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = io.WriteString(m, secret[:at])
			_, _ = io.WriteString(m, secret[at:])
			_ = m.Close()
		}
		_ = conn.Close(websocket.StatusNormalClosure, "bye "+secret)
	})
	conn, _, err := websocket.Dial(testkit.Context(t), "wss://a.web.test/", &websocket.DialOptions{HTTPClient: b.speaks(1).Client})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.CloseNow()
	for at := range token {
		_, got, err := conn.Read(testkit.Context(t))
		if err != nil {
			t.Fatal(err)
		}
		if !hidden(string(got), at) {
			t.Errorf("cut at %d: %q", at, got)
		}
	}
	_, _, err = conn.Read(testkit.Context(t))
	var last websocket.CloseError
	if !errors.As(err, &last) || last.Reason != "bye "+strings.Repeat("*", len(token)) {
		t.Errorf("its last was %v", err)
	}
	b.none(token)
}
