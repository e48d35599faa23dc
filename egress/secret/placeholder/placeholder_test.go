package placeholder_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/doze-run/doze/egress/secret"
	"github.com/doze-run/doze/egress/secret/placeholder"
)

const (
	host  = "api.github.example"
	value = `ghp_s3cr3t+"/&`
)

var (
	key       = []byte("0123456789abcdef0123456789abcdef")
	github    = placeholder.Text(key, "k3f9x2m7q1az", "github-token")
	line      = placeholder.Text(key, "k3f9x2m7q1az", "line")
	elsewhere = placeholder.Text(key, "another", "github-token")
	errBound  = errors.New("is not bound to this host")
)

func testSet() *placeholder.Set {
	return setFor(host)
}

// setFor returns the set of a request to a host.
func setFor(to string) *placeholder.Set { return newSet(to, fits) }

func newSet(to string, hold func(bytes int64) bool) *placeholder.Set {
	return placeholder.NewSet([]placeholder.Offer{{secret.ID{Name: "github-token"}, github}, {secret.ID{Name: "line"}, line}}, func(id secret.ID) ([]byte, error) {
		switch {
		case to != host:
			return nil, errBound
		case id.Name == "line":
			return []byte("a line\r\nX-Injected: 1"), nil
		}
		return []byte(value), nil
	}, hold)
}

func fits(bytes int64) bool { return bytes <= placeholder.MaxBody }

func request(body io.Reader) *http.Request {
	return httptest.NewRequest(http.MethodPost, "/path?a=b", body)
}

func TestTextsAreOfOneSandboxAndSecret(t *testing.T) {
	if !regexp.MustCompile(`\Adoze-placeholder-github-token-[A-Za-z0-9_-]{22}\z`).MatchString(github) {
		t.Errorf("%s is not a placeholder", github)
	}
	if again := placeholder.Text(key, "k3f9x2m7q1az", "github-token"); again != github {
		t.Errorf("%s, and then %s", github, again)
	}
	seen := map[string]bool{}
	for _, text := range []string{github, elsewhere, placeholder.Text([]byte("another key"), "k3f9x2m7q1az", "github-token")} {
		end := text[len(text)-22:]
		if seen[end] {
			t.Errorf("%s is not the only one with its end", text)
		}
		seen[end] = true
	}
}

func TestPlaceholdersAreExchangedWhereTheyStand(t *testing.T) {
	r := request(nil)
	r.Header.Set("Authorization", "Bearer "+github)
	r.Header["X-Two"] = []string{"none", github + "," + elsewhere + "," + github}
	r.URL.RawQuery = "q=1&access_token=" + github
	r.RequestURI = "/path?" + r.URL.RawQuery
	x, err := testSet().Exchange(r)
	if err != nil {
		t.Fatal(err)
	}
	const escaped = "ghp_s3cr3t%2B%22%2F%26"
	for what, c := range map[string][2]string{
		"bearer": {r.Header.Get("Authorization"), "Bearer " + value},
		"twice":  {strings.Join(r.Header["X-Two"], " "), "none " + value + "," + elsewhere + "," + value},
		"query":  {r.URL.RawQuery, "q=1&access_token=" + escaped},
		"target": {r.RequestURI, "/path?q=1&access_token=" + escaped},
	} {
		if c[0] != c[1] {
			t.Errorf("%s: %q, want %q", what, c[0], c[1])
		}
	}
	if !slices.Equal(x.Used(), []secret.ID{{Name: "github-token"}}) || x.Refused() != nil {
		t.Error(x.Used(), x.Refused())
	}
}

func TestPlaceholdersInBasicAuthenticationAreExchanged(t *testing.T) {
	for name, c := range map[string][2]string{
		"password":     {"Basic " + base64.StdEncoding.EncodeToString([]byte("me:"+github)), "Basic " + base64.StdEncoding.EncodeToString([]byte("me:"+value))},
		"user":         {"basic  " + base64.RawStdEncoding.EncodeToString([]byte(github+":x-oauth-basic")), "basic " + base64.StdEncoding.EncodeToString([]byte(value+":x-oauth-basic"))},
		"another":      {"Basic bWU6cGFzcw==", "Basic bWU6cGFzcw=="},
		"not base64":   {"Basic ???", "Basic ???"},
		"not encoded":  {"Basic " + github, "Basic " + value},
		"other scheme": {"Digest x", "Digest x"},
		"empty":        {"", ""},
	} {
		r := request(nil)
		r.Header.Set("Authorization", c[0])
		if _, err := testSet().Exchange(r); err != nil || r.Header.Get("Authorization") != c[1] {
			t.Errorf("%s: %q, %v; want %q", name, r.Header.Get("Authorization"), err, c[1])
		}
	}
}

