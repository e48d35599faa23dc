package scrub

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"testing/iotest"
)

// token has what some encodings escape, and bytes over 127.
const token = `gh/+p "tök&en\<42>%7Ez!` + "\t."

// forms are the encodings that are found: what other programs make of a value.
var forms = map[string]func(value string) string{
	"raw":                func(v string) string { return v },
	"base64":             func(v string) string { return base64.StdEncoding.EncodeToString([]byte(v)) },
	"base64 after 1":     func(v string) string { return base64.StdEncoding.EncodeToString([]byte("x" + v)) },
	"base64 after 2":     func(v string) string { return base64.StdEncoding.EncodeToString([]byte("me" + v)) },
	"base64 before 1":    func(v string) string { return base64.StdEncoding.EncodeToString([]byte("ser:" + v + "\n")) },
	"base64url":          func(v string) string { return base64.URLEncoding.EncodeToString([]byte(v)) },
	"base64url, bare":    func(v string) string { return base64.RawURLEncoding.EncodeToString([]byte("?" + v)) },
	"base64 in a URL":    func(v string) string { return url.QueryEscape(base64.StdEncoding.EncodeToString([]byte(v))) },
	"base64, JSON":       func(v string) string { return strings.ReplaceAll(forms64(v), "/", `\/`) },
	"base64, MIME":       func(v string) string { return broken(forms64(strings.Repeat("lead", 12)+v), 76, "\r\n") },
	"base64, PEM":        func(v string) string { return broken(forms64(strings.Repeat("lead", 10)+v), 64, "\n") },
	"base64, JSON lines": func(v string) string { return broken(forms64(strings.Repeat("lead", 10)+v), 60, `\n`) },
	"base64, CRLF JSON":  func(v string) string { return broken(forms64(strings.Repeat("lead", 10)+v), 60, `\r\n`) },
	"hex":                func(v string) string { return hex.EncodeToString([]byte(v)) },
	"HEX":                func(v string) string { return strings.ToUpper(hex.EncodeToString([]byte(v))) },
	"path":               url.PathEscape,
	"query":              url.QueryEscape,
	"query, lower case":  func(v string) string { return lowerEscapes(url.QueryEscape(v)) },
	"every byte, %xx":    func(v string) string { return each(v, "%%%02x") },
	"every byte, %XX":    func(v string) string { return each(v, "%%%02X") },
	"JSON":               func(v string) string { return quoted(json.Marshal(v)) },
	"JSON, slashes":      func(v string) string { return strings.ReplaceAll(quoted(json.Marshal(v)), "/", `\/`) },
	"every rune, \\u":    func(v string) string { return eachRune(v, `\u%04x`) },
	"every rune, \\U":    func(v string) string { return eachRune(v, `\u%04X`) },
	"every byte, \\x":    func(v string) string { return each(v, `\x%02x`) },
	"HTML":               html.EscapeString,
	"every rune, &#":     func(v string) string { return eachRune(v, `&#%d;`) },
	"every rune, &#x":    func(v string) string { return eachRune(v, `&#x%X;`) },
}

func forms64(v string) string { return base64.StdEncoding.EncodeToString([]byte(v)) }

func quoted(b []byte, err error) string {
	if err != nil {
		panic(err)
	}
	return string(b[1 : len(b)-1])
}

func broken(s string, at int, by string) string {
	var b strings.Builder
	for len(s) > at {
		b.WriteString(s[:at] + by)
		s = s[at:]
	}
	return b.String() + s
}

func each(s, format string) string {
	var b strings.Builder
	for i := range len(s) {
		fmt.Fprintf(&b, format, s[i])
	}
	return b.String()
}

func eachRune(s, format string) string {
	var b strings.Builder
	for _, r := range s {
		fmt.Fprintf(&b, format, r)
	}
	return b.String()
}

func lowerEscapes(s string) string {
	b := []byte(s)
	for i := range b {
		if b[i] == '%' {
			copy(b[i:i+3], bytes.ToLower(b[i:i+3]))
		}
	}
	return string(b)
}

func values(v ...string) (b [][]byte) {
	for _, s := range v {
		b = append(b, []byte(s))
	}
	return b
}

