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

// streams are what clients say, how many of their requests have a certain end, and
// whether the next one has two.
var streams = map[string]struct {
	sent    string
	certain int64
	twoEnds bool
}{
	"nothing":                  {"", 0, false},
	"no body":                  {"GET / HTTP/1.1\r\n" + host + "\r\n", 1, false},
	"a length":                 {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\n\r\nabc", 1, false},
	"chunks":                   {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 1, false},
	"CL and TE":                {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0, true},
	"TE and CL":                {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 0, true},
	"in any case":              {"POST / HTTP/1.1\r\n" + host + "tRANSFER-eNCODING: Chunked\r\ncONTENT-lENGTH: 3\r\n\r\n0\r\n\r\n", 0, true},
	"line feeds":               {"POST / HTTP/1.1\n" + "Host: a\nContent-Length: 3\nTransfer-Encoding: chunked\n\n0\r\n\r\n", 0, true},
	"the length twice":         {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc" + both, 1, true},
	"the length on a new line": {"POST / HTTP/1.1\r\n" + host + "Content-Length:\r\n 3\r\n\r\nabc" + both, 1, true},
	"a field on a new line":    {"POST / HTTP/1.1\r\n" + host + "X: y\r\n Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc" + both, 1, true},
	"chunks of HTTP/1.0":       {"POST / HTTP/1.0\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0, true},
	"after none":               {"GET / HTTP/1.1\r\n" + host + "\r\n" + both, 1, true},
	"after line breaks":        {"POST / HTTP/1.1\r\n" + host + "Content-Length: 0\r\n\r\n\r\n\r\n" + both, 1, true},
	"after a length":           {"POST / HTTP/1.1\r\n" + host + "Content-Length: 3\r\n\r\nabc" + both, 1, true},
	"after a length of zeros":  {"POST / HTTP/1.1\r\n" + host + "Content-Length: 0003\r\n\r\nabc" + both, 1, true},
	"in a body":                {"POST / HTTP/1.1\r\n" + host + "Content-Length: 89\r\n\r\n" + both, 1, false},
	"in a chunk":               {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n59\r\n" + both + "\r\n0\r\n\r\n", 1, false},
	"after a chunk":            {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n059;x=\"y\" \r\n" + both + "\r\n0\r\n\r\n" + both, 1, true},
	"after trailers":           {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\nTrailer: X\r\n\r\n1\r\na\r\n0\r\nX: Content-Length: 3\r\n\r\n" + both, 1, true},
	"a trailer of that name":   {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nContent-Length: 3\r\n\r\n" + both, 1, true},
	"a header of 20 KiB":       {"POST / HTTP/1.1\r\n" + host + "X: " + strings.Repeat("x", 20<<10) + "\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0, true},
	"of names alike":           {"POST / HTTP/1.1\r\n" + host + "X-Transfer-Encoding: chunked\r\nContent-Lengths: 3\r\nContent-Length: 3\r\n\r\nabc", 1, false},
	"HTTP/2":                   {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + both, 1, false},
	"a preface with a field":   {"PRI * HTTP/2.0\r\n" + host + "\r\n" + both, 1, true},
	"a bad chunk":              {chunked + "-1\r\n" + both, 1, false},
	"a chunk after line feed":  {chunked + "1\r\na\r\n5\n" + both, 1, false},
	"a chunk that is too long": {chunked + "3\r\nabcd\n" + both, 1, false},
	"a chunk with a space":     {chunked + "5 ;x\r\n" + both, 1, false},
	"a chunk of 17 digits":     {chunked + "00000000000000000\r\n\r\n" + both, 1, false},
	"more beside than data":    {chunked + strings.Repeat("1;"+strings.Repeat("x", 1<<10)+"\r\na\r\n", 17) + "0\r\n\r\n" + both, 1, false},
	"a line of 4 KiB":          {chunked + "0;" + strings.Repeat("x", 4<<10-2-len("\r\n")) + "\r\n\r\n" + both, 1, true},
	"a longer line":            {chunked + "0;" + strings.Repeat("x", 4<<10-1-len("\r\n")) + "\r\n\r\n" + both, 1, false},
	"a bad trailer":            {chunked + "0\r\nno trailer\r\n\r\n" + both, 1, false},
	"trailers of 4 KiB":        {chunked + "0\r\nX: " + strings.Repeat("x", 4<<10-3-len("\r\n\r\n")) + "\r\n\r\n" + both, 1, true},
	"longer trailers":          {chunked + "0\r\nX: " + strings.Repeat("x", 4<<10-2-len("\r\n\r\n")) + "\r\n\r\n" + both, 1, false},
}

// chunked is a request whose body comes in chunks.
const chunked = "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n\r\n"

// both is a request with two lengths, of 89 (0x59) bytes.
const both = "POST /2 HTTP/1.1\r\n" + host + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + "0\r\n\r\n"

func scanned(sent []byte, piece int) (certain int64, twoEnds bool) {
	var s Scanner
	for len(sent) > 0 {
		n := min(piece, len(sent))
		s.Scan(sent[:n])
		sent = sent[n:]
	}
	return s.Certain(), s.TwoEnds()
}

func TestOnlyRequestsWithOneEndAreCertain(t *testing.T) {
	for name, c := range streams {
		for _, piece := range []int{1, 2, 3, 7, 64, 4096, 1 << 20} {
			if certain, twoEnds := scanned([]byte(c.sent), piece); certain != c.certain || twoEnds != c.twoEnds {
				t.Errorf("%s, in pieces of %d: %d, %v, want %d, %v", name, piece, certain, twoEnds, c.certain, c.twoEnds)
			}
		}
		if name == "HTTP/2" {
			continue // a server of that takes it
		}
		if certain, how := read([]byte(c.sent)); certain != c.certain || how == twoEnds != c.twoEnds {
			t.Errorf("%s: net/http reads %d, want %d; %v", name, certain, c.certain, how)
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
	if s.Scan([]byte(both)); s.line != nil || s.Certain() != 0 || s.TwoEnds() {
		t.Errorf("after its end it has %d and keeps %q", s.Certain(), s.line)
	}
	s = Scanner{}
	s.Scan([]byte(chunked + "0\r\nX: " + strings.Repeat("x", 8<<10)))
	if s.Scan([]byte("\r\n")); s.chunks.trailers != nil {
		t.Errorf("%d bytes of trailers are kept", len(s.chunks.trailers))
	}
}

var (
	hasCoding = regexp.MustCompile(`(?im)^transfer-encoding:`)
	hasLength = regexp.MustCompile(`(?im)^content-length:`)
)

// ending is why no more requests of a connection are certain.
type ending int

const (
	refused ending = iota // or there are no more
	twoEnds
	broken // the body of the last
)

// read says how many requests are certain, by another way: net/http's own, which tells
// where a header begins and ends, and which bodies are broken.
func read(sent []byte) (certain int64, how ending) {
	src := bytes.NewReader(sent)
	b := bufio.NewReader(src)
	at := func() int { return len(sent) - src.Len() - b.Buffered() }
	for last := ""; ; {
		if last == http.MethodPost { // as its server does
			start, _ := b.Peek(4)
			b.Discard(len(start) - len(bytes.TrimLeft(start, "\r\n")))
		}
		from := at()
		r, err := http.ReadRequest(b)
		if err != nil || r.ProtoMajor != 1 && r.Method != "PRI" {
			return certain, refused
		}
		header := sent[from:at()]
		if hasCoding.Match(header) && (hasLength.Match(header) || r.ProtoMinor == 0 && r.ProtoMajor == 1) {
			return certain, twoEnds
		}
		certain++
		if r.Method == "PRI" && r.ProtoMajor == 2 && bytes.Count(bytes.TrimLeft(header, "\r\n"), []byte{'\n'}) == 2 {
			return certain, broken // or HTTP/2
		}
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return certain, broken
		}
		// net/http takes a line feed for the end of trailers, if it finds a better one later.
		if r.TransferEncoding != nil && !bytes.HasSuffix(sent[:at()], []byte("\r\n\r\n")) {
			return certain, broken
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
		want, how := read(sent)
		got, two := scanned(sent, piece)
		switch {
		case how == refused && got < want || how != refused && got != want:
			t.Errorf("%q in pieces of %d: %d, net/http reads %d", sent, piece, got, want)
		case how == twoEnds && !two, how == broken && two:
			t.Errorf("%q in pieces of %d: two ends %v, net/http's reason is %d", sent, piece, two, how)
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