func TestOtherHostsRefusePlaceholders(t *testing.T) {
	body := func(s string) io.Reader { return strings.NewReader(s) }
	for name, r := range map[string]*http.Request{
		"header": request(nil), "basic": request(nil), "query": httptest.NewRequest("GET", "/?t="+github, nil),
		"path": httptest.NewRequest("GET", "/"+github, nil), "body": request(body("x" + github)),
	} {
		switch name {
		case "header":
			r.Header.Set("X-Token", github)
		case "basic":
			r.SetBasicAuth("me", github)
		}
		var refused *placeholder.RefusedError
		if _, err := setFor("evil.example").Exchange(r); !errors.As(err, &refused) || refused.Secret.Name != "github-token" || !strings.Contains(err.Error(), errBound.Error()) && name != "path" {
			t.Errorf("%s: %v", name, err)
		}
	}
	r := request(nil)
	r.Header.Set("X-Token", elsewhere)
	if x, err := setFor("evil.example").Exchange(r); x != nil || err != nil || r.Header.Get("X-Token") != elsewhere {
		t.Error("the placeholder of another sandbox is not text like any other:", x, err)
	}
}

func TestPlacesWithoutSecretsAreRefused(t *testing.T) {
	for name, r := range map[string]*http.Request{
		"line break in a header": request(nil),
		"line break in Basic":    request(nil),
		"path":                   httptest.NewRequest("GET", "/bot"+github+"/x", nil),
	} {
		switch name {
		case "line break in a header":
			r.Header.Set("X", line)
		case "line break in Basic":
			r.SetBasicAuth("me", line)
		}
		var refused *placeholder.RefusedError
		if _, err := testSet().Exchange(r); !errors.As(err, &refused) || strings.Contains(err.Error(), "Injected") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestShortBodiesGetTheirNewLength(t *testing.T) {
	quoted, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	for kind, want := range map[string]string{
		"":                                  value,
		"text/plain":                        value,
		"application/json; charset=utf-8":   string(quoted[1 : len(quoted)-1]),
		"application/vnd.x+json":            string(quoted[1 : len(quoted)-1]),
		"application/x-www-form-urlencoded": url.QueryEscape(value),
		"multipart/form-data; boundary=x":   value,
		"application/grpc":                  github,
		"application/grpc-web+proto":        github,
	} {
		t.Run(kind, func(t *testing.T) {
			sent := "before " + github + " and " + github + " after"
			want := strings.ReplaceAll(sent, github, want)
			for _, length := range []int64{int64(len(sent)), -1} {
				r := request(iotest.OneByteReader(strings.NewReader(sent)))
				if r.ContentLength = length; length < 0 {
					r.Body = io.NopCloser(inPieces(sent, 30))
				} else {
					r.Header.Set("Content-Length", fmt.Sprint(length))
				}
				r.Header.Set("Content-Type", kind)
				x, err := testSet().Exchange(r)
				if err != nil {
					t.Fatal(err)
				}
				if got, err := io.ReadAll(r.Body); err != nil || string(got) != want {
					t.Errorf("length %d: %q, %v; want %q", length, got, err, want)
				}
				if err := r.Body.Close(); err != nil {
					t.Error(err)
				}
				if names := x.Used(); strings.HasPrefix(kind, "application/grpc") != (len(names) == 0) {
					t.Errorf("length %d: names %v", length, names)
				}
				if length > 0 && (r.ContentLength != int64(len(want)) || r.Header.Get("Content-Length") != fmt.Sprint(len(want))) {
					t.Errorf("length %d, header %s, for %d bytes", r.ContentLength, r.Header.Get("Content-Length"), len(want))
				}
			}
		})
	}
	r := request(strings.NewReader(github))
	r.Header.Set("Content-Encoding", "gzip")
	if _, err := testSet().Exchange(r); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r.Body); err != nil || string(got) != github {
		t.Errorf("a compressed body became %q, %v", got, err)
	}
}

func TestIncompleteBodiesAreErrors(t *testing.T) {
	r := request(strings.NewReader("short"))
	r.ContentLength = 10
	if _, err := testSet().Exchange(r); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v", err)
	}
	broken := errors.New("broken")
	r = request(nil)
	r.Body, r.ContentLength = io.NopCloser(io.MultiReader(strings.NewReader("x doze-placeh"), iotest.ErrReader(broken))), -1
	if _, err := testSet().Exchange(r); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r.Body); string(got) != "x doze-placeh" || !errors.Is(err, broken) {
		t.Errorf("%q, %v", got, err)
	}
	r.Body = io.NopCloser(idle{})
	if _, err := testSet().Exchange(r); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(r.Body); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("a reader of nothing: %v", err)
	}
}