func read(t testing.TB, r io.Reader) string {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// pieces returns a reader of text in pieces of these sizes, again and again.
func inPieces(text string, sizes ...int) io.Reader {
	var readers []io.Reader
	for i := 0; len(text) > 0; i++ {
		n := min(max(sizes[i%len(sizes)], 1), len(text))
		readers = append(readers, strings.NewReader(text[:n]))
		text = text[n:]
	}
	return io.MultiReader(readers...)
}

func TestEveryEncodingIsFound(t *testing.T) {
	for _, value := range []string{token, "ghp_0123456789abcdefghijklmnopqrstuvwxyz", "eightchr", strings.Repeat("long and longer ", 100) + "end", "pass word 1234"} {
		s := New(values(value, "another-secret"))
		for name, encode := range forms {
			encoded := encode(value)
			text := "before: " + encoded + " :after"
			got := s.Text(text)
			if len(got) != len(text) || !strings.HasPrefix(got, "before: ") || !strings.HasSuffix(got, " :after") {
				t.Errorf("%s: %q", name, got)
			}
			got = got[len("before: ") : len(got)-len(" :after")]
			if strings.HasPrefix(name, "base64") {
				// Characters that hold bits of neighbors may be left.
				if n := strings.Count(got, "*"); n < (8*len(value)-4)/6 {
					t.Errorf("%s of %q: %q of %q", name, value, got, encoded)
				}
			} else if strings.Trim(got, "*") != "" {
				t.Errorf("%s of %q: %q of %q", name, value, got, encoded)
			}
		}
	}
}

func TestTextWithoutOccurrencesStays(t *testing.T) {
	s := New(values(token, "ghp_0123456789abcdefghijklmnopqrstuvwxyz", "%41%42%43%44", `\\\\\\\\x`))
	for _, text := range []string{
		"", "x", "ghp_", "ghp_0123456789abcdefghijklmnopqrstuvwxy", "ghp_0123456789abcdefghijklmnopqrstuvwxyZ",
		strings.Repeat("ghp_0123456789", 1000), `\u`, `\ud83d`, `\ud83d\u`, "%", "%4", "&#", "&am", "&#x1234567890;", "a\r", "\n\n\n",
		"ABCD", `\\\\\\\\\\\\\\`, strings.Repeat("%", 100), strings.Repeat("\n\r", 100), strings.Repeat(`\u00`, 100),
	} {
		if got := s.Text(text); got != text {
			t.Errorf("%q became %q", text, got)
		}
		if got := read(t, s.Body(iotest.OneByteReader(strings.NewReader(text)))); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
}

func TestFirstEscapesAreFoundAnywhere(t *testing.T) {
	runes := []rune("abcdefghijé-and-more")
	s := New(values(string(runes)))
	for at := range runes {
		for lead := range 9 {
			text := strings.Repeat("-", lead) + string(runes[:at]) + eachRune(string(runes[at:]), "&#%d;")
			if got, want := s.Text(text), strings.Repeat("-", lead)+strings.Repeat("*", len(text)-lead); got != want {
				t.Errorf("%q became %q", text, got)
			}
		}
	}
}

func TestLineBreaksAreFoundAnywhere(t *testing.T) {
	const value = "secret-token-42"
	s := New(values(value))
	encoded := forms64(value)
	for _, by := range []string{"\n", "\r\n", `\n`, `\r\n`} {
		for at := 1; at < len(encoded); at++ {
			text := encoded[:at] + by + encoded[at:] + "-"
			want := strings.Repeat("*", len(text)-1) + "-"
			if got := s.Text(text); got != want {
				t.Errorf("%q became %q", text, got)
			}
			// Cut within the break, and at its end.
			for cut := 1; cut <= len(by); cut++ {
				got := read(t, s.Body(inPieces(text, at+cut, len(text))))
				out := 0 // of its characters, and the break
				if at < minHeld {
					out = at + cut
				}
				if got[out:] != want[out:] {
					t.Errorf("%q, cut after %d, became %q", text, at+cut, got)
				}
			}
		}
		text := encoded[:8] + by + by + encoded[8:]
		if got := s.Text(text); got != text {
			t.Errorf("with an empty line between, %q became %q", text, got)
		}
	}
}

func TestOverlappingOccurrencesAreReplacedWhole(t *testing.T) {
	s := New(values("abcdefgh", "efghijkl", "cdefgh", "user:abcdefgh", "aaaaaaaa"))
	for text, want := range map[string]string{
		"<abcdefghijkl>":       "<************>",
		"<user:abcdefghi>":     "<*************i>",
		"<aaaaaaaaaaaaaaaaab>": "<*****************b>",
		"<aaaaaaa>":            "<aaaaaaa>",
		"abcdefghabcdefgh":     "****************",
	} {
		if got := s.Text(text); got != want {
			t.Errorf("%s became %s, want %s", text, got, want)
		}
	}
}

func TestLongValuesAreFoundByTheirBeginning(t *testing.T) {
	value := make([]byte, 4000)
	for i := range value {
		value[i] = byte('a' + rand.IntN(26))
	}
	s := New([][]byte{value})
	for name, c := range map[string]struct {
		text string
		left string
	}{
		"whole":          {string(value) + "rest", "rest"},
		"cut off":        {string(value[:1000]) + "\n1rest", "\n1rest"},
		"too little":     {string(value[:255]) + "\n1rest", string(value[:255]) + "\n1rest"},
		"twice":          {string(value) + string(value) + string(value[:300]), ""},
		"within itself":  {string(value[:300]) + string(value) + ".", "."},
		"every byte, %":  {each(string(value), "%%%02x") + "%", "%"},
		"hex, then part": {hex.EncodeToString(value) + string(value[:100]), string(value[:100])},
	} {
		t.Run(name, func(t *testing.T) {
			want := strings.Repeat("*", len(c.text)-len(c.left)) + c.left
			if got := s.Text(c.text); got != want {
				t.Errorf("in one piece: %q", got)
			}
			for _, size := range []int{48, 100, 257, 4096} {
				if got := read(t, s.Body(inPieces(c.text, size))); got != want {
					t.Errorf("in pieces of %d: %q", size, got)
				}
			}
		})
	}
}

func TestWhiteSpaceAroundValuesIsIgnored(t *testing.T) {
	s := New(values("token-in-a-file\n"))
	if got := s.Text(`{"echo":"token-in-a-file"}`); got != `{"echo":"***************"}` {
		t.Error(got)
	}
}

func TestShortValuesAreIgnored(t *testing.T) {
	if s := New(values("abc", "", " \n")); s != nil {
		t.Error("a Scrubber of nothing")
	}
	s := New(values("abc", "abcd"))
	if got := s.Text("abc abcd xabcdx abc"); got != "abc **** x****x abc" {
		t.Error(got)
	}
	if got := read(t, s.Body(iotest.OneByteReader(strings.NewReader("abc abcd xabcdx "+forms64("abcd"))))); got != "abc abc* xabc*x YWJ**A==" {
		t.Error(got)
	}
}

func TestNoValuesChangeNothing(t *testing.T) {
	s := New(nil)
	r := strings.NewReader("body")
	h := http.Header{"A": {"b"}}
	s.Header(h)
	if s != nil || s.Body(r) != r || s.Text("text") != "text" || h.Get("A") != "b" {
		t.Error("something changed")
	}
}

func TestHeadersAreScrubbed(t *testing.T) {
	s := New(values("ghp_abcdefghijkl", "pass word 1"))
	h := http.Header{
		"X-Echo":                     {"none", "Bearer ghp_abcdefghijkl"},
		"Location":                   {"https://api.example/?k=ghp%5Fabcdefghijkl&p=pass+word+1"},
		"Date":                       {"today"},
		"X-Ghp_abcdefghijkl":         {"1"},
		"Www-Authenticate":           {"Basic " + forms64("me:ghp_abcdefghijkl")},
		"X-6768705f6162636465666768": {"kept: not all of it"},
		http.CanonicalHeaderKey("x-" + hex.EncodeToString([]byte("ghp_abcdefghijkl"))): {"removed"},
	}
	s.Header(h)
	if len(h) != 5 {
		t.Errorf("left are %v", h)
	}
	for name, want := range map[string]string{
		"X-Echo": "none,Bearer ****************", "Date": "today",
		"Location":         "https://api.example/?k=******************&p=***********",
		"Www-Authenticate": "Basic bWU6Z" + strings.Repeat("*", 20) + "w=",
	} {
		if got := strings.Join(h[name], ","); name == "Www-Authenticate" && !strings.HasPrefix(got, "Basic bWU6") || name != "Www-Authenticate" && got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	if strings.Count(h.Get("Www-Authenticate"), "*") < 20 {
		t.Error(h.Get("Www-Authenticate"))
	}
}

// Bytes that do not begin an occurrence are passed on immediately: the peer may wait for
// them before it sends more.
func TestOtherBytesAreNotHeldBack(t *testing.T) {
	s := New(values("secret-token-42", "event-key-1234567", "\"quoted\""))
	encoded := forms64("secret-token-42")
	turns := []struct{ sent, want string }{
		{"data: {\"x\":1}\n\n", "data: {\"x\":1}\n\n"},
		{"done", "done"},
		{"ends like a sec", "ends like a sec"}, // three characters go out,
		{"ret-token-42!", "************!"},     // and the rest is replaced
		{"the secret", "the "},                 // more are held back,
		{"ary", "secretary"},                   // and go out when it is another word
		{" %73%65%63", " %73%65%63"},           // the same escaped
		{"%72et-token-4", ""},
		{"2 ", strings.Repeat("*", len("%72et-token-42")) + " "},
		{"linec\n", "linec\n"}, // no line break in base64
		{encoded[:8], ""},
		{"\r\n", ""}, // but this may be one
		{encoded[8:], strings.Repeat("*", len(encoded)+2)},
		{"\\u00", "\\u00"},
		{"secret-token-42", "***************"},
	}
	got, turn := "", 0
	body := s.Body(readerFunc(func(p []byte) (int, error) { // is called when nothing more comes out
		if turn > 0 && got != turns[turn-1].want {
			t.Errorf("after %q came %q, want %q", turns[turn-1].sent, got, turns[turn-1].want)
		}
		if got = ""; turn == len(turns) {
			return 0, io.EOF
		}
		turn++
		return copy(p, turns[turn-1].sent), nil
	}))
	for p := make([]byte, 1<<10); ; {
		n, err := body.Read(p)
		if got += string(p[:n]); err != nil {
			break
		}
	}
	if got != "" {
		t.Errorf("at the end came %q", got)
	}
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestErrorsOfTheUpstreamArriveAfterItsBytes(t *testing.T) {
	s := New(values("secret-token-42"))
	broken := errors.New("broken")
	got, err := io.ReadAll(s.Body(io.MultiReader(strings.NewReader("secret-token-42 secret-tok"), iotest.ErrReader(broken))))
	if string(got) != "*************** secret-tok" || !errors.Is(err, broken) {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := io.ReadAll(s.Body(idle{})); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("a reader of nothing: %v", err)
	}
	if err := iotest.TestReader(s.Body(strings.NewReader("plain text")), []byte("plain text")); err != nil {
		t.Error(err)
	}
}

type idle struct{}

func (idle) Read([]byte) (int, error) { return 0, nil }

func TestHeldBackBytesAreBounded(t *testing.T) {
	long := strings.Repeat("a", 1000)
	for name, text := range map[string]string{
		"plain": long, "percent": each(long, "%%%02x"), "entities": each(long, "&#x%07x;"),
		"backslash": each(long, `\u%04x`), "broken": broken(each(long, `\u%04x`), 6, `\r\n`), "surrogates": strings.Repeat(`\ud83d\ude00`, 500),
	} {
		t.Run(name, func(t *testing.T) {
			value := long
			if name == "surrogates" {
				value = strings.Repeat("😀", 250)
			}
			s := New(values(value))
			b := s.Body(inPieces("x"+text, 1, 5, 700)).(*body)
			p := make([]byte, 1)
			most := 0
			for {
				_, err := b.Read(p)
				most = max(most, len(b.pending), cap(b.x.spans), cap(b.x.tails))
				if err != nil {
					break
				}
			}
			if most > maxPending {
				t.Errorf("%d bytes were held back", most)
			}
		})
	}
}
