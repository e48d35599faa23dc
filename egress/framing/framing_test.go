package framing

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
)

const host = "Host: a.example\r\n"

// streams are what clients say, and which of their requests is ambiguous.
var streams = map[string]struct {
	sent string
	want int64
}{
	"nothing":                  {"", 0},
	"no body":                  {"GET / HTTP/1.1\r\n" + host + "\r\n", 0},
	"a length":                 {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\n\r\nabc", 0},
	"chunks":                   {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 0},
	"CL and TE":                {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 1},
	"TE and CL":                {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 1},
	"in any case":              {"POST / HTTP/1.1\r\n" + host + "tRANSFER-eNCODING: Chunked\r\ncONTENT-lENGTH: 3\r\n\r\n0\r\n\r\n", 1},
	"line feeds":               {"POST / HTTP/1.1\n" + "Host: a\nContent-Length: 3\nTransfer-Encoding: chunked\n\n0\r\n\r\n", 1},
	"the length twice":         {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc" + both, 2},
	"the length on a new line": {"POST / HTTP/1.1\r\n" + host + "Content-Length:\r\n 3\r\n\r\nabc" + both, 2},
	"a field on a new line":    {"POST / HTTP/1.1\r\n" + host + "X: y\r\n Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc" + both, 2},
	"chunks of HTTP/1.0":       {"POST / HTTP/1.0\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 1},
	"after none":               {"GET / HTTP/1.1\r\n" + host + "\r\n" + both, 2},
	"after line breaks":        {"POST / HTTP/1.1\r\n" + host + "Content-Length: 0\r\n\r\n\r\n\r\n" + both, 2},
	"after a length":           {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\n\r\nabc" + both, 2},
	"after a length of zeros":  {"POST / HTTP/1.1\r\n" + host + "Content-Length: 0003\r\n\r\nabc" + both, 2},
	"in a body":                {"POST / HTTP/1.1\r\n" + host + "Content-Length: 89\r\n\r\n" + both, 0},
	"in a chunk":               {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n59\r\n" + both + "\r\n0\r\n\r\n", 0},
	"after a chunk":            {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n059;x=\"y\" \r\n" + both + "\r\n0\r\n\r\n" + both, 2},
	"after trailers":           {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nTrailer: X\r\n\r\n1\r\na\r\n0\r\nX: Content-Length: 3\r\n\r\n" + both, 2},
	"a trailer of that name":   {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nContent-Length: 3\r\n\r\n" + both, 2},
	"a header of 20 KiB":       {"POST / HTTP/1.1\r\n" + host + "X: " + strings.Repeat("x", 20<<10) + "\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 1},
	"of names alike":           {"POST / HTTP/1.1\r\n" + host + "X-Transfer-Encoding: chunked\r\nContent-Lengths: 3\r\nContent-Length: 3\r\n\r\nabc", 0},
	"HTTP/2":                   {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + both, 0},
}

// both is a request with two lengths, of 89 (0x59) bytes.
const both = "POST /2 HTTP/1.1\r\n" + host + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + "0\r\n\r\n"

func scanned(sent []byte, piece int) int64 {
	var s Scanner
	for len(sent) > 0 {
		n := min(piece, len(sent))
		s.Scan(sent[:n])
		sent = sent[n:]
	}
	return s.Ambiguous()
}

func TestAmbiguousRequestsAreFound(t *testing.T) {
	for name, c := range streams {
		for _, piece := range []int{1, 2, 3, 7, 64, 4096, 1 << 20} {
			if got := scanned([]byte(c.sent), piece); got != c.want {
				t.Errorf("%s, in pieces of %d: %d, want %d", name, piece, got, c.want)
			}
		}
		if c.sent[:min(3, len(c.sent))] == "PRI" {
			continue // a server of HTTP/2 takes it
		}
		if want, _ := read([]byte(c.sent)); c.want != want {
			t.Errorf("%s: net/http reads %d, want %d", name, want, c.want)
		}
	}
}

func TestWhatIsNoHTTPIsNotKept(t *testing.T) {
	var s Scanner
	for range 1 << 10 {
		s.Scan(make([]byte, 1<<10))
	}
	if s.state != lost || s.line != nil {
		t.Errorf("after a line of 1 MiB %d bytes are kept", len(s.line))
	}
	s = Scanner{}
	s.Scan([]byte("GET / HTTP/1.1\r\nX: half"))
	s.Stop()
	if s.Scan([]byte(both)); s.line != nil || s.Ambiguous() != 0 {
		t.Errorf("after its end it has %d and keeps %q", s.Ambiguous(), s.line)
	}
}

var (
	hasCoding = regexp.MustCompile(`(?im)^transfer-encoding:`)
	hasLength = regexp.MustCompile(`(?im)^content-length:`)
)

// read says which request is ambiguous, by another way: net/http's own, which tells
// where a header begins and ends. All requests up to served are read to their end.
func read(sent []byte) (which, served int64) {
	src := bytes.NewReader(sent)
	b := bufio.NewReader(src)
	at := func() int { return len(sent) - src.Len() - b.Buffered() }
	for last := ""; ; served++ {
		if last == http.MethodPost { // as its server does
			start, _ := b.Peek(4)
			b.Discard(len(start) - len(bytes.TrimLeft(start, "\r\n")))
		}
		from := at()
		r, err := http.ReadRequest(b)
		if err != nil || r.ProtoMajor != 1 {
			return 0, served
		}
		header := sent[from:at()]
		if hasCoding.Match(header) && (hasLength.Match(header) || r.ProtoMinor == 0) {
			return served + 1, served
		}
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return 0, served + 1
		}
		last = r.Method
	}
}

func FuzzScan(f *testing.F) {
	for _, c := range streams {
		f.Add([]byte(c.sent), 5)
	}
	f.Fuzz(func(t *testing.T, sent []byte, piece int) {
		if piece < 1 {
			piece = 1
		}
		want, served := read(sent)
		// What a server has refused needs not be right: nothing comes after it.
		if got := scanned(sent, piece); got != want && (want != 0 || got <= served) {
			t.Errorf("%q in pieces of %d: %d, net/http reads %d of %d", sent, piece, got, want, served)
		}
	})
}

func BenchmarkScan(b *testing.B) {
	request := []byte("GET /user HTTP/1.1\r\nHost: api.example.com\r\nUser-Agent: curl/7.88.1\r\nAccept: */*\r\nAuthorization: Bearer doze-placeholder-1234567890\r\n\r\n")
	var s Scanner
	b.ReportAllocs()
	for b.Loop() {
		s.Scan(request)
	}
}