type idle struct{}

func (idle) Read([]byte) (int, error) { return 0, nil }

func TestLongBodies(t *testing.T) {
	filler := strings.Repeat("x", placeholder.MaxBody)
	for name, c := range map[string]struct {
		sent   string
		length bool
		host   string
		want   string
		err    string
	}{
		"declared length, none":  {filler + elsewhere, true, host, filler + elsewhere, ""},
		"declared length":        {filler + github, true, host, filler, "send it in a header"},
		"unknown length":         {github + filler + github, false, host, value + filler + value, ""},
		"unknown, to other host": {filler + github, false, "evil.example", filler, "not bound"},
	} {
		t.Run(name, func(t *testing.T) {
			r := request(nil)
			r.Body, r.ContentLength = io.NopCloser(strings.NewReader(c.sent)), -1
			if c.length {
				r.ContentLength = int64(len(c.sent))
			}
			x, err := setFor(c.host).Exchange(r)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(r.Body)
			if string(got) != c.want {
				t.Errorf("%d bytes, want %d", len(got), len(c.want))
			}
			var refused *placeholder.RefusedError
			if c.err == "" && (err != nil || x.Refused() != nil) || c.err != "" && (!errors.As(err, &refused) || !strings.Contains(err.Error(), c.err) || x.Refused() != err) {
				t.Errorf("got %v, and %v", err, x.Refused())
			}
			if c.length && r.ContentLength != int64(len(c.sent)) {
				t.Errorf("the length became %d", r.ContentLength)
			}
		})
	}
	r := request(strings.NewReader(strings.Repeat(github, placeholder.MaxBody/len(github))))
	long := placeholder.NewSet([]placeholder.Offer{{secret.ID{Name: "github-token"}, github}}, func(secret.ID) ([]byte, error) { return bytes.Repeat([]byte("v"), 64<<10), nil }, fits)
	var refused *placeholder.RefusedError
	if _, err := long.Exchange(r); !errors.As(err, &refused) {
		t.Errorf("a body of 600 MB was made: %v", err)
	}
	r = request(nil)
	for i := range 100 {
		r.Header[fmt.Sprint("X-", i)] = []string{github}
	}
	if _, err := long.Exchange(r); !errors.As(err, &refused) {
		t.Errorf("a header of 6 MB was made: %v", err)
	}
}

func TestBodiesBeyondTheMemoryLimitAreRefused(t *testing.T) {
	for sent, want := range map[string]string{"a body": "", "a body with " + github: "send fewer at a time"} {
		full := newSet(host, func(bytes int64) bool {
			if bytes != int64(len(sent)) {
				t.Errorf("hold was called for %d bytes, of a body of %d", bytes, len(sent))
			}
			return false
		})
		r := request(strings.NewReader(sent))
		if _, err := full.Exchange(r); err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r.Body)
		var refused *placeholder.RefusedError
		if r.ContentLength != int64(len(sent)) || want == "" && (err != nil || string(got) != sent) ||
			want != "" && (!errors.As(err, &refused) || !strings.Contains(refused.Reason, want) || string(got) != "a body with ") {
			t.Errorf("%q arrives as %q, %v", sent, got, err)
		}
	}
}

// Bytes that do not begin a placeholder are sent immediately: the client may wait for a
// response to them before it sends more.
func TestBodiesAreNotHeldBack(t *testing.T) {
	turns := []struct{ sent, want string }{
		{"a message", "a message"},
		{"ends with doz", "ends with doz"},
		{"e", "e"},
		{"x doze-place", "x "},
		{"bo", "doze-placebo"},
		{github, value},
		{github[:40], ""},
		{github[40:] + "!", value + "!"},
		{elsewhere[:45], elsewhere[:45]}, // by now it is none of ours
	}
	got, turn := "", 0
	r := request(nil)
	r.ContentLength = -1
	r.Body = io.NopCloser(readerFunc(func(p []byte) (int, error) { // is called when nothing more comes out
		if turn > 0 && got != turns[turn-1].want {
			t.Errorf("after %q came %q, want %q", turns[turn-1].sent, got, turns[turn-1].want)
		}
		if got = ""; turn == len(turns) {
			return 0, io.EOF
		}
		turn++
		return copy(p, turns[turn-1].sent), nil
	}))
	if _, err := testSet().Exchange(r); err != nil {
		t.Fatal(err)
	}
	for p := make([]byte, 1<<10); ; {
		n, err := r.Body.Read(p)
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

func inPieces(text string, size int) io.Reader {
	var readers []io.Reader
	for len(text) > 0 {
		n := min(size, len(text))
		readers = append(readers, strings.NewReader(text[:n]))
		text = text[n:]
	}
	return io.MultiReader(readers...)
}

func TestNothingToExchangeIsNothingToDo(t *testing.T) {
	for name, s := range map[string]*placeholder.Set{"nil": nil, "empty": placeholder.NewSet(nil, nil, nil), "unused": testSet()} {
		r := request(strings.NewReader("a body"))
		x, err := s.Exchange(r)
		if x != nil || err != nil || x.Used() != nil || x.Refused() != nil {
			t.Errorf("%s: %v, %v", name, x, err)
		}
		if b, err := io.ReadAll(r.Body); err != nil || string(b) != "a body" {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
}

// FuzzBody: however a body is cut, each placeholder becomes its value, unless it
// was cut within the first three characters, and nothing else changes.
func FuzzBody(f *testing.F) {
	f.Add("a ", " b", uint16(7))
	f.Add("doze-placeholder-", "doze-", uint16(1))
	f.Add(github[:50], github[1:], uint16(40))
	f.Fuzz(func(t *testing.T, before, after string, size uint16) {
		if len(before)+len(after) > 1<<16 {
			return
		}
		sent := before + github + after
		want := strings.ReplaceAll(sent, github, value)
		for _, length := range []int64{int64(len(sent)), -1} {
			r := request(nil)
			r.Body, r.ContentLength = io.NopCloser(inPieces(sent, int(size)%100+1)), length
			if _, err := testSet().Exchange(r); err != nil {
				if strings.Contains(sent, line) {
					return
				}
				t.Fatal(err)
			}
			got, err := io.ReadAll(r.Body)
			if err != nil {
				t.Fatal(err)
			}
			if length < 0 { // where it was cut
				got = []byte(strings.ReplaceAll(string(got), github, value))
			}
			if string(got) != want {
				t.Errorf("%q became %q, want %q", sent, got, want)
			}
		}
	})
}

func BenchmarkNothingToExchange(b *testing.B) {
	s := testSet()
	r := request(nil)
	r.Header.Set("Accept", "application/json")
	r.Header.Set("User-Agent", "client/1.0")
	r.SetBasicAuth("me", "a password")
	b.ReportAllocs()
	for b.Loop() {
		if x, err := s.Exchange(r); x != nil || err != nil {
			b.Fatal(x, err)
		}
	}
}

func BenchmarkBearer(b *testing.B) {
	s := testSet()
	r := request(nil)
	auth := []string{""}
	r.Header["Authorization"] = auth
	b.ReportAllocs()
	for b.Loop() {
		auth[0] = "Bearer " + github
		if x, err := s.Exchange(r); len(x.Used()) != 1 || err != nil {
			b.Fatal(x, err)
		}
	}
}

func BenchmarkBody(b *testing.B) {
	content := bytes.Repeat([]byte("done and dozed: the quick brown fox jumps over a lazy dog\n"), 1<<14)
	s := testSet()
	p := make([]byte, 32<<10)
	b.SetBytes(int64(len(content)))
	for b.Loop() {
		r := request(nil)
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(content)), -1
		if _, err := s.Exchange(r); err != nil {
			b.Fatal(err)
		}
		for {
			if _, err := r.Body.Read(p); err != nil {
				break
			}
		}
	}
}
